"""Scales of plots: where a value stands, and which values are written beside."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high`, with marks.

    Attributes:
        low: the value at 0.
        high: the value at 1; above `low`.
        project: a value to a number in which the scale is linear.
        ticks: (value, text), ascending.
        label: what is measured, with its unit.
    """

    low: float
    high: float
    project: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]
    label: str

    def at(self, value: float) -> float:
        """Where `value` stands between 0 and 1; what lies outside is put on the edge."""
        low, high = self.project(self.low), self.project(self.high)
        return (self.project(min(max(value, self.low), self.high)) - low) / (high - low)


def linear(high: float, label: str, *, marks: int = 5, text: Callable[[float], str] | None = None) -> Axis:
    """From 0 to `high` or the next round number above it; some `marks` marks at round numbers."""
    high = high if 0 < high < float("inf") else 1.0
    step = _round_step(high / marks)
    top = ceil(high / step - 1e-9) * step
    digits = max(0, -floor(log10(step)))
    write = text or (lambda value: f"{value:,.{digits}f}")
    ticks = tuple((index * step, write(index * step)) for index in range(round(top / step) + 1))
    return Axis(0.0, top, float, ticks, label)


def logarithmic(low: float, high: float, label: str, text: Callable[[float], str]) -> Axis:
    """From a power of ten at or below `low` (above 0) to one at or above `high`; marks at powers of ten."""
    first = floor(log10(low) + 1e-9)
    last = max(ceil(log10(max(high, low)) - 1e-9), first + 1)
    ticks = tuple((10.0**power, text(10.0**power)) for power in range(first, last + 1))
    return Axis(10.0**first, 10.0**last, log10, ticks, label)


def from_nothing(high: float, label: str) -> Axis:
    """For counts of very different size, 0 among them: linear near 0, by powers of ten above."""
    last = max(1, ceil(log10(max(high, 1.0)) - 1e-9))
    ticks = ((0.0, "0"), *((10.0**power, f"{10**power:,}") for power in range(last + 1)))
    return Axis(0.0, 10.0**last, lambda value: log10(1 + value), ticks, label)


def clock(high: float) -> Axis:
    """Time from the start in seconds, written in seconds, minutes or hours, whatever suits `high`; ends at `high`."""
    high = high if high > 0 else 1.0
    unit, name = next(((unit, name) for unit, name in ((3600.0, "h"), (60.0, "min")) if high >= 2 * unit), (1.0, "s"))
    step = _round_step(high / unit / 5)
    digits = max(0, -floor(log10(step)))
    ticks = tuple(
        (index * step * unit, f"{index * step:,.{digits}f}") for index in range(floor(high / unit / step) + 1)
    )
    return Axis(0.0, high, float, ticks, f"{name} from the start")


def _round_step(size: float) -> float:
    """1, 2 or 5 times a power of ten, at least `size`."""
    power = 10.0 ** floor(log10(size))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= size * (1 - 1e-9))
