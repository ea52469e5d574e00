"""Shapes of plots as SVG text. Colours are the page's (classes ``s0`` to ``s7``), so both themes and print have theirs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from simulator.report.axes import Axis

COLOURS = 8
"""Series with colours of their own; further ones have them again, dashed otherwise."""

_LETTER = 6.6
"""Pixels, about, of a letter of the marks."""


def series_class(index: int) -> str:
    """Classes of the series with this number: a colour, and dashes from the fifth on."""
    return f"s{index % COLOURS} d{index // 4 % 3}"


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle inside the axes, in pixels of the drawing."""

    width: int
    height: int
    left: int = 46
    right: int = 12
    top: int = 8
    bottom: int = 38

    def x(self, share: float) -> float:
        """From 0 at the left to 1."""
        return self.left + share * (self.width - self.left - self.right)

    def y(self, share: float) -> float:
        """From 0 at the bottom to 1."""
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """Words; `anchor`: start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" class="{kind}"/>'


def line(frame: Frame, points: Iterable[tuple[float, float]], kind: str) -> str:
    """A line through (share of the width, share of the height)."""
    path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    return f'<path d="M{path}" class="line {kind}"/>' if path else ""


def axes(frame: Frame, x: Axis, y: Axis) -> str:
    """Grid, marks and labels."""
    parts: list[str] = []
    for value, words in y.ticks:
        height = frame.y(y.at(value))
        parts += [
            rule(frame.left, height, frame.x(1), height, "grid"),
            text(frame.left - 6, height + 4, words, "tick", anchor="end"),
        ]
    taken = float("inf")
    for value, words in reversed(x.ticks):
        place, wide = frame.x(x.at(value)), _LETTER * len(words)
        # At the edge the words would leave the drawing; and where two would touch, the right ones stay.
        right = min(place + wide / 2, frame.x(1) + 4)
        parts.append(rule(place, frame.y(0), place, frame.y(0) + 4, "axis"))
        if right < taken:
            parts.append(text(right, frame.y(0) + 17, words, "tick", anchor="end"))
            taken = right - wide - _LETTER
    parts += [
        rule(frame.left, frame.y(0), frame.x(1), frame.y(0), "axis"),
        text(frame.x(0.5), frame.height - 4, x.label, "label", anchor="middle"),
    ]
    return "".join(parts)


def drawing(width: int, height: int, title: str, parts: Sequence[str], kind: str = "") -> str:
    """The whole; `title` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width} {height}" class="{kind}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
