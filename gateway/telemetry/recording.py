"""Spans that are recorded: the only module beside `gateway.telemetry.export` that knows the OpenTelemetry SDK."""

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Self

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from gateway import __version__
from gateway.telemetry import names
from gateway.telemetry.export import BoundedProcessor, exporter_for
from gateway.telemetry.spans import AttemptSpan, AttributeValue, ServerSpan
from gateway.telemetry.w3c import TraceParent, format_traceparent

if TYPE_CHECKING:
    from gateway.config.schema import Telemetry
    from gateway.fleet.worker import Worker

# Where a root span has no parent in any context: without it the SDK would look for one in a context variable.
_NOWHERE: Final = Context()


class ChosenIds(RandomIdGenerator):
    """Gives the next root span the trace id that the sampling decision was made on."""

    def __init__(self) -> None:
        self.trace_id = 0

    def generate_trace_id(self) -> int:
        """The chosen id."""
        return self.trace_id


class Recorder:
    """One tracer provider with its exporter. Samples all that it is given: the decision was `Tracing`'s."""

    __slots__ = ("_ids", "_processor", "_tracer")

    def __init__(self, service_name: str, processor: BoundedProcessor) -> None:
        self._processor = processor
        self._ids = ChosenIds()
        resource = Resource.create(
            {
                names.SERVICE_NAME: service_name,
                names.SERVICE_VERSION: __version__,
                names.SERVICE_INSTANCE_ID: f"{socket.gethostname()}-{os.getpid()}",
            }
        )
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(processor)
        self._tracer: Tracer = provider.get_tracer("warmroute", __version__)

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

    @property
    def open(self) -> int:
        """Spans that have begun and not ended."""
        return self._processor.open

    def server_span(
        self,
        method: str,
        route: str,
        *,
        parent: TraceParent | None = None,
        tracestate: str = "",
        trace_id: int = 0,
        link: TraceParent | None = None,
    ) -> ServerSpan:
        """Begin a span under `parent`, or at the root of the new trace `trace_id`, linked to `link`."""
        context = _NOWHERE
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(_remote(parent, tracestate)), _NOWHERE)
        self._ids.trace_id = trace_id
        method = method if method in names.METHODS else names.OTHER_METHOD
        span = self._tracer.start_span(
            f"{'HTTP' if method == names.OTHER_METHOD else method} {route}",
            context,
            SpanKind.SERVER,
            {
                names.HTTP_REQUEST_METHOD: method,
                names.HTTP_ROUTE: route,
                names.URL_PATH: route,
                names.URL_SCHEME: "http",
            },
            (Link(_remote(link, "")),) if link is not None else None,
        )
        return RecordedServerSpan(self._tracer, span, method, route, tracestate)

    def shutdown(self, timeout: float) -> None:
        """Send what is queued, for at most `timeout` seconds."""
        self._processor.shutdown_within(timeout)


class RecordedServerSpan(ServerSpan):
    """A request that is recorded."""

    __slots__ = ("_context", "_method", "_route", "_span", "_tracer")
    recording = True

    def __init__(self, tracer: Tracer, span: Span, method: str, route: str, tracestate: str) -> None:
        own = span.get_span_context()
        super().__init__(own.trace_id, own.span_id, own.trace_flags, tracestate)
        self._tracer = tracer
        self._span = span
        self._method = method
        self._route = route
        self._context = set_span_in_context(span, _NOWHERE)

    def attempt(self, worker: "Worker", model: str, resend: int) -> AttemptSpan:
        """Begin the CLIENT span of an attempt."""
        host = f"[{worker.host}]" if ":" in worker.host else worker.host
        scheme = "https" if worker.tls else "http"
        attributes: dict[str, AttributeValue] = {
            names.HTTP_REQUEST_METHOD: self._method,
            names.URL_FULL: f"{scheme}://{host}:{worker.port}{worker.base_path}{self._route}",
            names.SERVER_ADDRESS: worker.host,
            names.SERVER_PORT: worker.port,
            names.GEN_AI_OPERATION_NAME: names.operation(self._route),
            names.GEN_AI_PROVIDER_NAME: worker.driver.name,
            names.GEN_AI_REQUEST_MODEL: model,
            names.WORKER_ID: worker.id,
        }
        if resend:
            attributes[names.HTTP_REQUEST_RESEND_COUNT] = resend
        span = self._tracer.start_span(
            "HTTP" if self._method == names.OTHER_METHOD else self._method, self._context, SpanKind.CLIENT, attributes
        )
        return RecordedAttemptSpan(span, self._tracestate)

    def set(self, name: str, value: AttributeValue) -> None:
        """Set one attribute."""
        self._span.set_attribute(name, value)

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Add an event that happens now."""
        self._span.add_event(name, attributes)

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
        """Set what is known at the end and hand the span over. By the HTTP conventions a 4xx is no error of a server."""
        span = self._span
        if not span.is_recording():
            return
        # A plain string: the SDK exports only the built-in types.
        attributes: dict[str, AttributeValue] = {
            names.OUTCOME: str(outcome),
            names.ATTEMPTS: attempts,
            names.BYTES_OUT: bytes_out,
        }
        optional: dict[str, AttributeValue | None] = {
            names.HTTP_RESPONSE_STATUS_CODE: status or None,
            names.ERROR_TYPE: error_type or (str(status) if status >= 500 else None),
            names.GEN_AI_REQUEST_MODEL: model,
            names.WORKER_ID: worker_id,
            names.REQUEST_ID: request_id,
            names.POLICY: policy,
            names.FIRST_BYTE: first_byte,
        }
        attributes.update({name: value for name, value in optional.items() if value is not None})
        span.set_attributes(attributes)
        if status >= 500 or outcome == "failed":
            span.set_status(StatusCode.ERROR)
        span.end()


class RecordedAttemptSpan(AttemptSpan):
    """An attempt that is recorded."""

    __slots__ = ("_span",)

    def __init__(self, span: Span, tracestate: str) -> None:
        own = span.get_span_context()
        super().__init__(format_traceparent(own.trace_id, own.span_id, own.trace_flags), tracestate)
        self._span = span

    def end(self, status: int | None, error_type: str | None, first_byte: float | None) -> None:
        """Set what is known at the end and hand the span over. By the HTTP conventions a 4xx is an error of a client."""
        span = self._span
        if not span.is_recording():
            return
        attributes: dict[str, AttributeValue] = {}
        if status is not None:
            attributes[names.HTTP_RESPONSE_STATUS_CODE] = status
        if first_byte is not None:
            attributes[names.FIRST_BYTE] = first_byte
        if error_type is None and status is not None and status >= 400:
            error_type = str(status)
        if error_type is not None:
            attributes[names.ERROR_TYPE] = error_type
            span.set_status(StatusCode.ERROR)
        span.set_attributes(attributes)
        span.end()


def _remote(caller: TraceParent, tracestate: str) -> SpanContext:
    """The caller's span as the SDK sees it."""
    return SpanContext(
        caller.trace_id,
        caller.span_id,
        is_remote=True,
        trace_flags=TraceFlags(caller.flags & 0x03),
        trace_state=TraceState.from_header([tracestate]) if tracestate else None,
    )
