"""A finished request as OpenTelemetry spans: with `gateway.telemetry.export` all that knows the SDK.

    SERVER  POST /v1/chat/completions        events: admission, tokenize, route, first byte, end
      CLIENT  chat MODEL                     over all attempts
        CLIENT  POST                         one per attempt; the worker's own spans hang below it

Made from the request's record in the exporter's thread, so that a sampled request costs the event loop no more than one that
is not. Policies are the loop's: here they are not asked, and the route event has what the decision itself has said.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from gateway import __version__
from gateway.telemetry import names
from gateway.telemetry.export import BoundedProcessor, Finished, exporter_for
from gateway.telemetry.record import wall_time
from gateway.telemetry.spans import Trace
from gateway.telemetry.table import cached_of, table_of, ttft_of

if TYPE_CHECKING:
    from gateway.config.schema import Telemetry
    from gateway.telemetry.record import Attempt, Decided, RequestRecord
    from gateway.telemetry.w3c import TraceParent

ROWS: Final = 16
"""Candidates in a route event."""
TABLE_BYTES: Final = 4096
"""Bytes of their table; rows that do not fit are left out."""

Attributes = dict[str, Any]
_SCOPE: Final = InstrumentationScope("warmroute", __version__)
_ERROR: Final = Status(StatusCode.ERROR)
_UNSET: Final = Status(StatusCode.UNSET)


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
        self._processor.on_end(Finished(lambda: spans_of(record, self._resource), count))

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


def spans_of(record: "RequestRecord", resource: Resource) -> list[ReadableSpan]:
    """The spans of a request that has ended, outermost first. Any thread may ask."""
    return list(_Spans(record, resource).all())


class _Spans:
    """Makes the spans of one record."""

    def __init__(self, record: "RequestRecord", resource: Resource) -> None:
        self._record = record
        self._resource = resource
        trace = record.trace
        if trace is None:
            # Nothing was traced, and somebody wants to see it all the same: ids that are the request's own.
            number = int.from_bytes(record.request_id[-16:].rjust(16, b"\0"), "big") or 1
            trace = Trace(number, number & ((1 << 64) - 1) or 1, 0)
        self._trace = trace
        # One reading of both clocks, so that all spans of a request agree.
        self._offset = wall_time(0.0)
        self._state = TraceState.from_header([trace.tracestate]) if trace.tracestate else None

    def all(self) -> Iterator[ReadableSpan]:
        """SERVER, CLIENT, attempts."""
        yield self._server()
        attempts = self._record.attempts
        if attempts:
            yield self._client(attempts)
            for number, attempt in enumerate(attempts):
                yield self._attempt(number, attempt)

    def _server(self) -> ReadableSpan:
        record = self._record
        trace = self._trace
        method = record.method if record.method in names.METHODS else names.OTHER_METHOD
        status = record.status
        failed = status >= 500 or record.outcome == "failed"
        attributes = _present(
            {
                names.HTTP_REQUEST_METHOD: method,
                names.HTTP_ROUTE: record.path,
                names.URL_PATH: record.path,
                names.URL_SCHEME: "http",
                names.HTTP_RESPONSE_STATUS_CODE: status or None,
                names.HTTP_REQUEST_BODY_SIZE: record.bytes_in or None,
                names.ERROR_TYPE: record.error_type or (str(status) if status >= 500 else None),
                names.GEN_AI_REQUEST_MODEL: record.model or None,
                names.REQUEST_ID: record.id or None,
                names.STAGE: record.stage,
                names.POLICY: record.policy or None,
                names.WORKER_ID: record.attempts[-1].worker.id if record.attempts else None,
                names.OUTCOME: str(record.outcome),
                names.ATTEMPTS: len(record.attempts),
                names.FIRST_BYTE: record.ttft,
                names.BYTES_OUT: record.bytes_out,
            }
        )
        # By the HTTP conventions a 4xx is no error of a server.
        return self._span(
            f"{'HTTP' if method == names.OTHER_METHOD else method} {record.path}",
            SpanKind.SERVER,
            trace.span,
            self._remote(trace.parent) if trace.parent is not None else None,
            record.start,
            record.end,
            attributes,
            failed=failed,
            events=list(self._events()),
            links=(Link(self._remote(trace.link)),) if trace.link is not None else (),
        )

    def _client(self, attempts: "Sequence[Attempt]") -> ReadableSpan:
        """The model as the caller sees it, whoever answered after however many attempts."""
        record = self._record
        last = attempts[-1]
        worker = last.worker
        usage = record.usage
        operation = names.operation(record.path)
        begin = attempts[0].at
        error = _error_of(last)
        attributes = _present(
            {
                names.GEN_AI_OPERATION_NAME: operation,
                names.GEN_AI_PROVIDER_NAME: worker.driver.name,
                names.GEN_AI_REQUEST_MODEL: record.model,
                names.GEN_AI_REQUEST_STREAM: record.stream,
                names.SERVER_ADDRESS: worker.host,
                names.SERVER_PORT: worker.port,
                names.WORKER_ID: worker.id,
                names.ERROR_TYPE: error,
                names.GEN_AI_TIME_TO_FIRST_CHUNK: record.first_byte - begin if record.first_byte else None,
            }
        )
        if usage is not None:
            attributes |= _present(
                {
                    names.GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
                    names.GEN_AI_OUTPUT_TOKENS: usage.completion_tokens,
                    names.GEN_AI_CACHED_TOKENS: usage.cached_tokens,
                }
            )
        return self._span(
            f"{operation} {record.model}",
            SpanKind.CLIENT,
            self._trace.below(1),
            self._context(self._trace.span),
            begin,
            last.at + last.seconds,
            attributes,
            failed=error is not None,
        )

    def _attempt(self, number: int, attempt: "Attempt") -> ReadableSpan:
        worker = attempt.worker
        host = f"[{worker.host}]" if ":" in worker.host else worker.host
        # By the HTTP conventions a 4xx is an error of a client.
        error = _error_of(attempt)
        attributes = _present(
            {
                names.HTTP_REQUEST_METHOD: "POST",
                names.URL_FULL: f"{'https' if worker.tls else 'http'}://{host}:{worker.port}{worker.base_path}{self._record.path}",
                names.SERVER_ADDRESS: worker.host,
                names.SERVER_PORT: worker.port,
                names.WORKER_ID: worker.id,
                names.HTTP_REQUEST_RESEND_COUNT: number or None,
                names.HTTP_RESPONSE_STATUS_CODE: attempt.status or None,
                names.CONNECT: attempt.connect,
                names.FIRST_BYTE: attempt.first_byte or None,
                names.ERROR_TYPE: error,
            }
        )
        return self._span(
            "POST",
            SpanKind.CLIENT,
            self._trace.below(number + 2),
            self._context(self._trace.below(1)),
            attempt.at,
            attempt.at + attempt.seconds,
            attributes,
            failed=error is not None,
        )

    def _events(self) -> Iterator[Event]:
        record = self._record
        if record.read:
            yield self._event(names.EVENT_ADMISSION, record.read + record.queued, {names.QUEUE: record.queued})
        if record.tokenized:
            attributes = {
                names.PROMPT_TOKENS: record.prompt_tokens,
                names.PROMPT_HOW: record.how_known,
                names.PROMPT_SECONDS: record.prompt_seconds,
            }
            yield self._event(names.EVENT_TOKENIZE, record.tokenized, attributes)
        for decided in record.decisions:
            yield self._event(names.EVENT_ROUTE, decided.at + decided.seconds, _route(decided))
        if record.first_byte:
            yield self._event(names.EVENT_FIRST_BYTE, record.first_byte, {})
        gaps = record.gaps
        end: Attributes = {names.OUTCOME: str(record.outcome), names.BYTES_OUT: record.bytes_out}
        if gaps is not None:
            end |= {
                names.READS: gaps.count + 1,
                names.GAP_P50: gaps.p50,
                names.GAP_P95: gaps.p95,
                names.GAP_MAX: gaps.max,
            }
        yield self._event(names.EVENT_END, record.end, end)

    def _span(
        self,
        name: str,
        kind: SpanKind,
        span: int,
        parent: SpanContext | None,
        begin: float,
        end: float,
        attributes: Attributes,
        *,
        failed: bool,
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            self._context(span),
            parent,
            self._resource,
            attributes,
            events,
            links,
            kind,
            status=_ERROR if failed else _UNSET,
            start_time=self._nanoseconds(begin),
            end_time=self._nanoseconds(max(begin, end)),
            instrumentation_scope=_SCOPE,
        )

    def _event(self, name: str, at: float, attributes: Attributes) -> Event:
        return Event(name, attributes, self._nanoseconds(at))

    def _nanoseconds(self, mark: float) -> int:
        return int((self._offset + mark) * 1e9)

    def _context(self, span: int) -> SpanContext:
        return SpanContext(
            self._trace.number,
            span,
            is_remote=False,
            trace_flags=TraceFlags(self._trace.flags),
            trace_state=self._state,
        )

    def _remote(self, caller: "TraceParent") -> SpanContext:
        flags = TraceFlags(caller.flags & 0x03)
        return SpanContext(caller.trace_id, caller.span_id, is_remote=True, trace_flags=flags, trace_state=self._state)


def _route(decided: "Decided") -> Attributes:
    """What there is to say of a decision without asking the policy again."""
    table = table_of(decided, ask=False)
    lines: list[bytes] = []
    room = TABLE_BYTES
    for line in table.best(ROWS):
        encoded = orjson.dumps(line.document())
        room -= len(encoded) + 1
        if room < 0:
            break
        lines.append(encoded)
    chosen = next((line for line in table.lines if line.chosen), None)
    return _present(
        {
            names.POLICY: getattr(decided.policy, "name", None),
            names.ROUTE_SECONDS: decided.seconds,
            names.ROUTE_REASON: table.reason,
            names.WORKER_ID: table.chosen_id,
            names.MATCHED: chosen.match.tokens if chosen is not None else None,
            names.PREDICTED_TTFT: ttft_of(decided),
            names.PREDICTED_CACHED: cached_of(decided) if decided.request.prompt_tokens else None,
            names.ROUTE_CANDIDATES: len(table.lines),
            names.ROUTE_TABLE: (b"[%b]" % b",".join(lines)).decode(),
        }
    )


def _error_of(attempt: "Attempt") -> str | None:
    return attempt.error or (str(attempt.status) if attempt.status >= 400 else None)


def _present(attributes: Attributes) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}
