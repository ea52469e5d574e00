"""One attempt: a request on its way to one worker, and the answer on its way back.

An `Exchange` stands between an `UpstreamConnection` and a `ClientConnection`. Its methods are called from the two sockets' callbacks and never
await; the handler awaits `wait()`, which ends in one of three ways: the answer was relayed, the worker said something that another worker may
do better (nothing was written), or a `GatewayError`.
"""

import asyncio
import math
from http import HTTPStatus
from time import monotonic, time
from typing import TYPE_CHECKING, Protocol

from gateway.errors import GatewayError
from gateway.http.errors import error_event
from gateway.http.headers import response_head
from gateway.http.retry_after import retry_after_of
from gateway.http.routes import Dialect
from gateway.http.tail import chunk_payloads
from gateway.telemetry.pace import KEPT, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from gateway.config.schema import Timeouts
    from gateway.fleet.worker import Lease
    from gateway.http.pool import UpstreamPool
    from gateway.http.upstream import UpstreamConnection
    from gateway.http.watch import UsageWatch

_TAIL = 8
_BUSY = frozenset({HTTPStatus.TOO_MANY_REQUESTS.value, HTTPStatus.SERVICE_UNAVAILABLE.value})
_DONE = b"data: [DONE]"
"""What OpenAI's streams end with."""


class Client(Protocol):
    """What an exchange needs of the client's connection."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once the client is gone."""

    @property
    def writing_paused(self) -> bool:
        """The client does not read as fast as we write."""


class Exchange:
    """One attempt at one worker.

    Attributes:
        done: ends with the attempt: with a result when an answer was relayed (`started`) or its status is one that another worker may do better
            (then nothing was written to the client, and `status` says what it was); with a `GatewayError` when the attempt failed.
        started: a byte of the answer went to the client; from here on there is no other worker.
        first_byte: monotonic time of the first relayed byte of the body, or 0. A head alone says little: vLLM sends that of a stream before it
            has begun with the prompt.
        bytes_out: bytes written to the client for this answer.
        moved: set by every byte that moved; the sweeper clears it to see silence.
        since: loop time when the present silence was first seen (owned by the sweeper).
        paused: the worker is not read because the client does not keep up.
        keep_alive: whether the client's connection may carry another request; final once `done` is.
        status: the worker's status, or 0.
        stream: the answer is a stream of server-sent events.
        pace: the moments at which its reads came; None for other answers.
        encoded: the answer has a content coding, so nothing readable can be added to it.
        retry_after: seconds after which the worker wants to be asked again, of answers 429 and 503 that say so.
        first_byte_deadline, total_deadline: loop times, infinity for none; the second does not hold for streams.
        silence: seconds of silence after the first byte that are too long.
    """

    __slots__ = (
        "_chunk_out",
        "_connection",
        "_dialect",
        "_framed",
        "_http10",
        "_last",
        "_lease",
        "_own_lines",
        "_pass_on",
        "_pool",
        "_request",
        "_retry_statuses",
        "_until_close",
        "_write",
        "bytes_out",
        "client",
        "done",
        "encoded",
        "first_byte",
        "first_byte_deadline",
        "keep_alive",
        "moved",
        "pace",
        "paused",
        "retry_after",
        "silence",
        "since",
        "started",
        "status",
        "stream",
        "total_deadline",
        "watch",
    )

    def __init__(
        self,
        client: Client,
        pool: "UpstreamPool",
        lease: "Lease",
        *,
        loop: asyncio.AbstractEventLoop,
        dialect: Dialect,
        own_lines: bytes,
        http10: bool,
        keep_alive: bool,
        retry_statuses: "Container[int]",
        pass_on: "Callable[[Exchange], bool]",
        watch: "UsageWatch | None" = None,
    ) -> None:
        """Statuses in `retry_statuses`, and others with Retry-After, are not relayed if `pass_on`, asked when one comes, says that another worker will try."""
        self.client = client
        self._pool = pool
        self._lease = lease
        self._dialect = dialect
        self._own_lines = own_lines
        self._http10 = http10
        self._retry_statuses = retry_statuses
        self._pass_on = pass_on
        self.done: asyncio.Future[None] = loop.create_future()
        self._connection: UpstreamConnection | None = None
        transport = client.transport
        self._write = transport.write if transport is not None else _nowhere
        self._chunk_out = False
        self._request = (b"", b"")
        self._last = b""
        self._framed = False
        self._until_close = False
        self.keep_alive = keep_alive
        self.watch = watch
        self.started = False
        self.first_byte = 0.0
        self.first_byte_deadline = self.total_deadline = self.silence = math.inf
        self.bytes_out = 0
        self.moved = True
        self.since = 0.0
        self.paused = False
        self.status = 0
        self.stream = False
        self.pace: Pace | None = None
        self.encoded = False
        self.retry_after: float | None = None

    def prepare(self, connection: "UpstreamConnection", head: bytes, body: bytes) -> None:
        """Take over `connection` and what is to be sent."""
        self._connection = connection
        self._request = (head, body)

    def start(self) -> None:
        """Send the request."""
        assert self._connection is not None
        self._connection.send(self, *self._request)
        self._request = (b"", b"")
        if self.client.writing_paused:
            self.pause()

    # Called by the upstream connection.

    def begin(self, connection: "UpstreamConnection") -> bool:
        """The worker's head is there. False: it is not relayed and the connection is closed."""
        self.status = status = connection.status
        if status >= HTTPStatus.BAD_REQUEST and self.declined(connection, status):
            self.gives_up(connection)
            return False
        framing = b""
        if connection.bodyless:
            pass
        elif connection.length is not None:
            framing = b"content-length: %d\r\n" % connection.length
        elif self._http10:
            self.keep_alive = False
            self._until_close = True
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._chunk_out = True
            connection.use_raw_chunks()
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif self._http10:
            framing += b"connection: keep-alive\r\n"
        self.stream = connection.content_type[:17].lower() == b"text/event-stream"
        if self.stream:
            self.pace = Pace()
        self.encoded = connection.encoded
        self._last = response_head(
            status,
            connection.reason,
            connection.lines,
            framing=framing,
            own=self._own_lines,
            connection=connection.connection_field,
        )
        self.started = True
        if self.watch is not None:
            self.watch.begin(
                strip=self.stream and not self.encoded and status == HTTPStatus.OK and connection.length is None
            )
        if not connection.has_pieces:
            self._out(self._last)
            self._last = b""
        return True

    def declined(self, connection: "UpstreamConnection", status: int) -> bool:
        """Whether an answer of this status is not relayed, because another worker will try."""
        if status in _BUSY:
            self.retry_after = retry_after_of(connection.lines, time())
        return (status in self._retry_statuses or self.retry_after is not None) and self._pass_on(self)

    def gives_up(self, connection: "UpstreamConnection") -> None:
        """End without an answer for the client."""
        self._connection = None
        connection.abort()
        self._finish()

    def body(self, data: bytes) -> None:
        """A part of the answer's body, without framing."""
        if self.pace is not None:
            self._mark(self.pace)
        elif not self.first_byte:
            self._first_byte(monotonic())
        if self.watch is not None:
            data = self.watch.body(data)
            if not data and self.bytes_out:
                self.moved = True
                return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunk_out and data else data
        if self.bytes_out:
            self._out(framed)
        else:
            # The head waits for the first piece that came with it: one write instead of two.
            self._out(self._last + framed)
        self._last = data
        self._framed = False

    def chunks(self, data: bytes) -> None:
        """Whole chunks, framed as they came."""
        if self.pace is not None:
            self._mark(self.pace)
        elif not self.first_byte:
            self._first_byte(monotonic())
        if self.watch is not None:
            data = self.watch.chunks(data)
        if data:
            self._write(data)
            self.bytes_out += len(data)
            self._last = data
            self._framed = True
        self.moved = True

    def end(self, connection: "UpstreamConnection | None" = None) -> None:
        """The answer is whole; `connection`, when given, may carry another request."""
        self._connection = None
        self._release_held()
        if self._chunk_out:
            self._out(b"0\r\n\r\n")
        if connection is not None:
            self._pool.release(connection)
        self._finish()

    def fail(self, error: GatewayError) -> None:
        """The attempt is over: the worker broke off, took too long, or is being given up on."""
        connection = self._connection
        self._connection = None
        if connection is not None and connection.exchange is self:
            connection.abort()
        if self.started:
            self.keep_alive = False
            self._end_broken(error)
        if not self.done.done():
            self.done.set_exception(error)

    # Called by the client's connection.

    def pause(self) -> None:
        """The client does not keep up: stop reading from the worker."""
        self.paused = True
        self.moved = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self.paused = False
        self.moved = True
        if self._connection is not None:
            self._connection.resume()

    def client_gone(self) -> None:
        """Close the way to the worker now, so that it stops generating; the handler's task is cancelled by its server."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.abort()

    def _release_held(self) -> None:
        """Send what the watch held back because it might have been the event to take out."""
        held = self.watch.release() if self.watch is not None else b""
        if held:
            self._out(b"%x\r\n%b\r\n" % (len(held), held) if self._chunk_out else held)
            self._last = held
            self._framed = False

    def _first_byte(self, now: float) -> None:
        self.first_byte = now
        self._lease.first_byte(now)

    def _mark(self, pace: Pace) -> None:
        """A read of a stream."""
        now = monotonic()
        if not self.first_byte:
            self._first_byte(now)
        stamps = pace.stamps
        stamps.append(now)
        if len(stamps) > KEPT:
            pace.fold()

    def _out(self, data: bytes) -> None:
        if data:
            self._write(data)
            self.bytes_out += len(data)
            self.moved = True

    def _end_broken(self, error: GatewayError) -> None:
        """Tell the client inside its stream what happened, as far as its framing allows.

        The handler closes the connection. Without the last chunk or the promised length, the client sees by itself that the answer is not
        whole.
        """
        if self.client.transport is None or not self.stream or self.encoded:
            return
        tail = self._last
        if self._framed:
            # Of the last chunk only: the line breaks around its size are framing, however much they look like an event's end.
            start, end = chunk_payloads(tail)[-1]
            tail = tail[start:end]
        # Behind the last event of all there is nothing to be said: the client has its answer, only the framing's end is missing.
        event = b"" if tail.rstrip().endswith(_DONE) else error_event(error, self._dialect, tail[-_TAIL:])
        if self._chunk_out:
            self._out(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if event else b"0\r\n\r\n")
        elif self._until_close:
            self._out(event)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def set_deadlines(exchange: Exchange, timeouts: "Timeouts", now: float, *, stream: bool) -> None:
    """Turn a model's time limits (0: none) into the loop times that the sweeper compares."""
    if timeouts.first_byte:
        exchange.first_byte_deadline = now + timeouts.first_byte
    if timeouts.between_chunks:
        exchange.silence = timeouts.between_chunks
    if timeouts.total and not stream:
        exchange.total_deadline = now + timeouts.total


def _nowhere(_data: bytes | bytearray | memoryview) -> None:
    """Where bytes go when the client is gone before the answer."""
