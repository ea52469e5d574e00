"""The figures. Each is drawn for a width in pixels, for text must not shrink with the screen."""

from bisect import bisect_left
from collections.abc import Sequence

from simulator.report.axes import Axis, clock, from_nothing, linear, logarithmic
from simulator.report.result import Result, last_arrival
from simulator.report.svg import Frame, axes, bar, drawing, line, rule, series_class, text
from simulator.report.words import percent

_POINTS = 200
_COLUMNS = 90
_MOST_ROWS = 40
_LEVELS = 9
_VERY_DIFFERENT = 20
"""Largest to smallest maximum from which on counts are drawn by powers of ten."""
_AFTER = 1.25
"""Time is drawn up to so many times the last arrival: later, queues only empty."""


def horizon(results: Sequence[Result]) -> float:
    """Where time axes end, in seconds."""
    return min(max((run.duration for run in results), default=1.0), _AFTER * last_arrival(results)) or 1.0


def ttft_distribution(results: Sequence[Result], width: int) -> str:
    """Share of requests (y) that had their first token within a time (x, by powers of ten)."""
    lows = [next((ttft for ttft in run.ttfts if ttft > 0), 0.001) for run in results if run.ttfts]
    x = logarithmic(
        max(min(lows, default=0.01), 0.001), max((run.ttfts[-1] for run in results if run.ttfts), default=1.0),
        "time to first token, by powers of ten", _short,
    )  # fmt: skip
    y = Axis(0.0, 1.0, float, tuple((mark, f"{mark:.0%}") for mark in (0, 0.25, 0.5, 0.75, 0.9, 1)), "")
    frame = Frame(width, 300)
    parts = [axes(frame, x, y)]
    for index, run in enumerate(results):
        ranks = _ranks(len(run.ttfts))
        points = [(x.at(run.ttfts[rank]), (rank + 1) / len(run.ttfts)) for rank in ranks]
        parts.append(line(frame, [(points[0][0], 0.0), *points, (1.0, 1.0)] if points else [], series_class(index)))
    return drawing(width, frame.height, "Share of requests by time to first token, one line a policy", parts)


def _short(value: float) -> str:
    return f"{value * 1000:g} ms" if value < 1 else f"{value:,.0f} s"


def _ranks(total: int) -> list[int]:
    """Enough of the ranks below `total` for a line: evenly, and all the more towards the slowest."""
    ranks = {index * (total - 1) // _POINTS for index in range(_POINTS + 1)} if total else set()
    tail = total
    while tail > 1 and total > _POINTS:
        tail = tail * 7 // 8
        ranks.add(total - 1 - tail)
    return sorted(ranks)


def hit_rates(results: Sequence[Result], width: int) -> str:
    """Bars: prompt tokens that nobody had to compute, by tier; marks: what one cache could have spared."""
    row, label = 34, 16
    height = (row + label) * len(results) + 44
    frame = Frame(width, height, left=8, right=60, bottom=38)
    figures = [run.summary() for run in results]
    top = max((float(figure.get("infinite_hit_rate") or 0) for figure in figures), default=1.0)
    top = max([top, 0.05, *(float(figure.get("hit_rate") or 0) for figure in figures)])
    x = linear(min(top * 1.05, 1.0), "share of prompt tokens reused", text=lambda value: f"{value:.0%}")
    parts = [
        *(rule(frame.x(x.at(mark)), frame.top, frame.x(x.at(mark)), frame.y(0), "grid") for mark, _ in x.ticks),
        *(text(frame.x(x.at(mark)), frame.y(0) + 17, words, "tick", anchor="middle") for mark, words in x.ticks),
        text(frame.x(0.5), height - 4, x.label, "label", anchor="middle"),
    ]
    for index, (run, figure) in enumerate(zip(results, figures, strict=True)):
        y = frame.top + index * (row + label)
        parts.append(text(frame.left, y + label - 4, run.policy, "name"))
        at = 0.0
        for tier, strength in (("device", ""), ("l1", " tier1"), ("l2", " tier2")):
            share = float(figure.get(f"hit_rate_{tier}") or 0)
            left, right = frame.x(x.at(at)), frame.x(x.at(at + share))
            parts.append(bar(left, y + label, right - left, row - 14, f"fill {series_class(index)}{strength}"))
            at += share
        ends = [frame.x(x.at(at))]
        for bound, kind in (("pooled_lru_hit_rate", "bound"), ("infinite_hit_rate", "bound endless")):
            if figure.get(bound) is not None:
                place = frame.x(x.at(float(figure[bound])))
                ends.append(place)
                parts.append(rule(place, y + label - 3, place, y + label + row - 11, kind))
        parts.append(text(max(ends) + 6, y + label + 14, percent(figure.get("hit_rate")), "value"))
    return drawing(width, height, "Hit rate of each policy with what a pooled cache would reach", parts)


def load(run: Result, index: int, busiest: int, end: float) -> str:
    """One policy: a row for each worker, time to the right, the stronger the colour the more requests it has (up to `busiest`)."""
    rows = _rows(len(run.workers))
    tall = max(3.0, min(16.0, 128 / len(rows)))
    frame = Frame(350, round(tall * len(rows)) + 44, left=40, right=12, top=4, bottom=40)
    wide = (frame.x(1) - frame.left) / _COLUMNS
    levels: dict[int, list[str]] = {}
    for column in range(_COLUMNS):
        samples = _between(run, end * column / _COLUMNS, end * (column + 1) / _COLUMNS)
        if not samples:
            continue
        for number, members in enumerate(rows):
            total = sum(sample[member] for sample in samples for member in members)
            level = shade(total / (len(samples) * len(members)), busiest)
            if level:
                place = f"M{frame.left + column * wide:.1f} {frame.top + number * tall:.1f}"
                levels.setdefault(level, []).append(f"{place}h{wide:.2f}v{tall - 0.5:.1f}h{-wide:.2f}z")
    x = clock(end)
    names = [(0, run.workers[rows[0][0]]), (len(rows) - 1, run.workers[rows[-1][-1]])] if rows else []
    parts = [
        bar(frame.left, frame.top, frame.x(1) - frame.left, tall * len(rows), "ground"),
        *(f'<path d="{"".join(cells)}" class="heat l{level}"/>' for level, cells in sorted(levels.items())),
        *(
            text(frame.left - 5, frame.top + (number + 0.5) * tall + 4, _cut(name), "tick", anchor="end")
            for number, name in dict(names).items()
        ),
        axes(frame, x, Axis(0.0, 1.0, float, (), "")),
    ]
    return drawing(
        frame.width, frame.height, f"Requests at each worker over time under {run.policy}", parts, f"s{index % 8}"
    )


def shade(value: float, busiest: float) -> int:
    """Strength of the colour from 0 to 9: by the root, so that little load shows too."""
    return min(_LEVELS, round(_LEVELS * (value / busiest) ** 0.5 + 0.49)) if value > 0 and busiest > 0 else 0


def queue(results: Sequence[Result], width: int) -> str:
    """Requests that wait for their first token, all workers together, over time."""
    lines = [[float(sum(sample)) for sample in run.series.pending] for run in results]
    return _over_time(results, lines, width, "requests without a first token yet")


def refused(results: Sequence[Result], width: int) -> str:
    """Requests refused so far, over time."""
    lines = [[float(value) for value in run.series.refused] for run in results]
    return _over_time(results, lines, width, "requests refused so far")


def _over_time(results: Sequence[Result], lines: Sequence[Sequence[float]], width: int, label: str) -> str:
    end = horizon(results)
    x = clock(end)
    tops = [max(values, default=0.0) for values in lines]
    most, least = max(tops, default=0.0), max(min(tops, default=0.0), 1.0)
    y = from_nothing(most, label) if most > _VERY_DIFFERENT * least else linear(max(most, 1.0), label)
    frame = Frame(width, 280, top=24)
    parts = [
        axes(frame, x, y),
        text(8, 12, y.label + (" (by powers of ten)" if most > _VERY_DIFFERENT * least else ""), "label"),
    ]
    for index, (run, values) in enumerate(zip(results, lines, strict=True)):
        points = [
            (x.at(time), y.at(value)) for time, value in zip(run.series.times, values, strict=True) if time <= end
        ]
        parts.append(line(frame, points, series_class(index)))
    return drawing(width, frame.height, f"{label.capitalize()}, one line a policy", parts)


def _between(run: Result, start: float, end: float) -> Sequence[Sequence[int]]:
    """The samples of [start, end), or the last one before it while the run goes on."""
    times = run.series.times
    first, last = bisect_left(times, start), bisect_left(times, end)
    if first == last:
        first = max(first - 1, 0)
        last = first + 1 if start <= run.duration and times else first
    return run.series.in_flight[first:last]


def _rows(workers: int) -> list[range]:
    """Workers by row: one each, or some neighbours together where there are too many."""
    together = -(-workers // _MOST_ROWS) if workers else 1
    return [range(first, min(first + together, workers)) for first in range(0, workers, together)]


def _cut(name: str) -> str:
    return name if len(name) <= 6 else f"{name[:5]}…"
