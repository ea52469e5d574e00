"""A connection to a worker: the response parser, and the hot path of the relay.

An `UpstreamConnection` is an asyncio protocol that writes a worker's bytes to the client's transport from within `data_received`: no
task, no queue, no copy between them. `Exchange` (in `gateway.http.relay`) is what it talks to; `gateway.http.pool` keeps idle ones per worker.
"""

import asyncio
from typing import TYPE_CHECKING, cast

import httptools

from gateway.errors import GatewayError, Retry, Source
from gateway.http.chunks import SizeLines, whole_chunks
from gateway.http.headers import response_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.fleet.worker import Worker
    from gateway.http.relay import Exchange

_MAX_INTERIM = 8
_MAX_HEAD_BYTES = 128 * 1024
_BODYLESS = frozenset({204, 304})
_PLAIN_REASONS = frozenset({b"OK", b""})


def upstream_error(error_type: str, message: str, *, status: int = 502, retry: Retry = Retry.NO) -> GatewayError:
    """An error that a worker or the way to it caused."""
    return GatewayError(status, error_type, message, source=Source.WORKER, code=error_type, retry=retry)


def unreachable(message: str, *, status: int = 503, error_type: str = "upstream_connect") -> GatewayError:
    """No byte of the request has left: any worker may try, and if none can, the client may soon."""
    return GatewayError(
        status, error_type, message, source=Source.WORKER, code=error_type, retry=Retry.YES, retry_after=1
    )


class UpstreamConnection(asyncio.Protocol):
    """One connection to a worker; carries one exchange at a time.

    Attributes:
        reused: it has carried an exchange before, so the worker may close it just as we send.
        idle_since: loop time when it went into the pool.
        status, reason, content_type, encoded, connection_field: of the answer that is being read.
        lines: its fields, as of `response_line`.
    """

    __slots__ = (
        "_at_boundary",
        "_boundary",
        "_chunked",
        "_complete",
        "_excess",
        "_fields_bytes",
        "_head_bytes",
        "_head_complete",
        "_ill_formed",
        "_interim",
        "_keep_alive",
        "_length",
        "_on_closed",
        "_parser",
        "_pieces",
        "_raw",
        "_size_lines",
        "connection_field",
        "content_type",
        "encoded",
        "exchange",
        "idle_since",
        "lines",
        "reason",
        "reused",
        "status",
        "transport",
        "worker",
    )

    def __init__(
        self,
        worker: "Worker",
        on_closed: "Callable[[UpstreamConnection], None]",
        size_lines: SizeLines | None = None,
    ) -> None:
        """`on_closed` is called once when the connection is gone; `size_lines` may be shared between connections."""
        self._size_lines = SizeLines() if size_lines is None else size_lines
        self.worker = worker
        self._on_closed = on_closed
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.reused = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.reason = b""
        self.lines: list[bytes] = []
        self.content_type = b""
        self.encoded = False
        self._fields_bytes = 0
        self.connection_field: bytes | None = None
        self._head_bytes = 0
        self._head_complete = False
        self._ill_formed = False
        self._complete = False
        self._chunked = False
        self._length: int | None = None
        self._raw = False
        self._at_boundary = False
        self._boundary = False
        self._excess = False
        self._interim = 0
        self._keep_alive = False
        self._pieces: list[bytes] = []

    # What the relay asks.

    def send(self, exchange: "Exchange", head: bytes, body: bytes) -> None:
        """Send a request; its answer goes to `exchange`."""
        self.exchange = exchange
        transport = self.transport
        if transport is None or transport.is_closing():
            self.exchange = None
            exchange.fail(unreachable("The worker closed the connection before the request was sent."))
            return
        if len(body) < 65536:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def pause(self) -> None:
        """Stop reading: the client does not keep up."""
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.transport is not None:
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once and forget the exchange: the worker sees the connection go and stops generating."""
        self.exchange = None
        if self.transport is not None:
            self.transport.abort()

    @property
    def length(self) -> int | None:
        """The declared length of the answer's body."""
        return self._length

    @property
    def has_pieces(self) -> bool:
        """A part of the body came with the head."""
        return bool(self._pieces)

    @property
    def complete(self) -> bool:
        """The answer has come to its end."""
        return self._complete

    @property
    def bodyless(self) -> bool:
        """The answer has no body by its status."""
        return self.status in _BODYLESS

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio.Protocol: an answer that is not complete is broken, unless its end is the connection's."""
        self.transport = None
        self._on_closed(self)
        exchange = self.exchange
        if exchange is None:
            return
        if exc is None and self._head_complete and self._length is None and not self._chunked and not self._complete:
            self.exchange = None
            exchange.body(b"")
            exchange.end()
            return
        self._lost(exchange)

    def _lost(self, exchange: "Exchange") -> None:
        self.exchange = None
        if self._head_complete:
            error = upstream_error("upstream_reset_midstream", "The worker broke off in the middle of its answer.")
        elif self.status or self._head_bytes:
            error = upstream_error("upstream_reset", "The worker broke off in the middle of its answer's head.")
        else:
            error = upstream_error(
                "upstream_reset", "The worker closed the connection without an answer.", retry=Retry.IF_REUSED
            )
        exchange.fail(error)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol, and the hot path: one call for each read, one write to the client."""
        exchange = self.exchange
        if exchange is None:
            # An idle connection has nothing to say; whatever this is, it must not become part of the next answer.
            self.abort()
            return
        if self._at_boundary:
            if data.startswith(self._size_lines[len(data)]) and data.endswith(b"\r\n"):
                exchange.chunks(data)
                return
            end = whole_chunks(data)
            if end == len(data):
                exchange.chunks(data)
                return
            if end:
                exchange.chunks(data[:end])
                data = data[end:]
        if not self._head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._malformed(exchange)
            return
        except httptools.HttpParserError:
            if not self._complete:
                self._malformed(exchange)
                return
            self._excess = True
        if self._ill_formed:
            self._malformed(exchange)
            return
        if not self._head_complete:
            if self._head_bytes > _MAX_HEAD_BYTES or self._interim > _MAX_INTERIM:
                self._malformed(exchange)
            return
        if not exchange.started and not exchange.begin(self):
            return
        pieces = self._pieces
        if pieces:
            exchange.body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()
        if self._complete:
            self._finish(exchange)
        else:
            # Behind a whole chunk (or the head) and nothing of the next: only then may a read be looked at without the parser.
            self._at_boundary = self._raw and self._boundary and data.endswith(b"\r\n")

    def _finish(self, exchange: "Exchange") -> None:
        self.exchange = None
        transport = self.transport
        clean = (
            transport is not None and not self._excess and self._keep_alive and transport.get_write_buffer_size() == 0
        )
        if clean:
            self._reset()
            if exchange.paused:
                # The next exchange must find a connection that is read, and the pool must see it close.
                self.resume()
        elif transport is not None:
            # Not close(): that would wait until a worker that has answered early takes the rest of the request.
            transport.abort()
        exchange.end(self if clean else None)

    def _malformed(self, exchange: "Exchange") -> None:
        self.abort()
        exchange.fail(upstream_error("upstream_protocol", "The worker's answer is not valid HTTP."))

    # httptools callbacks. They must not raise: httptools would wrap it.

    def on_message_begin(self) -> None:
        """A second message behind a complete one: nobody asked for it."""
        if self._complete:
            self._excess = True

    def on_status(self, status: bytes) -> None:
        """The reason phrase (may come in pieces)."""
        if not self._complete:
            self.reason += status

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """One field of the head, or a trailer: those do not travel."""
        if self._head_complete:
            return
        value = value or b""
        lower = name.lower()
        if lower == b"content-length":
            self._length = int(value)  # llhttp has refused all but digits, with blanks behind them
        elif lower == b"transfer-encoding":
            # Another coding would travel on without the field that names it.
            self._ill_formed |= self._chunked or value.strip().lower() != b"chunked"
            self._chunked = True
        elif lower == b"connection" and value.lower() not in {b"close", b"keep-alive"}:
            self.connection_field = value
        elif lower == b"content-type":
            self.content_type = value
        elif lower == b"content-encoding":
            self.encoded = True
        self._fields_bytes += len(name) + len(value) + 4
        self.lines.append(response_line(lower, name, value))

    def on_headers_complete(self) -> None:
        """The head is there; interim answers (1xx) are swallowed."""
        if self._head_complete:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._ill_formed |= status < 100
            return
        if self._head_bytes > _MAX_HEAD_BYTES:
            # The head came within one read, perhaps with a part of the body.
            size = self._fields_bytes
            self._ill_formed |= size > _MAX_HEAD_BYTES
        if self.reason not in _PLAIN_REASONS and not self.reason.decode("latin-1").isprintable():
            self._ill_formed = True
        self.status = status
        self._head_complete = True
        self._boundary = True
        # Asked here and not at the end: llhttp has forgotten the framing by then.
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, without its framing."""
        if not self._complete:
            self._boundary = False
            self._pieces.append(piece)

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._boundary = False

    def on_chunk_complete(self) -> None:
        """A chunk has ended."""
        self._boundary = True

    def on_message_complete(self) -> None:
        """The answer is whole, or an interim one is."""
        if self._head_complete:
            self._complete = True
            return
        self._interim += 1
        self.reason = b""
        self.lines = []
        self.content_type = b""
        self.encoded = False
        self._fields_bytes = 0
        self.connection_field = None
        self._length = None
        self._chunked = False

    def use_raw_chunks(self) -> None:
        """Relay whole chunks as they came: the client takes chunks too."""
        self._raw = self._chunked
