"""structlog as JSON lines on standard error, through a queue: a log line never waits for a pipe or a disk.

Lines of the standard library's `logging` (asyncio, aiohttp, the OpenTelemetry SDK) take the same way.
"""

import logging
import os
import select
import threading
from collections import deque
from json import JSONEncoder
from random import Random
from typing import TYPE_CHECKING, Any, Final

import structlog

from gateway.telemetry.metrics import Outcome

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

    from gateway.config.schema import Logs

QUEUE: Final = 10_000
"""Lines that may wait for the sink; at some 300 bytes each, 3 MB."""
BATCH: Final = 256
"""Lines per system call."""
FLUSH: Final = 2.0
"""Seconds that the last lines have to get out."""
_STDERR: Final = 2


class QueuedSink:
    """Writes lines to a file descriptor from a thread of its own.

    Attributes:
        dropped: lines lost because the queue was full or the descriptor refused them.
    """

    def __init__(self, descriptor: int, *, queue: int = QUEUE) -> None:
        self._descriptor = descriptor
        self._limit = queue
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._writing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._drain, name="warmroute-logs", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue one line, newline included, or count it as dropped. Never blocks on the sink; any thread may call."""
        with self._changed:
            if self._stopping or len(self._lines) >= self._limit:
                self.dropped += 1
                return
            self._lines.append(line)
            self._changed.notify_all()

    def stop(self, timeout: float = FLUSH) -> None:
        """Write what is queued, for at most `timeout` seconds; the rest counts as dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            self.dropped += len(self._lines)
            self._lines.clear()

    def _drain(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    if self._stopping:
                        return
                    self._changed.wait()
                batch = [self._lines.popleft() for _ in range(min(BATCH, len(self._lines)))]
            self._write_out(b"".join(batch))

    def _write_out(self, data: bytes) -> None:
        """Write some lines, outside of the lock."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                # Whoever shares this terminal or pipe made it non-blocking.
                select.select([], [self._descriptor], [], 1.0)
            except OSError:
                # A full disk or a reader that is gone: there is nowhere left to say so but the counter.
                with self._changed:
                    self.dropped += data.count(b"\n")
                return


class Logging:
    """The process's logging, from `configure` to `stop`."""

    def __init__(self, sink: QueuedSink, handler: logging.Handler, before: dict[str, Any], root_level: int) -> None:
        self._sink = sink
        self._handler = handler
        self._before = before
        self._root_level = root_level

    @property
    def dropped(self) -> int:
        """Lines that were lost."""
        return self._sink.dropped

    def stop(self, timeout: float = FLUSH) -> None:
        """Write what is queued, for at most `timeout` seconds, and leave structlog and logging as they were."""
        root = logging.getLogger()
        root.removeHandler(self._handler)
        root.setLevel(self._root_level)
        structlog.configure(**self._before)
        self._sink.stop(timeout)


def configure(logs: "Logs", descriptor: int = _STDERR) -> Logging:
    """Send structlog's and logging's lines to `descriptor` as the configuration says.

    structlog and logging are global, so this is too: call it once, and `Logging.stop` before calling it again.
    """
    level = logging.getLevelNamesMapping()[logs.level.upper()]
    sink = QueuedSink(descriptor)
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    render: list[Processor]
    if logs.format == "json":
        render = [structlog.processors.format_exc_info, _JsonLine()]
    else:
        render = [
            _escape_values,
            structlog.dev.ConsoleRenderer(colors=os.isatty(descriptor), timestamp_key="time"),
            _text_line,
        ]
    before = structlog.get_config()
    structlog.configure(
        processors=[*common, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: _SinkLogger(sink, names[0] if names else ""),
        # A cached logger would outlive a second `configure`.
        cache_logger_on_first_use=False,
    )
    handler = _SinkHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render, _decode],
        )
    )
    # It warns of each malformed form, which is answered and counted: a client must not be able to fill the log.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    root = logging.getLogger()
    root_level = root.level
    root.addHandler(handler)
    root.setLevel(max(level, logging.INFO))
    return Logging(sink, handler, before, root_level)


class RequestLog:
    """At most one line per finished request: always for those that failed, by share for the others.

    A line never holds text of a prompt or an answer nor a header's value, and what a client can choose (the model's name,
    its request id) stands in it escaped.
    """

    __slots__ = ("_log", "_random", "_sample")

    def __init__(self, sample: float, random: Random | None = None) -> None:
        """`sample` is the share in [0, 1] of requests that did not fail and still get a line."""
        self._sample = sample
        self._random = random or Random()
        self._log = structlog.get_logger("warmroute.request")

    def ended(
        self,
        *,
        request_id: str,
        trace_id: str | None,
        model: str | None,
        path: str,
        worker: str | None,
        status: int,
        outcome: Outcome,
        error_type: str | None,
        duration: float,
        first_byte: float | None,
        attempts: int,
        bytes_out: int,
    ) -> None:
        """Log a request that has ended.

        Args:
            request_id: as sent back in ``x-request-id``.
            trace_id: 32 hexadecimal digits, None without tracing.
            model: the fleet's name, None if none was found.
            path: the API path, or a word for all others; not what the client sent.
            worker: id of the last worker asked, None if none was.
            status: of the answer that the client got, 0 if it got none.
            outcome: how it ended.
            error_type: low-cardinality name of what went wrong, or None.
            duration: seconds from head to end.
            first_byte: seconds from head to first answer byte, or None.
            attempts: how many workers were asked.
            bytes_out: answer bytes written to the client.
        """
        failed = outcome is Outcome.FAILED
        if not failed and (self._sample <= 0 or self._random.random() >= self._sample):
            return
        # Failed requests are errors so that no configurable level hides them.
        (self._log.error if failed else self._log.info)(
            "request",
            request_id=request_id,
            trace_id=trace_id,
            model=model,
            path=path,
            worker=worker,
            status=status,
            outcome=outcome.value,
            error_type=error_type,
            duration_ms=round(duration * 1000, 3),
            first_byte_ms=None if first_byte is None else round(first_byte * 1000, 3),
            attempts=attempts,
            bytes_out=bytes_out,
        )


class _SinkLogger:
    """What structlog wraps: takes a finished line of any level."""

    __slots__ = ("_sink", "name")

    def __init__(self, sink: QueuedSink, name: str) -> None:
        self._sink = sink
        self.name = name

    def msg(self, line: bytes) -> None:
        """Queue a line."""
        self._sink.write(line)

    debug = info = warning = error = critical = exception = log = msg


class _SinkHandler(logging.Handler):
    """Takes records of `logging`, which the formatter has made a line of."""

    def __init__(self, sink: QueuedSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; one that cannot be formatted is reported by `logging` itself."""
        try:
            self._sink.write(self.format(record).encode())
        except Exception:  # noqa: BLE001  # a log line never breaks its caller
            self.handleError(record)


class _JsonLine:
    """Renders a line of pure ASCII: no terminal sequence, no broken surrogate and no line break gets through."""

    __slots__ = ("_encode",)

    def __init__(self) -> None:
        self._encode = JSONEncoder(ensure_ascii=True, default=repr, separators=(",", ":")).encode

    def __call__(self, _logger: "WrappedLogger", _method: str, event: "EventDict") -> bytes:
        return self._encode(event).replace("\x7f", "\\u007f").encode("ascii") + b"\n"


def _escape_values(_logger: "WrappedLogger", _method: str, event: "EventDict") -> "EventDict":
    """For the console: what is not printable in a value is shown escaped. Traces of our own exceptions stay as they are."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable() and name != "exception":
            event[name] = value.encode("unicode_escape").decode("ascii")
    return event


def _text_line(_logger: "WrappedLogger", _method: str, line: Any) -> bytes:
    return str(line).encode("utf-8", "backslashreplace") + b"\n"


def _decode(_logger: "WrappedLogger", _method: str, line: Any) -> str:
    """`logging` formatters return text."""
    return bytes(line).decode()
