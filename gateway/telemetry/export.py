"""How recorded spans leave the process: a bounded queue, a thread, and an exporter that may fail as it likes."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import structlog
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from gateway.config.schema import Traces

QUEUE: Final = 4096
"""Spans that may wait: two seconds of 1,000 requests a second, all sampled."""
BATCH: Final = 256
"""Spans per export: encoding holds the interpreter lock, so small batches keep the event loop's pauses short."""
DELAY: Final = 1.0
"""Seconds after which a batch that is not full goes out."""
EXPORT_TIMEOUT: Final = 5.0
"""Seconds for one export with all its retries."""

_log = structlog.get_logger(__name__)


class CountingExporter(SpanExporter):
    """Counts what happens to spans, and logs once when exports begin to fail and once when they work again.

    Attributes:
        taken: spans that left the queue.
        exported: of those, the ones that arrived.
        failed: of those, the ones that did not.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._working = True
        self._closed = False
        self.taken = 0
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Hand one batch on; called by the processor's thread."""
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        reason = "refused or unreachable"
        if not self._closed:
            try:
                result = self._inner.export(spans)
            except Exception as error:  # noqa: BLE001  # a broken exporter loses spans, nothing else
                reason = f"{type(error).__name__}: {error}"
        working = result is SpanExportResult.SUCCESS
        if working:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
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

    When the SDK's own queue is full it drops its oldest span and logs a line each time, with no number to read. Here a
    span that finds `QUEUE` others waiting is not queued, so that never happens.
    """

    def __init__(self, exporter: SpanExporter, *, queue: int = QUEUE, batch: int = BATCH, delay: float = DELAY) -> None:
        self._counting = CountingExporter(exporter)
        self._limit = queue
        self._accepted = 0
        self._started = 0
        self._finished = 0
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

    @property
    def open(self) -> int:
        """Spans that have begun and not ended."""
        return self._started - self._finished

    def on_start(self, span: Span, parent_context: "Context | None" = None) -> None:
        """Count a span in."""
        self._started += 1
        super().on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or count it as dropped. Never blocks."""
        self._finished += 1
        if self._ended or self._accepted - self._counting.taken >= self._limit:
            self._refused += 1
            return
        self._accepted += 1
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
        if lost := self._accepted - self._counting.exported:
            _log.warning("spans were lost", lost=lost + self._refused)


class FileExporter(SpanExporter):
    """Appends one line per span: an OTLP/JSON ``ExportTraceServiceRequest``, as collectors' file receivers read it."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._open = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one batch with one call, so that lines of several processes do not mix."""
        lines = b"".join(orjson.dumps(_otlp_json(span), option=orjson.OPT_APPEND_NEWLINE) for span in spans)
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
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)
        return OTLPSpanExporter(traces.endpoint, headers=traces.headers or None, timeout=EXPORT_TIMEOUT)
    if traces.exporter == "file":
        if not traces.file:
            raise ValueError("telemetry.traces.file: the file exporter needs a path")
        return FileExporter(traces.file)
    return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n")


def _otlp_json(span: ReadableSpan) -> dict[str, Any]:
    """A span in OTLP's JSON form: protobuf's, but with ids in hexadecimal and enums as numbers."""
    context = span.get_span_context()
    assert context is not None
    document: dict[str, Any] = MessageToDict(encode_spans([span]), use_integers_for_enums=True)
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for encoded in scope["spans"]:
                encoded["traceId"] = f"{context.trace_id:032x}"
                encoded["spanId"] = f"{context.span_id:016x}"
                if span.parent is not None:
                    encoded["parentSpanId"] = f"{span.parent.span_id:016x}"
                for link, original in zip(encoded.get("links", ()), span.links, strict=True):
                    link["traceId"] = f"{original.context.trace_id:032x}"
                    link["spanId"] = f"{original.context.span_id:016x}"
    return document
