"""The request log: a file with one JSON line per request, as `simulator.workloads` reads it.

Each line is `RequestRecord.document` without the terms of costs, and ``prefix`` (the block hashes of the prompt, hexadecimal,
of blocks of ``block_size`` tokens) and ``session`` (a hash). Both are keyed anew in each process: they compare within one run
of the gateway, which ``process`` names, and tell nobody what was asked.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from logging.handlers import RotatingFileHandler
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import orjson
import structlog

if TYPE_CHECKING:
    from gateway.config.schema import RequestLogFile
    from gateway.telemetry.record import RequestRecord

QUEUE: Final = 4096
"""Requests that may wait for the disk."""
FLUSH: Final = 2.0
"""Seconds that the last lines have to get out."""

_log = structlog.get_logger(__name__)
_KEY: Final = token_bytes(16)
_PROCESS: Final = token_hex(4)


class Entry(msgspec.Struct, frozen=True):
    """What a line is made of.

    Attributes:
        record: of the request.
        hashes: of the prompt's full blocks.
        block_size: tokens per block, 0 without any.
        session: the session's key as the client gave it, or None.
    """

    record: "RequestRecord"
    hashes: Sequence[int] = ()
    block_size: int = 0
    session: bytes | None = None

    def line(self) -> bytes:
        """The line, without its end. Any thread may ask."""
        document: dict[str, Any] = self.record.document(ask=False)
        document["process"] = _PROCESS
        document["session"] = blake2b(self.session, key=_KEY, digest_size=8).hexdigest() if self.session else None
        document["block_size"] = self.block_size or None
        document["prefix"] = [f"{block:014x}" for block in self.hashes]
        return orjson.dumps(document)


class RequestLogWriter:
    """Writes the lines from a thread of its own: a slow or full disk costs lines and never a request."""

    def __init__(self, section: "RequestLogFile") -> None:
        """Open the file.

        Raises:
            OSError: it cannot be opened.
            ValueError: the section names no file.
        """
        if not section.file:
            raise ValueError("telemetry.request_log.file: no path")
        self._handler = _Rotating(section.file, maxBytes=section.rotate, backupCount=section.files)
        self._waiting: queue.Queue[Entry | None] = queue.Queue(QUEUE)
        self._refused = 0
        self._thread = threading.Thread(target=self._run, name="warmroute-request-log", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, section: "RequestLogFile") -> Self | None:
        """The writer that the configuration wants, if it wants one.

        Raises:
            OSError: its file cannot be opened.
        """
        return cls(section) if section.file else None

    @property
    def dropped(self) -> int:
        """Lines that were lost."""
        return self._refused + self._handler.failed

    def write(self, entry: Entry) -> None:
        """Queue a line, or count it as dropped. Never blocks."""
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._refused += 1

    def stop(self, timeout: float = FLUSH) -> None:
        """Write what is queued, for at most `timeout` seconds, and close the file. Blocks: call it in a thread."""
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            try:
                line = entry.line().decode()
            except Exception:  # noqa: BLE001 - one request's line, for whatever reason; the others go on
                self._refused += 1
                _log.exception("a line of the request log could not be made")
                continue
            self._handler.emit(logging.makeLogRecord({"msg": line}))
        # What a full disk has not taken was counted line by line.
        with suppress(OSError):
            self._handler.close()


class _Rotating(RotatingFileHandler):
    """The standard library's handler, which counts what it could not write instead of printing it."""

    failed = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the base class's name
        """Called in place of raising."""
        self.failed += 1
