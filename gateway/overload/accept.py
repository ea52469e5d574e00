"""The data listener's sockets, and who is let in by them.

The loop's own listener is of no use when descriptors run out: libuv accepts what waits and closes it at once without a word, asyncio stops for a
second and logs each time. Here a client is answered 503 with `Retry-After` as long as there is one descriptor to answer with, one is kept for
that, and what is done about it is said once.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from gateway.errors import OUT_OF_RESOURCES, GatewayError, Source
from gateway.http.errors import error_answer
from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    from gateway.overload.guard import Guard

BATCH: Final = 64
"""Connections that are accepted in one turn of the loop."""
_SHORTEST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
"""Seconds without accepting while there is no descriptor, doubled each time."""
_UNREAD: Final = 65_536
_OVER: Final = 5.0
"""Seconds without a refusal after which a shortage counts as over, and the next one as another."""

_log = structlog.get_logger(__name__)

_NO = error_answer(
    GatewayError(
        503,
        "gateway_overloaded",
        "The gateway has no room for another connection.",
        source=Source.GATEWAY,
        code="gateway_overloaded",
        retry_after=2,
    ),
    close=True,
)


class Acceptor:
    """Listens, and makes a protocol of each connection.

    Attributes:
        port: where it listens; 0 before `start`.
    """

    __slots__ = (
        "_failures",
        "_guard",
        "_loop",
        "_pause",
        "_protocol",
        "_refused_at",
        "_short",
        "_sockets",
        "_spare",
        "_tasks",
        "_timer",
        "port",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol: Callable[[], asyncio.Protocol], guard: "Guard"
    ) -> None:
        self._loop = loop
        self._protocol = protocol
        self._guard = guard
        self._sockets: list[socket.socket] = []
        self._spare: socket.socket | None = None
        self._tasks = TaskGroup("accept")
        self._timer: asyncio.TimerHandle | None = None
        self._pause = _SHORTEST_PAUSE
        self._short = False
        self._refused_at = 0.0
        self._failures = 0
        self.port = 0

    async def start(self, host: str, port: int, backlog: int) -> None:
        """Bind all addresses of `host`, and listen.

        Raises:
            OSError: an address is taken or not ours.
        """
        found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                self._sockets.append(_bound(family, kind, protocol, address))
            for sock in self._sockets:
                sock.listen(backlog)
        except OSError:
            self.close()
            raise
        self.port = self._sockets[0].getsockname()[1]
        self._keep_one()
        self._resume()

    def close(self) -> None:
        """Accept nobody more. Calling it again does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    async def stop(self) -> None:
        """Also end what is half accepted."""
        self.close()
        await self._tasks.cancel()

    def _resume(self) -> None:
        self._timer = None
        self._keep_one()
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    self._exhausted(listener, error)
                    return
                continue  # it has gone again (ECONNABORTED and its like)
            if not self._guard.has_room():
                self._turn_away(sock)
                continue
            if self._short and self._loop.time() - self._refused_at > _OVER:
                self._over()
            sock.setblocking(False)
            self._tasks.spawn("connection", self._connected(sock))

    async def _connected(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, sock)
        except OSError:  # it has gone already
            sock.close()

    def _turn_away(self, sock: socket.socket) -> None:
        """Say no. What it has sent already is read: a close before that would reset the connection and take the answer with it."""
        self._guard.turned_away += 1
        self._say("descriptors are short: new connections are refused")
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(_NO)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(_UNREAD)

    def _exhausted(self, listener: socket.socket, error: OSError) -> None:
        """There is no descriptor: with the one that was kept, everybody who waits is told so. Then a pause, for nothing else would help."""
        self._say("no descriptor is left: new connections are refused", error=errno.errorcode.get(error.errno or 0))
        for _ in range(BATCH):
            if self._spare is None:
                break
            self._spare.close()
            self._spare = None
            try:
                sock, _address = listener.accept()
            except OSError:
                break
            self._turn_away(sock)
            self._keep_one()
        self._keep_one()
        for sock in self._sockets:
            self._loop.remove_reader(sock)
        self._timer = self._loop.call_later(self._pause, self._resume)
        self._pause = min(_LONGEST_PAUSE, self._pause * 2)

    def _keep_one(self) -> bool:
        """Have a spare descriptor; whether there is one."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = socket.socket()
        return self._spare is not None

    def _say(self, sentence: str, **facts: object) -> None:
        self._refused_at = self._loop.time()
        if not self._short:
            self._short = True
            self._failures = self._guard.turned_away
            _log.error(sentence, **facts)

    def _over(self) -> None:
        self._short = False
        self._pause = _SHORTEST_PAUSE
        _log.warning("connections are accepted again", refused=self._guard.turned_away - self._failures)


def _bound(family: int, kind: int, protocol: int, address: object) -> socket.socket:
    """A socket as `loop.create_server` makes them."""
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)  # type: ignore[arg-type]  # as getaddrinfo has it
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{address!r}: {error.strerror}") from None
    return sock
