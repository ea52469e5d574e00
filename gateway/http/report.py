"""What is said of a request that has ended: to the counters, to its span, to the log."""

from typing import TYPE_CHECKING

from gateway.telemetry.metrics import Metrics, Outcome

if TYPE_CHECKING:
    from gateway.http.journey import Journey
    from gateway.telemetry.logs import RequestLog


def report(journey: "Journey", duration: float, metrics: Metrics, log: "RequestLog", *, successes: bool) -> None:
    """Count `journey` out after `duration` seconds, end its span, and log it if it failed or `successes` are wanted too."""
    fleet = journey.fleet
    model = fleet.name if fleet is not None else ""
    span = journey.span
    metrics.request_ended(
        model,
        journey.route.path,
        journey.status,
        journey.outcome,
        duration,
        journey.first_byte,
        journey.bytes_out,
        journey.error_type,
        span.trace_id if span is not None and span.recording else None,
    )
    worker_id = journey.worker.id if journey.worker is not None else None
    if span is not None:
        span.end(
            journey.status,
            journey.outcome,
            journey.error_type,
            model=model or None,
            worker_id=worker_id,
            request_id=journey.request_id.decode(),
            policy=fleet.policy_name if fleet is not None else None,
            attempts=journey.attempts,
            first_byte=journey.first_byte,
            bytes_out=journey.bytes_out,
        )
    if successes or journey.outcome is Outcome.FAILED:
        log.ended(
            request_id=journey.request_id.decode(),
            trace_id=span.trace_id if span is not None else None,
            model=model or None,
            path=journey.route.path,
            worker=worker_id,
            status=journey.status,
            outcome=journey.outcome,
            error_type=journey.error_type,
            duration=duration,
            first_byte=journey.first_byte,
            attempts=journey.attempts,
            bytes_out=journey.bytes_out,
        )
