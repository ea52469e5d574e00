"""The data listener: aiohttp's low-level server with a request of our own and answers that are already on their way.

aiohttp reads and checks the bytes of requests (its C parser is maintained and hardened) and runs one task per connection; the router,
the middlewares, `BaseRequest` and `StreamResponse` are left out. A handler writes to the client's transport itself and returns an
`Answered`, which only says whether the connection may carry another request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from gateway.errors import GatewayError
from gateway.http.errors import client_error, error_answer, unexpected

if TYPE_CHECKING:
    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.streams import StreamReader

    from gateway.http.relay import Exchange


class Request:
    """What aiohttp's connection loop needs of a request, and no more.

    Attributes:
        message: method, target, version, raw header fields.
        payload: the body as it comes.
        connection: the client's connection.
        keep_alive: whether the relayed answer lets the connection carry another request.
    """

    __slots__ = ("_task", "connection", "keep_alive", "message", "payload", "writer")

    def __init__(
        self,
        message: "RawRequestMessage",
        payload: "StreamReader",
        connection: "ClientConnection",
        writer: Any,
        task: Any,
    ) -> None:
        self.message = message
        self.payload = payload
        self.connection = connection
        self.writer = writer
        self.keep_alive = True
        self._task = task

    @property
    def remote(self) -> str:
        """The client's address, for aiohttp's own messages."""
        return self.connection.peer.decode()

    def _cancel(self, exc: BaseException) -> None:
        self.payload.set_exception(exc)

    def _finish(self) -> None:
        """Called when the handler has returned; there is nothing to tidy up."""


class Answered:
    """An answer that has been written. aiohttp asks it to prepare and to end itself: both are done."""

    __slots__ = ("keep_alive",)

    def __init__(self, *, keep_alive: bool) -> None:
        """`keep_alive`: whether the connection may carry another request."""
        self.keep_alive = keep_alive

    async def prepare(self, request: Request) -> None:
        """Part of aiohttp's protocol."""

    async def write_eof(self) -> None:
        """Part of aiohttp's protocol."""


KEEP = Answered(keep_alive=True)
CLOSE = Answered(keep_alive=False)

Handler = Callable[[Request], Awaitable[Answered]]


class ClientConnection(RequestHandler):
    """One client's connection: back-pressure to the worker, slow heads, errors in OpenAI's shape.

    Attributes:
        exchange: the attempt whose answer is being written here, if any.
        peer: the client's IP address.
        head_since: loop time since when a request's head has been waited for, or 0.
        head_begun: some bytes of it have come.
    """

    __slots__ = ("exchange", "head_begun", "head_since", "peer", "server")

    def __init__(self, server: "GatewayServer", loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(server, loop=loop, **options)
        self.server = server
        self.exchange: Exchange | None = None
        self.peer = b"unknown"
        self.head_since = 0.0
        self.head_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.peer = str(peer[0]).encode()
        self.head_since = self._loop.time()
        self.server.heads.add(self)
        if len(self.server.connections_open) > self.server.max_connections:
            self.refuse(client_error(503, "too_many_connections", "The gateway has as many connections as it takes."))

    def connection_lost(self, exc: BaseException | None) -> None:
        """Part of asyncio.Protocol: whatever the worker is still doing for this client ends now."""
        self.server.heads.discard(self)
        exchange = self.exchange
        if exchange is not None:
            self.exchange = None
            exchange.client_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol: notes when a head is incomplete, so that a client can't hold it open for ever."""
        before = self._request_count
        RequestHandler.data_received(self, data)
        if self.head_since:
            self.head_begun = self._request_count == before
            if not self.head_begun:
                self.head_since = 0.0
                self.server.heads.discard(self)
        elif self._request_count == before and self._current_request is None and not self._messages:
            self.head_begun = True
            self.head_since = self._loop.time()
            self.server.heads.add(self)

    def pause_writing(self) -> None:
        """Part of asyncio.Protocol: the client does not keep up."""
        super().pause_writing()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        """Part of asyncio.Protocol: the client has caught up."""
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.resume()

    @property
    def idle(self) -> bool:
        """It carries no request."""
        return self._current_request is None and not self._messages

    def head_overdue(self) -> None:
        """The client has had its time for a request's head: answer if it began one, and close."""
        if self.head_begun:
            self.refuse(client_error(408, "header_timeout", "The request's head came too slowly."))
        else:
            self.force_close()

    def refuse(self, error: GatewayError) -> None:
        """Answer with `error` outside of any request, and close."""
        self.server.on_refused(error)
        if self.transport is not None:
            self.transport.write(error_answer(error, close=True))
        self.force_close()

    def handle_error(  # aiohttp's signature
        self,
        request: Any,  # noqa: ARG002
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002
    ) -> Any:
        """What aiohttp could not parse becomes a 400 (or 431) in OpenAI's shape. The parser's own text may hold client bytes."""
        if exc is not None and status >= 500:
            self.log_exception("handler failed", exc_info=exc)
            error = unexpected()
        elif isinstance(exc, LineTooLong):
            error = client_error(431, "headers_too_large", "The request line or a header field is too long.")
        else:
            error = client_error(400, "invalid_http", "The request is not valid HTTP.")
        self.server.on_refused(error)
        if self.transport is not None:
            self.transport.write(error_answer(error, close=True))
        return CLOSE


class GatewayServer(web.Server):
    """The factory of client connections.

    Attributes:
        heads: connections that wait for the rest of a request's head.
        max_connections: more than this many are refused.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        on_refused: Callable[[GatewayError], None],
        max_connections: int,
        keep_alive: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`on_refused` hears of errors that never became a request; `keep_alive` in seconds."""
        super().__init__(
            cast("Any", handler), request_factory=cast("Any", Request), handler_cancellation=True, loop=loop
        )
        self._options: dict[str, Any] = {
            "keepalive_timeout": keep_alive,
            "access_log": None,
            "auto_decompress": False,
            "tcp_keepalive": True,
            # A body that nobody will read is not worth waiting for.
            "lingering_time": 2.0,
        }
        self.on_refused = on_refused
        self.max_connections = max_connections
        self.heads: set[ClientConnection] = set()

    @property
    def connections_open(self) -> dict[RequestHandler, asyncio.Transport]:
        """The open client connections, without the copy that `connections` makes."""
        return self._connections

    def close_idle(self) -> None:
        """Close the connections that carry no request now; the others are closed by their answer."""
        for connection in list(self._connections):
            if isinstance(connection, ClientConnection) and connection.idle:
                connection.close()

    def unsent(self) -> int:
        """Bytes of answers that are written and have not left."""
        return sum(t.get_write_buffer_size() for t in self._connections.values() if not t.is_closing())

    def __call__(self) -> ClientConnection:
        """A protocol for a new connection."""
        return ClientConnection(self, self._loop, **self._options)
