"""A finished request as OpenTelemetry spans.

    SERVER  POST /v1/chat/completions        events: admission, tokenize, route, first byte, end
      CLIENT  chat MODEL                     over all attempts
        CLIENT  POST                         one per attempt; the worker's own spans hang below it

Made from the request's record in the exporter's thread, so that a sampled request costs the event loop no more than one that
is not. Policies are the loop's: here they are not asked, and the route event has what the decision itself has said.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self

import orjson
from opentelemetry.sdk.resources import Resource

from gateway import __version__
from gateway.telemetry import names, otlp
from gateway.telemetry.export import BoundedProcessor, Finished, exporter_for
from gateway.telemetry.record import HEDGE_LOST, wall_time
from gateway.telemetry.spans import Trace
from gateway.telemetry.table import cached_of, lines_of, sentence_of, ttft_of

if TYPE_CHECKING:
    from gateway.config.schema import Telemetry
    from gateway.residency.live import Note
    from gateway.telemetry.record import Attempt, Decided, RequestRecord

ROWS: Final = 16
"""Candidates in a route event."""
TABLE_BYTES: Final = 4096
"""Bytes of their table; where they do not fit, half as many are shown."""

_SCOPE: Final = otlp.scope("warmroute", __version__)


class Recorder:
    """Turns finished requests into spans and hands them to an exporter. Samples nothing: the decision was `Tracing`'s."""

    __slots__ = ("_processor", "_resource")

    def __init__(self, service_name: str, processor: BoundedProcessor) -> None:
        self._processor = processor
        self._resource = resource_of(service_name)

    @classmethod
    def from_config(cls, telemetry: "Telemetry") -> Self:
        """A recorder with the configured exporter.

        Raises:
            OSError: the file of the `file` exporter cannot be opened.
        """
        return cls(telemetry.service_name, BoundedProcessor(exporter_for(telemetry.traces)))

    @property
    def dropped(self) -> int:
        """Spans that were lost."""
        return self._processor.dropped

    def ended(self, record: "RequestRecord") -> None:
        """Queue a sampled request. Never blocks."""
        count = 2 + len(record.attempts) if record.attempts else 1
        self._processor.on_end(Finished(self._encoded, record, count))

    def _encoded(self, records: "Sequence[RequestRecord]") -> bytes:
        return encoded(records, self._resource)

    def shutdown(self, timeout: float) -> None:
        """Send what is queued, for at most `timeout` seconds."""
        self._processor.shutdown_within(timeout)


def resource_of(service_name: str) -> Resource:
    """This process, as all of its spans name it."""
    return Resource.create(
        {
            names.SERVICE_NAME: service_name,
            names.SERVICE_VERSION: __version__,
            names.SERVICE_INSTANCE_ID: f"{socket.gethostname()}-{os.getpid()}",
        }
    )


def encoded(records: "Sequence[RequestRecord]", resource: Resource) -> bytes:
    """The spans of requests that have ended, each request's outermost first, as one OTLP request. Any thread may ask."""
    whose = otlp.resource(
        {name: value for name, value in resource.attributes.items() if isinstance(value, (str, bool, int, float))}
    )
    return otlp.request(whose, _SCOPE, [span for record in records for span in _Spans(record).all()])


class _Spans:
    """Makes the spans of one record."""

    def __init__(self, record: "RequestRecord") -> None:
        self._record = record
        trace = record.trace
        if trace is None:
            # Nothing was traced, and somebody wants to see it all the same: ids that are the request's own.
            number = int.from_bytes(record.request_id[-16:].rjust(16, b"\0"), "big") or 1
            trace = Trace(number, number & ((1 << 64) - 1) or 1, 0)
        self._trace = trace
        # One reading of both clocks, so that all spans of a request agree.
        self._offset = wall_time(0.0)

    def all(self) -> Iterator[bytes]:
        """SERVER, CLIENT, attempts."""
        yield self._server()
        attempts = self._record.attempts
        if attempts:
            yield self._client(attempts)
            for number, attempt in enumerate(attempts):
                yield self._attempt(number, attempt)

    def _server(self) -> bytes:
        record = self._record
        trace = self._trace
        method = record.method if record.method in names.METHODS else names.OTHER_METHOD
        status = record.status
        more = list(self._events())
        if trace.link is not None:
            more.append(otlp.link(trace.link.trace_id, trace.link.span_id))
        common = (
            (names.HTTP_REQUEST_METHOD, method),
            (names.HTTP_ROUTE, record.path),
            (names.URL_PATH, record.path),
            (names.URL_SCHEME, "http"),
            (names.GEN_AI_REQUEST_MODEL, record.model or None),
            (names.STAGE, record.stage),
            (names.TENANT, record.tenant),
            (names.POLICY, record.policy or None),
            (names.WORKER_ID, record.answering.worker.id if record.answering is not None else None),
            (names.OUTCOME, record.outcome),
        )
        more.append(otlp.constant(*common))
        attributes = {
            names.HTTP_RESPONSE_STATUS_CODE: status or None,
            names.HTTP_REQUEST_BODY_SIZE: record.bytes_in or None,
            names.ERROR_TYPE: record.error_type or (str(status) if status >= 500 else None),
            names.REQUEST_ID: record.id or None,
            names.ATTEMPTS: len(record.attempts),
            names.FIRST_BYTE: record.ttft,
            names.BYTES_OUT: record.bytes_out,
        }
        return otlp.span(
            f"{'HTTP' if method == names.OTHER_METHOD else method} {record.path}",
            otlp.SERVER,
            trace_id=trace.number,
            span_id=trace.span,
            parent=trace.parent.span_id if trace.parent is not None else 0,
            remote=trace.parent is not None,
            flags=trace.flags,
            tracestate=trace.tracestate,
            start=self._nanoseconds(record.start),
            end=self._nanoseconds(record.end),
            attributes=attributes,
            # By the HTTP conventions a 4xx is no error of a server.
            failed=status >= 500 or record.outcome == "failed",
            more=more,
        )

    def _client(self, attempts: "Sequence[Attempt]") -> bytes:
        """The model as the caller sees it, whoever answered after however many attempts."""
        record = self._record
        last = record.answering or attempts[-1]
        worker = last.worker
        usage = record.usage
        operation = names.operation(record.path)
        begin = attempts[0].at
        error = _error_of(last)
        common = otlp.constant(
            (names.GEN_AI_OPERATION_NAME, operation),
            (names.GEN_AI_PROVIDER_NAME, worker.driver.name),
            (names.GEN_AI_REQUEST_MODEL, record.model),
            (names.GEN_AI_REQUEST_STREAM, record.stream),
            (names.SERVER_ADDRESS, worker.host),
            (names.SERVER_PORT, worker.port),
            (names.WORKER_ID, worker.id),
        )
        attributes: otlp.Attributes = {
            names.ERROR_TYPE: error,
            names.GEN_AI_TIME_TO_FIRST_CHUNK: record.first_byte - begin if record.first_byte else None,
            names.GEN_AI_INPUT_TOKENS: usage.prompt_tokens if usage is not None else None,
            names.GEN_AI_OUTPUT_TOKENS: usage.completion_tokens if usage is not None else None,
            names.GEN_AI_CACHED_TOKENS: usage.cached_tokens if usage is not None else None,
        }
        name = f"{operation} {record.model}"
        return self._below(1, self._trace.span, name, begin, last.at + last.seconds, attributes, common)

    def _attempt(self, number: int, attempt: "Attempt") -> bytes:
        worker = attempt.worker
        host = f"[{worker.host}]" if ":" in worker.host else worker.host
        scheme = "https" if worker.tls else "http"
        common = otlp.constant(
            (names.HTTP_REQUEST_METHOD, "POST"),
            (names.URL_FULL, f"{scheme}://{host}:{worker.port}{worker.base_path}{self._record.path}"),
            (names.SERVER_ADDRESS, worker.host),
            (names.SERVER_PORT, worker.port),
            (names.WORKER_ID, worker.id),
        )
        attributes: otlp.Attributes = {
            names.HTTP_REQUEST_RESEND_COUNT: number or None,
            names.HEDGE: attempt.hedge or None,
            names.HEDGE_LOST: attempt.error == HEDGE_LOST or None,
            names.RETRY_BUDGET_EXHAUSTED: attempt.unspent or None,
            names.HTTP_RESPONSE_STATUS_CODE: attempt.status or None,
            names.CONNECT: attempt.connect,
            names.FIRST_BYTE: attempt.first_byte or None,
            names.ERROR_TYPE: _error_of(attempt),
        }
        end = attempt.at + attempt.seconds
        return self._below(number + 2, self._trace.below(1), "POST", attempt.at, end, attributes, common)

    def _below(
        self,
        place: int,
        parent: int,
        name: str,
        begin: float,
        end: float,
        attributes: otlp.Attributes,
        common: bytes,
    ) -> bytes:
        """A CLIENT span; one with an ``error.type`` has failed."""
        trace = self._trace
        return otlp.span(
            name,
            otlp.CLIENT,
            trace_id=trace.number,
            span_id=trace.below(place),
            parent=parent,
            flags=trace.flags,
            tracestate=trace.tracestate,
            start=self._nanoseconds(begin),
            end=self._nanoseconds(max(begin, end)),
            attributes=attributes,
            failed=attributes.get(names.ERROR_TYPE) is not None,
            more=(common,),
        )

    def _events(self) -> Iterator[bytes]:
        record = self._record
        if record.read:
            yield self._event(names.EVENT_ADMISSION, record.read + record.queued, {names.QUEUE: record.queued})
        if record.tokenized:
            attributes: otlp.Attributes = {
                names.PROMPT_TOKENS: record.prompt_tokens,
                names.PROMPT_HOW: record.how_known,
                names.PROMPT_SECONDS: record.prompt_seconds,
            }
            yield self._event(names.EVENT_TOKENIZE, record.tokenized, attributes)
        for decided in record.decisions:
            yield self._event(names.EVENT_ROUTE, decided.at + decided.seconds, _route(decided))
        for note in record.hints:
            yield self._event(names.EVENT_HINT, note.entry.created, _hint(note))
        if record.first_byte:
            yield self._event(names.EVENT_FIRST_BYTE, record.first_byte, {})
        gaps = record.gaps
        end: otlp.Attributes = {
            names.OUTCOME: record.outcome,
            names.BYTES_OUT: record.bytes_out,
            names.READS: gaps.count + 1 if gaps is not None else None,
            names.GAP_P50: gaps.p50 if gaps is not None else None,
            names.GAP_P95: gaps.p95 if gaps is not None else None,
            names.GAP_MAX: gaps.max if gaps is not None else None,
        }
        yield self._event(names.EVENT_END, record.end, end)

    def _event(self, name: str, at: float, attributes: otlp.Attributes) -> bytes:
        return otlp.event(name, self._nanoseconds(at), attributes)

    def _nanoseconds(self, mark: float) -> int:
        return int((self._offset + mark) * 1e9)


def _route(decided: "Decided") -> otlp.Attributes:
    """What there is to say of a decision without asking the policy again."""
    decision = decided.decision
    lines = lines_of(decided, ROWS)
    while len(shown := orjson.dumps(lines)) > TABLE_BYTES:
        lines = lines[: len(lines) // 2]
    return {
        names.POLICY: getattr(decided.policy, "name", None),
        names.ROUTE_SECONDS: decided.seconds,
        names.ROUTE_REASON: sentence_of(decided),
        names.WORKER_ID: decision.chosen.worker.id if decision is not None else None,
        names.MATCHED: decision.chosen.match.tokens if decision is not None else None,
        names.PREDICTED_TTFT: ttft_of(decided),
        names.PREDICTED_CACHED: cached_of(decided) if decided.request.prompt_tokens else None,
        names.ROUTE_CANDIDATES: len(decided.candidates),
        names.ROUTE_TABLE: shown.decode(),
    }


def _hint(note: "Note") -> otlp.Attributes:
    entry = note.entry
    return {
        names.HINT_RULE: entry.rule,
        names.HINT_ACTION: entry.action.value,
        names.WORKER_ID: entry.worker,
        names.HINT_WAY: note.way,
        names.HINT_DRIVER: note.driver or None,
        names.HINT_FATE: entry.fate.value if entry.fate is not None else "offered",
        names.HINT_SOURCE: entry.source,
        names.HINT_TARGET: entry.target,
        names.HINT_TOKENS: entry.stop - entry.start,
        names.HINT_PRIORITY: entry.priority,
        names.HINT_TTL: entry.ttl,
        names.HINT_REASON: entry.reason or None,
    }


def _error_of(attempt: "Attempt") -> str | None:
    if attempt.error == HEDGE_LOST:
        return None
    # By the HTTP conventions a 4xx is an error of a client.
    return attempt.error or (str(attempt.status) if attempt.status >= 400 else None)
