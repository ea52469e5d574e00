"""Traces: one SERVER span per request, one CLIENT span per attempt on a worker, W3C context in and out.

The sampling decision is taken here, by the rule of ``parentbased_traceidratio``, before the SDK is asked: a request that
is not recorded only gets the ids that its worker and its log line need. `gateway.telemetry.recording` holds what touches
the SDK, and is imported only when an exporter is configured.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from gateway.telemetry.w3c import (
    RANDOM,
    format_traceparent,
    is_valid_traceparent,
    parse_traceparent,
    valid_tracestate,
)

if TYPE_CHECKING:
    from gateway.config.schema import Telemetry, Traces
    from gateway.fleet.worker import Worker
    from gateway.telemetry.recording import Recorder

__all__ = ["AttemptSpan", "AttributeValue", "ServerSpan", "Tracing", "is_valid_traceparent"]

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]

SHUTDOWN: Final = 2.0
"""Seconds that the last spans have to reach their collector."""
_LOW_64: Final = (1 << 64) - 1


class AttemptSpan:
    """One attempt of a request that is not recorded: only the context for the worker."""

    __slots__ = ("_traceparent", "_tracestate")

    def __init__(self, traceparent: str, tracestate: str) -> None:
        self._traceparent = traceparent
        self._tracestate = tracestate

    def inject(self) -> list[tuple[str, str]]:
        """The header fields that continue the trace at the worker."""
        if self._tracestate:
            return [("traceparent", self._traceparent), ("tracestate", self._tracestate)]
        return [("traceparent", self._traceparent)]

    def end(self, status: int | None, error_type: str | None, first_byte: float | None) -> None:
        """The attempt is over.

        Args:
            status: of the worker's answer; None if it gave none.
            error_type: low-cardinality name of what went wrong, or None.
            first_byte: seconds from the attempt's start to the first byte of the answer, or None.
        """


class ServerSpan:
    """A request that is not recorded.

    Attributes:
        trace_id: 32 hexadecimal digits, for logs and headers.
        recording: whether attributes are kept; what only a span wants need not be computed otherwise.
    """

    __slots__ = ("_flags", "_span_id", "_tracestate", "trace_id")
    recording: bool = False

    def __init__(self, trace_id: int, span_id: int, flags: int, tracestate: str) -> None:
        self.trace_id = f"{trace_id:032x}"
        self._span_id = span_id
        self._flags = flags
        self._tracestate = tracestate

    def attempt(self, worker: "Worker", model: str, resend: int) -> AttemptSpan:  # noqa: ARG002  # subclass records
        """Begin an attempt.

        Args:
            worker: where it goes.
            model: the fleet's name.
            resend: 0 for the first attempt, 1 for the first retry, ...
        """
        traceparent = format_traceparent(int(self.trace_id, 16), self._span_id, self._flags)
        return AttemptSpan(traceparent, self._tracestate)

    def set(self, name: str, value: AttributeValue) -> None:
        """Set one attribute; `name` comes from `gateway.telemetry.names`."""

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Add an event that happens now."""

    def end(
        self,
        status: int,
        outcome: str,
        error_type: str | None,
        *,
        model: str | None = None,
        worker_id: str | None = None,
        request_id: str | None = None,
        policy: str | None = None,
        attempts: int = 0,
        first_byte: float | None = None,
        bytes_out: int = 0,
    ) -> None:
        """The request is over. Calling it again does nothing.

        Args:
            status: of the answer that the client got, 0 if it got none.
            outcome: how it ended (`gateway.telemetry.metrics.Outcome` is a string).
            error_type: low-cardinality name of what went wrong, or None.
            model: the fleet's name.
            worker_id: who answered.
            request_id: as sent back in ``x-request-id``.
            policy: by which the worker was chosen.
            attempts: how many workers were asked.
            first_byte: seconds from the start to the first answer byte, or None.
            bytes_out: answer bytes written to the client.
        """


class Tracing:
    """Makes spans. One per configuration; nothing of it is global.

    Use from the event loop's thread only.
    """

    __slots__ = ("_bound", "_inbound", "_random", "_recorder")

    def __init__(self, traces: "Traces", recorder: "Recorder", random: Random | None = None) -> None:
        """`recorder` gets what is sampled; `random` makes the ids (tests give a seeded one)."""
        self._inbound = traces.inbound
        # The SDK's TraceIdRatioBased compares the same 64 bits with the same bound, so whoever samples downstream with
        # the same ratio agrees with us.
        self._bound = round(traces.sample * (1 << 64))
        self._recorder = recorder
        self._random = random or Random()

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
        """Sampled spans that were lost: the queue was full, or the collector refused them or was away."""
        return self._recorder.dropped

    @property
    def open(self) -> int:
        """Recorded spans that have begun and not ended."""
        return self._recorder.open

    def server_span(self, method: str, route: str, headers: Mapping[str, str]) -> ServerSpan:
        """Begin a request's span.

        Args:
            method: of the request.
            route: the API path, or a low-cardinality word for all others.
            headers: of the request, names in lower case; ``traceparent`` and ``tracestate`` are looked at.
        """
        caller = None if self._inbound == "ignore" else parse_traceparent(headers.get("traceparent"))
        if caller is not None and self._inbound == "continue":
            tracestate = valid_tracestate(headers.get("tracestate"))
            if caller.sampled:
                return self._recorder.server_span(method, route, parent=caller, tracestate=tracestate)
            return ServerSpan(caller.trace_id, self._random.getrandbits(64) or 1, caller.flags, tracestate)
        trace_id = self._random.getrandbits(128) or 1
        if trace_id & _LOW_64 < self._bound:
            return self._recorder.server_span(method, route, trace_id=trace_id, link=caller)
        return ServerSpan(trace_id, self._random.getrandbits(64) or 1, RANDOM, "")

    def shutdown(self, timeout: float = SHUTDOWN) -> None:
        """Send what is queued, for at most `timeout` seconds. Blocks: call it in a thread."""
        self._recorder.shutdown(timeout)
