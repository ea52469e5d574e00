"""The two header fields of W3C Trace Context (https://www.w3.org/TR/trace-context/), without the SDK."""

import re
from dataclasses import dataclass
from typing import Final

SAMPLED: Final = 0x01
RANDOM: Final = 0x02
"""Level 2: the trace id's last 56 bits are random. Must travel on as it came."""
MAX_TRACESTATE: Final = 4096
"""Characters. At least 512 must be passed on; a longer list than this is no trace state but a burden for the worker."""
MAX_MEMBERS: Final = 32

# version "-" trace-id "-" parent-id "-" flags, lower case. Version ff is invalid, so are ids of zeros only. Versions
# that do not exist yet may have more fields behind a further dash; version 00 has none.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[\x20-\x7e]*)?"
)
_KEY: Final = r"(?:[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}|[a-z0-9][_0-9a-z\-*/]{0,255})"
_MEMBER: Final = re.compile(rf"({_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A caller's place in a trace.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        flags: the low eight bits, of which only `SAMPLED` and `RANDOM` mean something.
    """

    trace_id: int
    span_id: int
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether the caller records this trace."""
        return bool(self.flags & SAMPLED)


def is_valid_traceparent(value: str) -> bool:
    """Whether this is a ``traceparent`` that may travel on to a worker."""
    if value[:2] == "00":
        return len(value) == 55 and _TRACEPARENT.fullmatch(value) is not None
    return _TRACEPARENT.fullmatch(value) is not None


def parse_traceparent(value: str | None) -> TraceParent | None:
    """The caller's place in a trace, or None if there is none or it makes no sense."""
    if value is None or not is_valid_traceparent(value):
        return None
    return TraceParent(int(value[3:35], 16), int(value[36:52], 16), int(value[53:55], 16))


def format_traceparent(trace_id: int, span_id: int, flags: int) -> str:
    """A ``traceparent`` of version 00."""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags & (SAMPLED | RANDOM):02x}"


def valid_tracestate(value: str | None) -> str:
    """`value` if it is a well-formed ``tracestate``, else an empty string: a broken one is dropped, the trace goes on."""
    if not value or len(value) > MAX_TRACESTATE:
        return ""
    keys: set[str] = set()
    for member in value.split(","):
        stripped = member.strip(" \t")
        if not stripped:
            continue
        match = _MEMBER.fullmatch(stripped)
        if match is None or match[1] in keys:
            return ""
        keys.add(match[1])
    return value if 0 < len(keys) <= MAX_MEMBERS else ""
