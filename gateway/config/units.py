"""Durations and sizes as people write them: ``250ms``, ``30s``, ``5m``, ``2h``; ``64KiB``, ``64MiB``, ``1GiB``, ``10MB``."""

import re
from decimal import Decimal

DURATIONS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
"""Seconds in each unit."""

SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
"""Bytes in each unit."""

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]{1,3})")
_DIGITS = 30
"""Longer numbers than this are no number that anything here could mean."""


def parse_integer(text: str) -> int | None:
    """A decimal whole number, underscores allowed between digits; None for anything else (``010`` too: is it octal?)."""
    return int(text.replace("_", "")) if len(text) <= _DIGITS and _INTEGER.fullmatch(text) else None


def parse_number(text: str) -> float | None:
    """A finite decimal number; None for anything else."""
    if len(text) > _DIGITS or not _NUMBER.fullmatch(text):
        return None
    value = float(text.replace("_", ""))
    return value if abs(value) != float("inf") else None


def parse_duration(text: str) -> float | None:
    """Seconds from a number or a number with a unit of `DURATIONS`; None for anything else."""
    if (plain := parse_number(text)) is not None:
        return plain
    match = _QUANTITY.fullmatch(text)
    factor = DURATIONS.get(match[2]) if match else None
    return float(Decimal(match[1]) * factor) if match and factor is not None else None


def parse_size(text: str) -> int | None:
    """Bytes from a whole number or a number with a unit of `SIZES` that gives whole bytes; None for anything else."""
    if (plain := parse_integer(text)) is not None:
        return plain
    match = _QUANTITY.fullmatch(text)
    factor = SIZES.get(match[2]) if match else None
    if not match or factor is None:
        return None
    size = Decimal(match[1]) * factor
    return int(size) if size == size.to_integral_value() else None


def format_duration(seconds: float) -> str:
    """The shortest exact form that `parse_duration` reads back."""
    exact = Decimal(repr(seconds))
    for unit in ("h", "m", "s", "ms"):
        count = exact / DURATIONS[unit]
        if exact and count == count.to_integral_value() and count < 10**15 and count * DURATIONS[unit] == exact:
            return f"{int(count)}{unit}"
    return repr(seconds) if exact else "0"


def format_size(size: int) -> str:
    """The shortest exact form that `parse_size` reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % SIZES[unit] == 0:
            return f"{size // SIZES[unit]}{unit}"
    return str(size)
