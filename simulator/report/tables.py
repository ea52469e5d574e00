"""The summaries' figures as HTML tables."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from simulator.report.reading import Figures
from simulator.report.svg import COLOURS
from simulator.report.words import NOTHING, count, exact_seconds, percent

_LESS, _MORE, _NEITHER = -1, 1, 0
_FIGURES: Mapping[str, tuple[str, str, int]] = {
    "requests": ("Requests", "count", _NEITHER),
    "refused": ("Refused", "count", _LESS),
    "failed": ("Failed", "count", _LESS),
    "ttft_mean_s": ("Time to first token, mean", "seconds", _LESS),
    "ttft_p50_s": ("Time to first token, p50", "seconds", _LESS),
    "ttft_p90_s": ("Time to first token, p90", "seconds", _LESS),
    "ttft_p99_s": ("Time to first token, p99", "seconds", _LESS),
    "e2e_mean_s": ("End to end, mean", "seconds", _LESS),
    "hit_rate": ("Hit rate, of prompt tokens", "percent", _MORE),
    "hit_rate_device": ("… in device memory", "percent", _NEITHER),
    "hit_rate_l1": ("… loaded from l1", "percent", _NEITHER),
    "hit_rate_l2": ("… loaded from l2", "percent", _NEITHER),
    "predicted_hit_rate": ("Hit rate that the policy expected", "percent", _NEITHER),
    "pooled_lru_hit_rate": ("Bound: one pooled LRU cache", "percent", _NEITHER),
    "infinite_hit_rate": ("Bound: an endless cache", "percent", _NEITHER),
    "output_tokens_per_s": ("Output tokens per second", "count", _MORE),
    "load_max_over_mean": ("Busiest worker's load / mean", "ratio", _LESS),
    "duration_s": ("Last answer ended after", "seconds", _NEITHER),
    "policy_faults": ("Faults of the policy", "count", _LESS),
    "wall_s": ("The replay took", "seconds", _NEITHER),
}
_WRITERS: Mapping[str, Callable[[float], str]] = {
    "seconds": exact_seconds,
    "percent": percent,
    "count": count,
    "ratio": "{:.2f}".format,
}
_BRIEF = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "hit_rate", "refused")
_HEADS = ("TTFT mean", "p50", "p90", "p99", "Hit rate", "Refused")


def swatch(index: int) -> str:
    """A policy's colour, as in the figures."""
    return f'<i class="swatch s{index % COLOURS} d{index // 4 % 3}"></i>'


def brief(figures: Figures) -> str:
    """A line for each policy with what matters most; the best of a column in bold."""
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    rows = []
    for index, (run, summary) in enumerate(figures):
        cells = "".join(_cell(key, summary, _best(key, figures)) for key in _BRIEF)
        rows.append(f"<tr><th>{swatch(index)}{escape(run.policy)}</th>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr><th>Policy</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def full(figures: Figures) -> str:
    """All figures, a line each; the best of a line in bold."""
    known = {key: None for _, summary in figures for key in summary if key != "hints"}
    keys = [*(key for key in _FIGURES if key in known), *(key for key in known if key not in _FIGURES)]
    heads = "".join(f"<th>{swatch(index)}{escape(run.policy)}</th>" for index, (run, _) in enumerate(figures))
    rows = []
    for key in keys:
        best = _best(key, figures)
        cells = "".join(_cell(key, summary, best) for _, summary in figures)
        rows.append(f'<tr><th title="{escape(key)}">{escape(_FIGURES.get(key, (key, "", 0))[0])}</th>{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr><th>Figure</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


_FATES = ("offered", "skipped", "refused", "failed", "accepted", "confirmed", "useful", "wasted", "held_back")


def hints(figures: Figures) -> str:
    """What became of the hints: a line for each policy and rule; empty where no rule gave any."""
    rows = []
    for index, (run, summary) in enumerate(figures):
        for rule, row in (summary.get("hints") or {}).items():
            if row.get("offered"):
                cells = "".join(f"<td>{count(row.get(fate) or 0)}</td>" for fate in _FATES)
                rows.append(f"<tr><th>{swatch(index)}{escape(run.policy)}: {escape(rule)}</th>{cells}</tr>")
    if not rows:
        return ""
    heads = "".join(f"<th>{fate.replace('_', ' ')}</th>" for fate in _FATES)
    return f'<div class="scroll"><table><thead><tr><th>Rule</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _best(key: str, figures: Figures) -> str | None:
    """The best value as written, if one is better than another."""
    direction = _FIGURES.get(key, ("", "", _NEITHER))[2]
    values = [float(summary[key]) for _, summary in figures if isinstance(summary.get(key), int | float)]
    if direction == _NEITHER or len(values) < 2 or min(values) == max(values):
        return None
    return _write(key, min(values) if direction == _LESS else max(values))


def _cell(key: str, summary: Mapping[str, Any], best: str | None) -> str:
    words = _write(key, summary.get(key))
    return f"<td><b>{escape(words)}</b></td>" if words == best else f"<td>{escape(words)}</td>"


def _write(key: str, value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    kind = _FIGURES.get(key, ("", "", 0))[1]
    return _WRITERS[kind](value) if kind else f"{value:g}"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values of a run."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"
