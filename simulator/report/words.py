"""Numbers as a reader wants them."""

from collections.abc import Sequence
from math import isnan
from typing import Final

NOTHING: Final = "\N{EN DASH}"
"""Where there is nothing to tell."""
TIMES: Final = "\N{MULTIPLICATION SIGN}"


def seconds(value: float | None) -> str:
    """A duration: ``85 ms``, ``3.20 s``, ``12.4 min``."""
    if value is None or isnan(value):
        return NOTHING
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 99.5:
        return f"{value:.2f} s" if value < 9.95 else f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 5400 else f"{value / 3600:.1f} h"


def exact_seconds(value: float | None) -> str:
    """A duration in seconds, three digits or more, for columns in which values are compared: ``0.085 s``, ``168 s``."""
    if value is None or isnan(value):
        return NOTHING
    digits = 3 if value < 0.9995 else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} s"


def percent(share: float | None) -> str:
    """``55.8 %``."""
    return NOTHING if share is None or isnan(share) else f"{share * 100:.1f} %"


def count(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def times(ratio: float) -> str:
    """How many times as much: ``1.2 times``, ``11 times``."""
    return f"{ratio:.2f} times" if ratio < 2 else f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
