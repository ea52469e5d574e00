"""How recorded spans leave the process: a bounded queue, a thread, and an exporter that may fail as it likes."""

import logging
import os
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import orjson
import structlog
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

if TYPE_CHECKING:
    from gateway.config.schema import Traces

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


class Finished(ReadableSpan):
    """Stands in the queue for all spans of one finished request, which are made when their turn comes, in the exporter's thread.

    Attributes:
        count: how many they will be.
    """

    def __init__(self, make: Callable[[], Sequence[ReadableSpan]], count: int = 1) -> None:
        super().__init__("", context=_SAMPLED_CONTEXT, resource=_NO_RESOURCE)
        self.make = make
        self.count = count


class CountingExporter(SpanExporter):
    """Counts what happens to spans, and logs once when exports begin to fail and once when they work again.

    Attributes:
        taken: requests that left the queue.
        exported: spans that arrived.
        failed: spans that did not.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._working = True
        self._closed = False
        self.taken = 0
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Hand one batch of `Finished` on; called by the processor's thread."""
        batch = cast("Sequence[Finished]", spans)
        count = sum(finished.count for finished in batch)
        self.taken += len(batch)
        result = SpanExportResult.FAILURE
        reason = "refused or unreachable"
        if not self._closed:
            try:
                result = self._inner.export([span for finished in batch for span in finished.make()])
            except Exception as error:  # noqa: BLE001  # a broken exporter loses spans, nothing else
                reason = f"{type(error).__name__}: {error}"
        working = result is SpanExportResult.SUCCESS
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
        return result

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

    def __init__(self, exporter: SpanExporter, *, queue: int = QUEUE, batch: int = BATCH, delay: float = DELAY) -> None:
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


class FileExporter(SpanExporter):
    """Appends one line per span: an OTLP/JSON ``ExportTraceServiceRequest``, as collectors' file receivers read it."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._open = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one batch with one call, so that lines of several processes do not mix."""
        lines = b"".join(orjson.dumps(otlp_json([span]), option=orjson.OPT_APPEND_NEWLINE) for span in spans)
        with self._lock:
            if not self._open:
                return SpanExportResult.FAILURE
            while lines:
                lines = lines[os.write(self._descriptor, lines) :]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._descriptor)


def exporter_for(traces: "Traces") -> SpanExporter:
    """The exporter that the configuration names.

    Raises:
        OSError: the file cannot be opened.
        ValueError: `file` is missing for the exporter of that name.
    """
    if traces.exporter == "otlp":
        # It logs every failed try; `CountingExporter` says the same once.
        logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
        endpoint = traces.endpoint or HTTP_ENDPOINT
        return OTLPSpanExporter(endpoint, headers=traces.headers or None, timeout=EXPORT_TIMEOUT)
    if traces.exporter == "otlp-grpc":
        return _grpc_exporter(traces)
    if traces.exporter == "file":
        if not traces.file:
            raise ValueError("telemetry.traces.file: the file exporter needs a path")
        return FileExporter(traces.file)
    return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n")


def _grpc_exporter(traces: "Traces") -> SpanExporter:
    """OTLP over gRPC; TLS if the endpoint says ``https``."""
    # 40 ms and 15 MB that nobody else must pay.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc").setLevel(logging.CRITICAL)
    endpoint = traces.endpoint or GRPC_ENDPOINT
    headers = {name.lower(): value for name, value in traces.headers.items()}
    return Grpc(endpoint, insecure=not endpoint.startswith("https"), headers=headers or None, timeout=EXPORT_TIMEOUT)


def otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Spans as one OTLP/JSON ``ExportTraceServiceRequest``: protobuf's form, but with ids in hexadecimal and enums as numbers."""
    document: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for holder in (span, *span.get("links", ())):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in holder:
                            holder[name] = b64decode(holder[name]).hex()
    return document
