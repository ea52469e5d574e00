"""How recorded spans leave the process: a bounded queue, a thread, and an exporter that may fail as it likes."""

import logging
import os
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, cast

import orjson
import structlog
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

if TYPE_CHECKING:
    from gateway.config.schema import Traces
    from gateway.telemetry.record import RequestRecord

QUEUE: Final = 2048
"""Requests that may wait: two seconds of 1,000 a second, all sampled."""
BATCH: Final = 64
"""Requests per export: encoding holds the interpreter lock, so small batches keep the event loop's pauses short."""
DELAY: Final = 1.0
"""Seconds after which a batch that is not full goes out."""
EXPORT_TIMEOUT: Final = 5.0
"""Seconds for one export with all its retries."""
HTTP_ENDPOINT: Final = "http://127.0.0.1:4318/v1/traces"
GRPC_ENDPOINT: Final = "http://127.0.0.1:4317"

_log = structlog.get_logger(__name__)
# What the SDK's processor looks at of an item before it queues it.
_SAMPLED_CONTEXT: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
_NO_RESOURCE: Final = Resource({})


class Exporter(Protocol):
    """Where spans go."""

    def send(self, data: bytes) -> bool:
        """Send an ``ExportTraceServiceRequest``; False: it did not arrive. May block: called by the exporting thread."""

    def shutdown(self) -> None:
        """Give up whatever is going on. May be called by another thread."""


class Finished(ReadableSpan):
    """Stands in the SDK's queue for all spans of one finished request, which are made when their turn comes.

    Attributes:
        encode: makes the spans of several.
        record: of the request.
        count: how many spans it has.
    """

    def __init__(
        self, encode: "Callable[[Sequence[RequestRecord]], bytes]", record: "RequestRecord", count: int
    ) -> None:
        super().__init__("", context=_SAMPLED_CONTEXT, resource=_NO_RESOURCE)
        self.encode = encode
        self.record = record
        self.count = count


class CountingExporter(SpanExporter):
    """What the SDK's processor exports to. Counts what happens to spans, and logs once when exports begin to fail and once when they work again.

    Attributes:
        taken: requests that left the queue.
        exported: spans that arrived.
        failed: spans that did not.
    """

    def __init__(self, inner: Exporter) -> None:
        self._inner = inner
        self._working = True
        self._closed = False
        self.taken = 0
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Make the spans of a batch of `Finished` and hand them on; called by the processor's thread."""
        batch = cast("Sequence[Finished]", spans)
        count = sum(finished.count for finished in batch)
        self.taken += len(batch)
        working = False
        reason = "refused or unreachable"
        if not self._closed:
            try:
                working = self._inner.send(batch[0].encode([finished.record for finished in batch]))
            except Exception as error:  # noqa: BLE001  # a broken exporter loses spans, nothing else
                reason = f"{type(error).__name__}: {error}"
        if working:
            self.exported += count
        else:
            self.failed += count
        if working is not self._working and not self._closed:
            self._working = working
            if working:
                _log.info("spans are exported again", lost=self.failed)
            else:
                _log.warning("spans cannot be exported", reason=reason)
        return SpanExportResult.SUCCESS if working else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Give up whatever is going on."""
        if not self._closed:
            self._closed = True
            self._inner.shutdown()


class BoundedProcessor(BatchSpanProcessor):
    """The SDK's batch processor with a queue that refuses and counts, and an end that comes in time.

    When the SDK's own queue is full it drops its oldest item and logs a line each time, with no number to read. Here a
    request that finds `QUEUE` others waiting is not queued, so that never happens.
    """

    def __init__(self, exporter: Exporter, *, queue: int = QUEUE, batch: int = BATCH, delay: float = DELAY) -> None:
        self._counting = CountingExporter(exporter)
        self._limit = queue
        self._accepted = 0
        self._spans = 0
        self._refused = 0
        self._ended = False
        super().__init__(
            self._counting, max_queue_size=queue, schedule_delay_millis=delay * 1000, max_export_batch_size=batch
        )

    @property
    def dropped(self) -> int:
        """Spans that were refused by the full queue or that an export lost."""
        return self._refused + self._counting.failed

    @property
    def exported(self) -> int:
        """Spans that arrived."""
        return self._counting.exported

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a `Finished`, or count its spans as dropped. Never blocks."""
        count = cast("Finished", span).count
        if self._ended or self._accepted - self._counting.taken >= self._limit:
            self._refused += count
            return
        self._accepted += 1
        self._spans += count
        super().on_end(span)

    def shutdown_within(self, timeout: float) -> None:
        """Send what is queued, for at most `timeout` seconds; what is left then is lost.

        The SDK's own ``shutdown`` waits for half a minute, so it runs in a thread that may be left behind.
        """
        if self._ended:
            return
        self._ended = True
        closing = threading.Thread(target=self.shutdown, name="warmroute-spans-shutdown", daemon=True)
        closing.start()
        closing.join(timeout)
        self._counting.shutdown()
        if lost := self._spans - self._counting.exported:
            _log.warning("spans were lost", lost=lost + self._refused)


class LinesExporter:
    """Writes one line per request: an OTLP/JSON ``ExportTraceServiceRequest``, as collectors' file receivers read it."""

    def __init__(self, descriptor: int, *, close: bool) -> None:
        """`close`: the descriptor is ours."""
        self._descriptor = descriptor
        self._close = close
        self._lock = threading.Lock()
        self._open = True

    @classmethod
    def to_file(cls, path: str) -> Self:
        """Append to a file.

        Raises:
            OSError: it cannot be opened.
        """
        return cls(os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), close=True)

    def send(self, data: bytes) -> bool:
        """Write one batch with one call, so that lines of several processes do not mix."""
        line = orjson.dumps(otlp_json(data), option=orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            if not self._open:
                return False
            while line:
                line = line[os.write(self._descriptor, line) :]
        return True

    def shutdown(self) -> None:
        """Close the file."""
        with self._lock:
            if self._open:
                self._open = False
                if self._close:
                    os.close(self._descriptor)


class HttpExporter:
    """OTLP over HTTP, with the SDK's client: its retries, its proxies, its TLS.

    The SDK's exporters take spans of the SDK only, so what is beneath them is used; the dependency is locked, and tests have a real collector.
    """

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        # It logs every failed try; `CountingExporter` says the same once.
        logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint, headers=headers or None, timeout=EXPORT_TIMEOUT)

    def send(self, data: bytes) -> bool:
        """Send it, again if need be, for `EXPORT_TIMEOUT` seconds."""
        return self._exporter._client.export(data).success  # noqa: SLF001

    def shutdown(self) -> None:
        """Give up."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class GrpcExporter:
    """OTLP over gRPC, with the SDK's client; TLS if the endpoint says ``https``."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        # 40 ms and 15 MB that nobody else must pay.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

        class Encoded(Grpc):
            """Sends what is encoded already."""

            def _translate_data(self, data: Any) -> ExportTraceServiceRequest:
                return cast("ExportTraceServiceRequest", ExportTraceServiceRequest.FromString(data[0]))

        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc").setLevel(logging.CRITICAL)
        lower = {name.lower(): value for name, value in headers.items()}
        insecure = not endpoint.startswith("https")
        self._exporter = Encoded(endpoint, insecure=insecure, headers=lower or None, timeout=EXPORT_TIMEOUT)

    def send(self, data: bytes) -> bool:
        """Send it, again if need be, for `EXPORT_TIMEOUT` seconds."""
        return self._exporter.export(cast("Any", [data])) is SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Give up."""
        self._exporter.shutdown()


def exporter_for(traces: "Traces") -> Exporter:
    """The exporter that the configuration names.

    Raises:
        OSError: the file cannot be opened.
        ValueError: `file` is missing for the exporter of that name.
    """
    if traces.exporter == "otlp":
        return HttpExporter(traces.endpoint or HTTP_ENDPOINT, traces.headers)
    if traces.exporter == "otlp-grpc":
        return GrpcExporter(traces.endpoint or GRPC_ENDPOINT, traces.headers)
    if traces.exporter == "file":
        if not traces.file:
            raise ValueError("telemetry.traces.file: the file exporter needs a path")
        return LinesExporter.to_file(traces.file)
    return LinesExporter(sys.stderr.fileno(), close=False)


def otlp_json(data: bytes) -> dict[str, Any]:
    """An encoded ``ExportTraceServiceRequest`` in OTLP's JSON form: protobuf's, but with ids in hexadecimal and enums as numbers.

    https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
    """
    message = ExportTraceServiceRequest.FromString(data)
    document: dict[str, Any] = MessageToDict(message, use_integers_for_enums=True)
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for holder in (span, *span.get("links", ())):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in holder:
                            holder[name] = b64decode(holder[name]).hex()
    return document
