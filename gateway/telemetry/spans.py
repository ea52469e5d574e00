"""A request's place in its trace: ids, the sampling decision, W3C context in and out.

While a request runs there are no spans, only these few numbers: its worker and its log lines need them whether it is sampled
or not. Of a sampled one the spans are made from its record when it has ended, in the exporter's thread
(`gateway.telemetry.recording`, which is imported only when an exporter is configured).

The sampling decision is taken here, by the rule of ``parentbased_traceidratio``.
"""

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.telemetry.w3c import RANDOM, SAMPLED, TraceParent, parse_traceparent, valid_tracestate

if TYPE_CHECKING:
    from gateway.config.schema import Telemetry, Traces
    from gateway.telemetry.record import RequestRecord
    from gateway.telemetry.recording import Recorder

SHUTDOWN: Final = 2.0
"""Seconds that the last spans have to reach their collector."""
_LOW_64: Final = (1 << 64) - 1
# An odd number with its bits well mixed (2^64 divided by the golden ratio): multiples of it are all different.
_STEP: Final = 0x9E3779B97F4A7C15


class Trace(msgspec.Struct, gc=False, eq=False):
    """Where a request stands in a trace.

    The ids of the spans below its own follow from it, so that nothing needs to be kept of them: 1 is the CLIENT span over all
    attempts, 2 the first attempt, 3 the second.

    Attributes:
        number: the trace id, 128 bits.
        span: the id of the SERVER span, 64 bits.
        flags: `SAMPLED` and `RANDOM`; what is sampled is recorded.
        tracestate: of the caller, to travel on.
        parent: the caller's span that this trace continues.
        link: the caller's span that this trace only points at.
    """

    number: int
    span: int
    flags: int
    tracestate: str = ""
    parent: TraceParent | None = None
    link: TraceParent | None = None

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.number:032x}"

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits, of the SERVER span."""
        return f"{self.span:016x}"

    @property
    def sampled(self) -> bool:
        """Whether its spans are recorded, here and at the worker."""
        return bool(self.flags & SAMPLED)

    def below(self, place: int) -> int:
        """The id of a span below the SERVER span: 1 for the CLIENT span, 2 for the first attempt, ..."""
        return (self.span + place * _STEP) & _LOW_64 or 1

    def lines(self, attempt: int) -> bytes:
        """The header fields that continue the trace at the worker of an attempt, counted from 0."""
        line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.number, self.below(attempt + 2), self.flags)
        return b"%btracestate: %b\r\n" % (line, self.tracestate.encode()) if self.tracestate else line


class Tracing:
    """Begins traces and hands finished ones over. One per configuration; nothing of it is global.

    Use from the event loop's thread only.

    Attributes:
        open: sampled requests that have begun and not ended.
    """

    __slots__ = ("_bound", "_inbound", "_random", "_recorder", "open")

    def __init__(self, traces: "Traces", recorder: "Recorder", random: Random | None = None) -> None:
        """`recorder` gets what is sampled; `random` makes the ids (tests give a seeded one)."""
        self._inbound = traces.inbound
        # The SDK's TraceIdRatioBased compares the same 64 bits with the same bound, so whoever samples downstream with
        # the same ratio agrees with us.
        self._bound = round(traces.sample * (1 << 64))
        self._recorder = recorder
        self._random = random or Random()
        self.open = 0

    @classmethod
    def from_config(cls, telemetry: "Telemetry") -> "Tracing | None":
        """What the configuration wants; None when it wants no spans, at no cost: the SDK is not even imported.

        Raises:
            OSError: the file of the `file` exporter cannot be opened.
        """
        if telemetry.traces.exporter == "none":
            return None
        from gateway.telemetry.recording import Recorder  # noqa: PLC0415  # 0.2 s and 20 MB that `none` must not pay

        return cls(telemetry.traces, Recorder.from_config(telemetry))

    @property
    def dropped(self) -> int:
        """Spans that were lost: the queue was full, or the collector refused them or was away."""
        return self._recorder.dropped

    def begin(self, headers: Mapping[str, str]) -> Trace:
        """Begin a request's trace. One that is `Trace.sampled` must be given back to `ended`.

        Args:
            headers: of the request, names in lower case; ``traceparent`` and ``tracestate`` are looked at.
        """
        caller = None if self._inbound == "ignore" else parse_traceparent(headers.get("traceparent"))
        random = self._random
        if caller is not None and self._inbound == "continue":
            state = valid_tracestate(headers.get("tracestate"))
            flags = caller.flags & (SAMPLED | RANDOM)
            self.open += flags & SAMPLED
            return Trace(caller.trace_id, random.getrandbits(64) or 1, flags, state, caller)
        number = random.getrandbits(128) or 1
        if number & _LOW_64 < self._bound:
            self.open += 1
            return Trace(number, random.getrandbits(64) or 1, RANDOM | SAMPLED, "", None, caller)
        return Trace(number, random.getrandbits(64) or 1, RANDOM)

    def ended(self, record: "RequestRecord") -> None:
        """A sampled request has ended: its spans are made and sent, by and by. Never blocks."""
        self.open -= 1
        self._recorder.ended(record)

    def shutdown(self, timeout: float = SHUTDOWN) -> None:
        """Send what is queued, for at most `timeout` seconds. Blocks: call it in a thread."""
        self._recorder.shutdown(timeout)


def seen(traceparent: str | None) -> Trace | None:
    """The caller's place in a trace, of a request of which nothing is recorded here; None if it has none."""
    caller = parse_traceparent(traceparent)
    return None if caller is None else Trace(caller.trace_id, caller.span_id, caller.flags & RANDOM, "", caller)
