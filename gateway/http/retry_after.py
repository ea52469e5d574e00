"""The `Retry-After` field of a worker's answer: when it wants to be asked again."""

from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import Final

_NAME: Final = b"retry-after:"
_LONGEST: Final = 86_400.0
"""Seconds; whatever says more means no more."""


def retry_after_of(lines: Iterable[bytes], wall: float) -> float | None:
    """Seconds from `wall` (since 1970) on; None: the field is missing, makes no sense, or lies in the past.

    Args:
        lines: header lines as of `gateway.http.headers.response_line`.
        wall: the time now, for the form that is a date (RFC 9110, section 10.2.3).
    """
    for line in lines:
        if line[:12].lower() == _NAME:
            seconds = _seconds(line[12:].strip().decode("latin-1"), wall)
            return min(seconds, _LONGEST) if seconds > 0 else None
    return None


def _seconds(value: str, wall: float) -> float:
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    try:
        return at.timestamp() - wall if at.tzinfo is not None else 0.0
    except (ValueError, OverflowError):
        return 0.0
