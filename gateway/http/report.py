"""What is said of a request that has ended: to the counters, to its trace, to the log, to those who look at requests."""

from typing import TYPE_CHECKING

from gateway.overload.guard import REASON
from gateway.telemetry.capture import Capturing
from gateway.telemetry.logs import RequestLog
from gateway.telemetry.metrics import Metrics, Outcome
from gateway.telemetry.record import stripped
from gateway.telemetry.request_log import Entry, RequestLogWriter
from policies.keys import SESSION_COOKIE, SESSION_FIELDS, SESSION_HEADER, session_key

if TYPE_CHECKING:
    from gateway.config.schema import Telemetry
    from gateway.http.journey import Journey
    from gateway.telemetry.decisions import DecisionLog, RequestRecord

SHED = frozenset({REASON, "deadline_unreachable", "deadline_missed", "queue_full", "queue_timeout", "shed"})
"""Refusals that come in floods when there is too much to do: counted like all others, recorded like successes, and in no log line each."""
_SESSION_PATHS = tuple((name,) for name in SESSION_FIELDS)


class Reports:
    """Where reports of requests go, for one configuration.

    Attributes:
        metrics: counts every request.
        recording: requests are recorded whether they are sampled or not.
        wants_usage: what an answer cost is to be read even where nothing is to be compared with it.
    """

    __slots__ = (
        "_capturing",
        "_decisions",
        "_lines",
        "_log_successes",
        "_writer",
        "metrics",
        "recording",
        "wants_usage",
    )

    def __init__(
        self,
        telemetry: "Telemetry",
        metrics: Metrics,
        decisions: "DecisionLog",
        writer: RequestLogWriter | None,
    ) -> None:
        self.metrics = metrics
        self._decisions = decisions
        self._writer = writer
        self._lines = RequestLog(telemetry.logs.requests)
        self._log_successes = telemetry.logs.requests > 0
        self._capturing = Capturing(telemetry.capture)
        self.recording = telemetry.decisions.count > 0 or writer is not None
        self.wants_usage = writer is not None

    def begun(self, journey: "Journey") -> None:
        """A request has come. Each call is followed by exactly one `ended`."""
        self.metrics.request_started()
        journey.wants_usage = self.wants_usage
        if self.recording:
            self._decisions.running_now.add(journey)

    def ended(self, journey: "Journey") -> None:
        """Count `journey` out, hand over its spans and its record, log it where that is wanted."""
        trace = journey.trace
        sampled = trace is not None and trace.sampled
        fleet = journey.fleet
        model = fleet.name if fleet is not None else ""
        first_byte = journey.first_byte
        self.metrics.request_ended(
            model,
            journey.route.path,
            journey.status,
            journey.outcome,
            journey.duration,
            first_byte,
            journey.bytes_out,
            journey.error_type,
            trace.trace_id if trace is not None and sampled else None,
        )
        shed = journey.error_type in SHED
        if self.recording or sampled:
            self._decisions.running_now.discard(journey)
            if (
                sampled
                or self._writer is not None
                or self._decisions.wants(first_byte or 0.0, None if shed else journey.error_type, journey.end)
            ):
                self._recorded(journey, sampled=sampled)
            elif journey.pace is not None and (gaps := journey.pace.gaps()) is not None:
                self.metrics.paused(model, gaps.max)
        if self._log_successes or (journey.outcome is Outcome.FAILED and not shed):
            self._lines.ended(
                request_id=journey.request_id.decode(),
                trace_id=trace.trace_id if trace is not None else None,
                model=model or None,
                path=journey.route.path,
                worker=journey.worker.id if journey.worker is not None else None,
                status=journey.status,
                outcome=journey.outcome,
                error_type=journey.error_type,
                duration=journey.duration,
                first_byte=first_byte,
                attempts=len(journey.attempts),
                bytes_out=journey.bytes_out,
            )

    def _recorded(self, journey: "Journey", *, sampled: bool) -> None:
        journey.captured = self._capturing.of(journey.body)
        record = journey.record()
        if record.gaps is not None and journey.fleet is not None:
            self.metrics.paused(journey.fleet.name, record.gaps.max)
        if self._writer is not None and journey.route_request is not None:
            self._writer.write(self._entry(journey, record))
        if journey.route_request is not None:
            stripped(journey.route_request)
        self._decisions.add(record)
        if sampled and journey.tracing is not None:
            journey.tracing.ended(record)

    @staticmethod
    def _entry(journey: "Journey", record: "RequestRecord") -> Entry:
        request, lookup = journey.route_request, journey.lookup
        assert request is not None
        session = session_key(request, SESSION_HEADER, _SESSION_PATHS, SESSION_COOKIE)
        if lookup is None or not lookup.chains:
            return Entry(record, session=session)
        chain = next(iter(lookup.chains.values()))
        return Entry(record, chain.hashes, chain.block_size, session)
