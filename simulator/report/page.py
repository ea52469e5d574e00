"""The document: one HTML file without a script and without anything from elsewhere; light, dark and on paper."""

import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from simulator.report import plots, reading, tables
from simulator.report.result import Result
from simulator.report.words import TIMES, count

_FULL, _WIDE, _NARROW = 1072, 520, 350
"""Pixels: a desktop's page, half of it, and a phone."""


_ABOUT_FIGURES = "The best of a line is in bold. Hit rates are shares of prompt tokens."
_ABOUT_REPLAY = (
    "Policies, prefix map and load counters are the gateway's own; the workers are models of workers. Time is virtual: "
    "nothing here says how long the gateway itself takes."
)
_ABOUT_HINTS = (
    "What workers were told to keep and fetch, by the rule that wished it. Useful: it was asked for again and held before the hint "
    "expired, or, if it was to be let go, was not asked for. What is neither useful nor wasted yet was still waited for at the end."
)


def write_html(
    results: Sequence[Result],
    path: Path | str,
    *,
    command: str | None = None,
    notes: Sequence[str] = (),
    made: datetime | None = None,
) -> None:
    """Write the report on some policies' replays of one workload.

    Args:
        results: one for each policy, at least one.
        path: the file, which is replaced.
        command: how the replay can be done again; None: this process' command line.
        notes: plain sentences on the workload.
        made: when; None: now.

    Raises:
        OSError: the file cannot be written.
        ValueError: no result.
    """
    Path(path).write_text(html(results, command=command, notes=notes, made=made), encoding="utf-8")


def html(
    results: Sequence[Result],
    *,
    command: str | None = None,
    notes: Sequence[str] = (),
    made: datetime | None = None,
) -> str:
    """The report's text; see `write_html`."""
    if not results:
        raise ValueError("a report needs at least one result")
    figures = [(run, run.summary()) for run in results]
    first, summary = figures[0]
    title = f"Replay of {first.workload}"
    facts = [
        ("Requests", count(summary.get("requests") or 0)),
        ("Workers", f"{len(first.workers)} {TIMES} {first.profile}"),
        ("Seed", str(first.seed)),
        ("Made", f"{made or datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("Versions", f"warmroute {_version()}, Python {platform.python_version()}"),
    ]
    legend = _legend(results)
    body = [
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(reading.lead(figures))}</p>{tables.facts(facts)}</header>',
        f'<section class="wide">{tables.brief(figures)}</section>',
        _figure("Time to first token", legend, reading.distribution(figures), _both(plots.ttft_distribution, results)),
        _figure("Reuse", "", reading.reuse(figures), _both(plots.hit_rates, results)),
        *_waiting(figures, legend),
        _loads(figures),
        *_hints(figures),
        _section("All figures", f"<p>{_ABOUT_FIGURES}</p>{tables.full(figures)}"),
        _section("How to do it again", f"<pre>{escape(_command(command))}</pre>{_paragraphs([*notes, _ABOUT_REPLAY])}"),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f'<section class="wide"><h2>{title}</h2>{content}</section>'


def _paragraphs(sentences: Sequence[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _waiting(figures: reading.Figures, legend: str) -> list[str]:
    """The queue and, if there were any, refused requests beside it."""
    results = [run for run, _ in figures]
    said = reading.waiting(figures)
    if not any(summary.get("refused") for _, summary in figures):
        return [_figure("Waiting", legend, said, _both(plots.queue, results, _FULL), wide=True)]
    return [
        _figure("Waiting", legend, said, _both(plots.queue, results)),
        _figure("Refused", legend, reading.lost(figures), _both(plots.refused, results)),
    ]


def _hints(figures: reading.Figures) -> list[str]:
    """What the workers were told, if they were told anything."""
    table = tables.hints(figures)
    return [_section("Hints", f"<p>{_ABOUT_HINTS}</p>{table}")] if table else []


def _loads(figures: reading.Figures) -> str:
    results = [run for run, _ in figures]
    end = plots.horizon(results)
    busiest = max((max(sample, default=0) for run in results for sample in run.series.in_flight), default=0)
    panels = "".join(
        f'<div class="panel"><h3>{tables.swatch(index)}{escape(run.policy)}</h3>{plots.load(run, index, busiest, end)}</div>'
        for index, run in enumerate(results)
    )
    return (
        f'<figure class="wide"><h2>Load of each worker</h2><p>{escape(reading.balance(figures))}</p>'
        f'<div class="panels">{panels}</div>{_scale(busiest)}</figure>'
    )


def _figure(title: str, legend: str, words: str, drawn: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><h2>{title}</h2>{legend}{drawn}<figcaption>{escape(words)}</figcaption></figure>"


def _both(plot: Callable[[Sequence[Result], int], str], results: Sequence[Result], width: int = _WIDE) -> str:
    """The plot for a desktop and for a phone; the style shows one."""
    return f'<div class="desk">{plot(results, width)}</div><div class="phone">{plot(results, _NARROW)}</div>'


def _legend(results: Sequence[Result]) -> str:
    items = "".join(f"<li>{tables.swatch(index)}{escape(run.policy)}</li>" for index, run in enumerate(results))
    return f'<ul class="legend">{items}</ul>'


def _scale(busiest: int) -> str:
    """What the load maps' shades stand for."""
    # The middle of a shade, by the inverse of `plots.shade`.
    cells = "".join(
        f'<span><svg viewBox="0 0 30 10"><rect width="30" height="10" class="ground"/>'
        f'<rect width="30" height="10" class="heat l{level}"/></svg>{busiest * (level / 9) ** 2:.0f}</span>'
        for level in (0, 3, 5, 7, 9)
    )
    return f'<p class="scale s0">requests at a worker: {cells}</p>'


def _command(command: str | None) -> str:
    return command if command is not None else shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _version() -> str:
    try:
        return version("warmroute")
    except PackageNotFoundError:
        return "(not installed)"


def _style() -> str:
    return resources.files("simulator.report").joinpath("style.css").read_text(encoding="utf-8")
