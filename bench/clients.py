"""Clients that ask, check every byte of what they get, and may leave at any moment: what `soak` and `kill_one` send."""

import asyncio
import contextlib
import enum
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
_PATIENCE = 60.0


class Moment(enum.Enum):
    """When a client leaves."""

    UPLOADING = "uploading"
    WAITING = "waiting"
    READING = "reading"


class Result(enum.Enum):
    """How a request ended, as its client sees it."""

    ANSWERED = "answered"
    """A whole answer of status 200."""
    LEFT = "left"
    """The client left on purpose."""
    CLEAN_ERROR = "clean error"
    """An error in the API's shape: a whole answer of status 5xx, or an error event at the end of a stream and no ``[DONE]``."""
    CUT_SHORT = "cut short"
    """An answer that is no stream ended before its promised length, and the connection with it."""
    BROKEN = "broken"
    """Anything else: never right."""


@dataclass
class Tally:
    """What has happened so far.

    Attributes:
        results: how often each end was met.
        errors: codes of the clean errors, and the first lines of what is broken.
        seen: when each request ended that got no answer and was not left, and how.
    """

    results: dict[Result, int] = field(default_factory=lambda: dict.fromkeys(Result, 0))
    errors: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[float, str]] = field(default_factory=list)

    def add(self, result: Result, error: str = "") -> None:
        """Count one request."""
        self.results[result] += 1
        if result in {Result.CLEAN_ERROR, Result.CUT_SHORT, Result.BROKEN}:
            self.seen.append((time.monotonic(), error or result.value))
        if error:
            self.errors[error] = self.errors.get(error, 0) + 1

    @property
    def total(self) -> int:
        """Requests that have ended."""
        return sum(self.results.values())


class Client:
    """One client: asks one request after the other, over one connection as long as that is kept open."""

    def __init__(
        self,
        port: int,
        rng: random.Random,
        tally: Tally,
        *,
        leave: float,
        stream: float = 0.5,
        pause: float = 0.0,
        asks: Callable[[random.Random], bytes] | None = None,
    ) -> None:
        """One client.

        Args:
            port: the gateway's.
            rng: what it does when.
            tally: where it counts.
            leave: the share of requests that are left.
            stream: the share of those that ask for a stream.
            pause: seconds between two requests, on average.
            asks: the rest of the body behind its first members; default: one message of a random length.
        """
        self._port = port
        self._rng = rng
        self._tally = tally
        self._leave = leave
        self._stream = stream
        self._pause = pause
        self._rest = asks or _one_message
        self._writer: asyncio.StreamWriter | None = None
        self._reader = asyncio.StreamReader()

    async def asks(self, goes_on: Callable[[], bool]) -> None:
        """Ask as long as `goes_on` says so."""
        while goes_on():
            await self.asks_once()
            if self._pause:
                await asyncio.sleep(self._rng.expovariate(1 / self._pause))
        self._close()

    async def asks_once(self) -> None:
        """One request from beginning to whatever end."""
        rng = self._rng
        stream = rng.random() < self._stream
        moment = rng.choice(list(Moment)) if rng.random() < self._leave else None
        body = b'{"model":"m","stream":%b,%b}' % (b"true" if stream else b"false", self._rest(rng))
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._ask(body, moment)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
            self._close()
            self._tally.add(Result.BROKEN, type(error).__name__)

    async def _ask(self, body: bytes, moment: Moment | None) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader, writer = self._reader, self._writer
        request = _HEAD.format(len(body)).encode() + body
        if moment is Moment.UPLOADING:
            writer.write(request[: self._rng.randrange(1, len(request))])
            await self._leaves()
            return
        writer.write(request)
        await writer.drain()
        if moment is Moment.WAITING:
            await self._leaves()
            return
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        lower = head.lower()
        if moment is Moment.READING:
            await self._leaves()
            return
        if b"transfer-encoding: chunked" in lower:
            self._judge_stream(status, await _dechunked(reader))
        else:
            length = int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            try:
                self._judge(status, await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                self._tally.add(Result.CUT_SHORT)
                self._close()
                return
        if b"connection: close" in lower:
            self._close()

    def _judge_stream(self, status: int, body: bytes) -> None:
        if status == 200 and body.endswith(b"data: [DONE]\n\n"):
            self._tally.add(Result.ANSWERED)
        elif status == 200 and b"[DONE]" not in body and (error := _error_event(body)):
            self._tally.add(Result.CLEAN_ERROR, error)
            self._close()
        else:
            self._tally.add(Result.BROKEN, f"stream of status {status}: {body[-80:]!r}")

    def _judge(self, status: int, body: bytes) -> None:
        if status == 200:
            self._tally.add(Result.ANSWERED)
        elif status >= 500 and body.startswith(b'{"error":{"message":'):
            self._tally.add(Result.CLEAN_ERROR, _code(body))
        else:
            self._tally.add(Result.BROKEN, f"status {status}: {body[:80]!r}")

    async def _leaves(self) -> None:
        """Go after a moment, with FIN or RST."""
        assert self._writer is not None
        # Half of them at once: that is when the next step of the gateway has not begun.
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.02))))
        if self._rng.random() < 0.5:
            sock = self._writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()
        self._tally.add(Result.LEFT)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


def _one_message(rng: random.Random) -> bytes:
    """Mostly small prompts, some of a few hundred kilobytes."""
    size = int(rng.paretovariate(1.0) * 500) % 300_000
    return b'"messages":[{"role":"user","content":"%b"}]' % (b"x" * size)


async def _dechunked(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        pieces.append((await reader.readexactly(size + 2))[:-2])
        if not size:
            return b"".join(pieces)


def _error_event(body: bytes) -> str:
    """The code in the error event at the end of a stream; empty if there is none."""
    before, found, event = body.rpartition(b'data: {"error":')
    stands_alone = not before or before.endswith(b"\n\n")
    return _code(event) if found and stands_alone and event.endswith(b"}}\n\n") else ""


def _code(body: bytes) -> str:
    return body.partition(b'"code":"')[2].partition(b'"')[0].decode() or "?"


async def fetch(port: int, target: str) -> bytes:
    """The body of what the gateway's admin listener answers to a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return body


async def scrape(port: int) -> dict[str, float]:
    """The samples of the gateway's ``/metrics`` by name and labels."""
    text = (await fetch(port, "/metrics")).decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


async def until_ready(port: int, workers: int, seconds: float = 30.0) -> None:
    """Wait until that many workers are ready.

    Raises:
        RuntimeError: they are not in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        samples = await scrape(port)
        ready = sum(value for key, value in samples.items() if "worker_state" in key and 'state="ready"' in key)
        if ready >= workers:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("the workers are not ready")


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]
