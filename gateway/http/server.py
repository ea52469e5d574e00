"""The data listener: aiohttp's low-level server with a request of our own and answers that are already on their way.

aiohttp reads and checks the bytes of requests (its C parser is maintained and hardened) and runs one task per connection; the router,
the middlewares, `BaseRequest` and `StreamResponse` are left out. A handler writes to the client's transport itself and returns an
`Answered`, which only says whether the connection may carry another request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import HttpRequestParser
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from gateway.errors import GatewayError
from gateway.http.errors import client_error, error_answer

if TYPE_CHECKING:
    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.streams import StreamReader

    from gateway.http.relay import Exchange


_log = structlog.get_logger(__name__)

_STALLED = 30.0
"""Seconds in which a client must take something of what is written for it."""


class Request:
    """A request whose head has been read.

    Attributes:
        message: method, target, version, raw header fields.
        payload: the body as it comes.
        connection: the client's connection.
        keep_alive: whether the relayed answer lets the connection carry another request.
    """

    __slots__ = ("connection", "keep_alive", "message", "payload")

    def __init__(self, message: "RawRequestMessage", payload: "StreamReader", connection: "ClientConnection") -> None:
        self.message = message
        self.payload = payload
        self.connection = connection
        self.keep_alive = True

    def _cancel(self, exc: BaseException) -> None:
        """Part of aiohttp's protocol: the client is gone."""
        self.payload.set_exception(exc)


class Answered:
    """Says of an answer that has been written whether the connection may carry another request."""

    __slots__ = ("keep_alive",)

    def __init__(self, *, keep_alive: bool) -> None:
        self.keep_alive = keep_alive


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
        if self._request_count != before and isinstance(self._messages[-1][0], _ErrInfo):
            self._break_body()
        if self.head_since:
            self.head_begun = self._request_count == before
            if not self.head_begun:
                self.head_since = 0.0
                self.server.heads.discard(self)
        elif self._request_count == before and self._waiter is not None:
            self.head_begun = True
            self.head_since = self._loop.time()
            self.server.heads.add(self)

    def _break_body(self) -> None:
        """What came was not HTTP. If it stood in a body, whoever reads that must not wait for its end."""
        payloads: list[Any] = [payload for _, payload in self._messages]
        if self._current_request is not None:
            payloads.append(cast("Any", self._current_request).payload)
        for payload in payloads:
            if not payload.is_eof():
                payload.set_exception(RequestPayloadError("malformed"))

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Part of aiohttp's protocol. Called after every read of a body, and then costs a round through the parser for nothing."""
        if self._reading_paused or self._buffer_paused:
            super().resume_reading(resume_parser)

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

    def idle_until(self, latest: float) -> bool:
        """Whether it has carried a request and would be closed for idleness by loop time `latest`."""
        return 0 < self._next_keepalive_close_time <= latest

    def cancel(self) -> None:
        """Cancel the handler of the request that it carries, if any."""
        if not self.idle and self._task_handler is not None:
            self._task_handler.cancel()

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

    def force_close(self) -> None:
        """Part of aiohttp's protocol: close, whatever is going on."""
        transport = self.transport
        super().force_close()
        if transport is not None:
            self._watch_closing(transport)

    def _watch_closing(self, transport: asyncio.Transport) -> None:
        """A socket is closed once the client has read what was written; one that does not read must not hold it open."""
        if left := transport.get_write_buffer_size():
            self._loop.call_later(_STALLED, self._abort_if_stalled, transport, left)

    def _abort_if_stalled(self, transport: asyncio.Transport, before: int) -> None:
        if transport.get_write_buffer_size() >= before:
            transport.abort()
        else:
            self._watch_closing(transport)

    async def _caught_up(self) -> bool:
        """Wait until the client has read most of its answers, so that those to pipelined requests can't pile up; False: it has stopped reading."""
        while (transport := self.transport) is not None:
            before = transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(_STALLED):
                    await self._drain_helper()
            except TimeoutError:
                if transport.get_write_buffer_size() >= before:
                    transport.abort()
                    return False
            except ConnectionError:
                return False
            else:
                return True
        return False

    async def start(self) -> None:
        """Serve the requests of this connection, one after the other, all in this one task.

        Takes the place of aiohttp's own loop, which starts a task of its own and makes a writer for each request: a
        fifth of what a small request costs here. Parsing, pausing and closing are aiohttp's.
        """
        try:
            while not self._force_close:
                if not self._messages and not await self._message_came():
                    break
                message, payload = self._messages.popleft()
                if self._parser is not None:
                    self._parser.message_consumed()
                if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
                    self._resume_reading_if_drained()
                if isinstance(message, _ErrInfo):
                    self._answer_unreadable(message.exc)
                    await self._half_close()
                    break
                request = Request(message, payload, self)
                self._current_request = cast("Any", request)
                self._request_in_progress = True
                try:
                    answered = await self.server.handler(request)
                finally:
                    self._current_request = None
                    self._request_in_progress = False
                    if self._handler_waiter is not None:
                        self._handler_waiter.set_result(None)
                if not payload.is_eof():
                    await self._half_close()
                if self._close or not answered.keep_alive:
                    break
                if self._paused and not await self._caught_up():
                    break
                self._next_keepalive_close_time = due = self._loop.time() + self._keepalive_timeout
                if self._keepalive_handle is None:
                    self._keepalive_handle = self._loop.call_at(due, self._process_keepalive)
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception:  # noqa: BLE001 - this connection ends, all others go on
            _log.exception("connection failed")
            self.force_close()
        self._task_handler = None
        if self.transport is not None:
            self.transport.close()
            self._watch_closing(self.transport)

    async def _message_came(self) -> bool:
        """Wait for a parsed head; False when the connection is to be closed."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            # `close` cancels the future, the loss of the connection cancels this task.
            task = asyncio.current_task()
            if self._close and not (task is not None and task.cancelling()):
                return False
            raise
        finally:
            self._waiter = None
        return True

    async def _half_close(self) -> None:
        """End our side and drop what still comes for a moment: a close would reset the connection and take the answer with it (RFC 9112, section 9.6)."""
        self._close = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()
            self._resume_transport_reading()
            await asyncio.sleep(self._lingering_time)

    def _answer_unreadable(self, exc: BaseException) -> None:
        """What aiohttp could not parse becomes a 400 (or 431) in OpenAI's shape; the parser's own text may hold client bytes."""
        if isinstance(exc, LineTooLong):
            error = client_error(431, "headers_too_large", "The request line or a header field is too long.")
        else:
            error = client_error(400, "invalid_http", "The request is not valid HTTP.")
        self.server.on_refused(error)
        if self.transport is not None:
            self.transport.write(error_answer(error, close=True))


class GatewayServer(web.Server):
    """The factory of client connections.

    Attributes:
        handler: answers one request.
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
        """`on_refused` hears of errors that never became a request; `keep_alive` in seconds.

        Raises:
            RuntimeError: aiohttp was installed without its C parser. The other one takes other requests, and has a history of it.
        """
        if HttpRequestParser.__module__ != "aiohttp._http_parser":
            raise RuntimeError("aiohttp has no C parser here (AIOHTTP_NO_EXTENSIONS, or a build without compiler).")
        super().__init__(cast("Any", handler), handler_cancellation=True, loop=loop)
        self.handler = handler
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

    def set_keep_alive(self, seconds: float) -> None:
        """Close idle connections after `seconds`; holds for connections that are accepted from now on."""
        self._options["keepalive_timeout"] = seconds

    def close_idle(self) -> None:
        """Close the connections that carry no request now; the others are closed by their answer."""
        for connection in list(self._connections):
            if isinstance(connection, ClientConnection) and connection.idle:
                connection.close()

    def close_idle_for(self, seconds: float) -> None:
        """Close the connections that have carried a request, and none for so long: their clients know that an idle connection may end."""
        latest = self._loop.time() - seconds + self._options["keepalive_timeout"]
        for connection in list(self._connections):
            if isinstance(connection, ClientConnection) and connection.idle and connection.idle_until(latest):
                connection.close()

    def cancel_requests(self) -> None:
        """Cancel the handlers that are running."""
        for connection in list(self._connections):
            if isinstance(connection, ClientConnection):
                connection.cancel()

    def unsent(self) -> int:
        """Bytes of answers that are written and have not left."""
        return sum(t.get_write_buffer_size() for t in self._connections.values() if not t.is_closing())

    def __call__(self) -> ClientConnection:
        """A protocol for a new connection."""
        return ClientConnection(self, self._loop, **self._options)
