"""Transcripts: a raw client and scripted workers around a real gateway on loopback, on uvloop as in production."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from gateway.app import Gateway
from gateway.config.load import loads
from gateway.tasks import TaskGroup

CHAT = "/v1/chat/completions"
CARDS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"vllm","max_model_len":4096}]}'


async def until(holds: Callable[[], bool], seconds: float = 5) -> None:
    """Wait for a state that announces itself by no event."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.002)


@dataclass
class Message:
    """A parsed HTTP/1.1 message."""

    start: str
    fields: list[tuple[str, str]]
    body: bytes
    complete: bool = True

    @property
    def status(self) -> int:
        return int(self.start.split(" ")[1])

    def get(self, name: str) -> str | None:
        values = [value for key, value in self.fields if key.lower() == name]
        return values[0] if values else None

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key.lower() == name]

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


class Peer:
    """One side of a connection, reading and writing raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def sends(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Message:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        start, *lines = raw[:-4].decode("latin-1").split("\r\n")
        fields = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return Message(start, fields, b"")

    async def receives(self) -> Message:
        """A whole message: head and body by its framing."""
        message = await self.head()
        if "100 Continue" in message.start:
            return message
        length = message.get("content-length")
        if (message.get("transfer-encoding") or "").lower() == "chunked":
            message.body = await self.chunked_body()
        elif length is not None:
            message.body = await self.reader.readexactly(int(length))
        elif message.start.startswith("HTTP/") and message.status not in {204, 304}:
            message.body = await self.reader.read()
        return message

    async def chunked_body(self) -> bytes:
        pieces = []
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            piece = await self.reader.readexactly(size + 2)
            assert piece.endswith(b"\r\n")
            if size == 0:
                return b"".join(pieces)
            pieces.append(piece[:-2])

    async def chunk(self) -> bytes:
        """One chunk of a body; empty for the last one."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def sees_end(self) -> bytes:
        """Wait until the other side has closed; returns what came before."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    async def closes(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def resets(self) -> None:
        """Close with RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        await asyncio.sleep(0)


class ScriptedWorker:
    """A worker whose every byte the test decides. Health checks and model cards are answered by themselves."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[Peer] = asyncio.Queue()
        self.healthy = True
        self.cards = CARDS
        self.connections = 0
        self.peers: list[Peer] = []
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=1 << 22)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for peer in self.peers:
            peer.writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(4)
        if not first:
            writer.close()
            return
        peer = Peer(reader, writer)
        if first == b"GET ":
            await self._control(peer)
            return
        reader._buffer[:0] = first  # type: ignore[attr-defined]
        self.connections += 1
        self.peers.append(peer)
        self.arrivals.put_nowait(peer)

    async def _control(self, peer: Peer) -> None:
        """GETs are the control plane's."""
        rest = await peer.reader.readuntil(b"\r\n\r\n")
        path = rest.split(b" ")[0].decode()
        body = self.cards if path == "/v1/models" else b""
        status = b"200 OK" if self.healthy else b"503 Service Unavailable"
        peer.writer.write(
            b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
        )
        with contextlib.suppress(ConnectionError):
            await peer.writer.drain()
        peer.writer.close()

    async def accepts(self) -> Peer:
        """The next connection on which a request has begun to arrive."""
        return await self.arrivals.get()

    @contextlib.asynccontextmanager
    async def answering(self, raw: bytes) -> AsyncIterator[list[Message]]:
        """Inside the block every request is answered with `raw`; gives the list of those that came."""
        requests: list[Message] = []

        async def serve(peer: Peer) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    requests.append(await peer.receives())
                    await peer.sends(raw)

        async def accept() -> None:
            while True:
                tasks.spawn("serve", serve(await self.accepts()))

        tasks = TaskGroup("worker")
        tasks.spawn("accept", accept())
        try:
            yield requests
        finally:
            await tasks.cancel()

    async def receives(self) -> tuple[Peer, Message]:
        """The next new connection and the request on it."""
        peer = await self.accepts()
        return peer, await peer.receives()


def answer(body: bytes = b'{"ok":true}', *, status: str = "200 OK", fields: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status.encode(),
        fields,
        len(body),
        body,
    )


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def post(body: Any = None, *, path: str = CHAT, fields: str = "", host: str = "gateway") -> bytes:
    raw = body if isinstance(body, bytes) else orjson.dumps({"model": "m", "messages": []} if body is None else body)
    return f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{fields}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


@dataclass
class Bench:
    """A gateway with its workers."""

    gateway: Gateway
    workers: list[ScriptedWorker]
    conservation: Any
    clients: list[Peer] = field(default_factory=list)

    @property
    def worker(self) -> ScriptedWorker:
        return self.workers[0]

    async def client(self) -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port, limit=1 << 22)
        peer = Peer(reader, writer)
        self.clients.append(peer)
        return peer

    async def arrives(self) -> tuple[ScriptedWorker, Peer, Message]:
        """The next request that begins on a new connection to any worker: who got it, and what it is."""
        waiting = {asyncio.ensure_future(worker.arrivals.get()): worker for worker in self.workers}  # noqa: TID251
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        first, *others = done
        for other in others:
            waiting[other].arrivals.put_nowait(other.result())
        return waiting[first], first.result(), await first.result().receives()

    def fleet_worker(self, scripted: ScriptedWorker) -> Any:
        """The gateway's view of a worker."""
        return next(worker for worker in self.fleet_workers if worker.port == scripted.port)

    def failures(self, scripted: ScriptedWorker | None = None) -> int:
        """Requests that failed in a row on a worker, as its health counts them."""
        return self.gateway._health._lives[self.fleet_worker(scripted or self.worker)].failures

    @property
    def attempts(self) -> dict[str | None, int]:
        """Finished attempts on all workers by error type."""
        counts: dict[str | None, int] = {}
        for (_, error_type), count in self.gateway.metrics.attempts.items():
            counts[error_type] = counts.get(error_type, 0) + count
        return counts

    @contextlib.asynccontextmanager
    async def bystander(self, scripted: ScriptedWorker | None = None) -> AsyncIterator[None]:
        """A stream of somebody else that must not notice what happens inside the block."""
        client = await self.client()
        await client.sends(post({"model": "m", "stream": True}))
        peer, _ = await (scripted or self.worker).receives()
        await peer.sends(SSE_HEAD + chunk(b"data: 1\n\n"))
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        yield
        await peer.sends(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        assert await client.chunked_body() == b"data: 2\n\n"

    async def refuses(self, raw: bytes, *statuses: int, closes: bool = True, bytewise: bool = False) -> Message:
        """A new connection that sends `raw` gets an error in OpenAI's shape with one of `statuses`, and no worker hears of it.

        Nothing of what was sent comes back (rows hold the word EVIL where an echo would show). With `closes` the connection
        ends, else it carries another request.
        """
        reached = sum(worker.connections for worker in self.workers)
        client = await self.client()
        with contextlib.suppress(ConnectionError):  # the refusal may come before the last byte has gone
            for piece in [raw[i : i + 1] for i in range(len(raw))] if bytewise else [raw]:
                await client.sends(piece)
                if bytewise:
                    await asyncio.sleep(0)
        refusal = await client.receives()
        assert refusal.status in statuses, refusal
        assert set(refusal.json["error"]) == {"message", "type", "param", "code"}
        assert refusal.get("content-type") == "application/json"
        assert "EVIL" not in f"{refusal.start}{refusal.fields}{refusal.body!r}"
        if closes:
            assert refusal.get("connection") == "close"
            assert await client.sees_end() == b""
        else:
            await client.sends(b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\n\r\n")
            assert (await client.receives()).json["object"] == "list"
        await self.settles()
        assert sum(worker.connections for worker in self.workers) == reached
        assert not self.outcomes.get("failed")
        return refusal

    async def serves(self) -> None:
        """A good request on a new connection is answered."""
        client = await self.client()
        await client.sends(post())
        worker, _ = await self.worker.receives()
        await worker.sends(answer(b'{"good":1}', fields=b"connection: close\r\n"))
        assert (await client.receives()).json == {"good": 1}
        await self.settles()

    async def settles(self) -> None:
        """Wait until nothing is in flight anywhere."""
        await until(lambda: not self.gateway.metrics.in_flight and not any(w.in_flight for w in self.fleet_workers))

    @property
    def fleet_workers(self) -> list[Any]:
        return list(self.gateway.proxy.fleets.workers())

    @property
    def outcomes(self) -> dict[str, int]:
        """Finished requests by outcome."""
        counts: dict[str, int] = {}
        for key, series in self.gateway.metrics.requests.items():
            counts[key[3].value] = counts.get(key[3].value, 0) + series.count
        return counts

    @property
    def error_types(self) -> dict[str, int]:
        """Finished requests by error type."""
        counts: dict[str, int] = {}
        for key, series in self.gateway.metrics.requests.items():
            if key[4] is not None:
                counts[key[4]] = counts.get(key[4], 0) + series.count
        return counts

    def obeys_conservation(self) -> None:
        """Accepted = completed + client gone + failed; nothing in flight; nothing left over."""
        assert self.conservation.broken(self.gateway) == []


Start = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def start(conservation: Any) -> AsyncIterator[Start]:
    """Start a gateway: `await start(workers=2, timeouts={...}, retries={...}, limits={...}, ...)`.

    Keywords are top-level sections of the configuration; `models` replaces the one model `m` over all workers.
    """
    benches: list[Bench] = []

    async def begin(
        workers: int = 1, *, policy: str = "leastload", model: dict[str, Any] | None = None, **sections: Any
    ) -> Bench:
        scripted = [ScriptedWorker() for _ in range(workers)]
        for worker in scripted:
            await worker.start()
        urls = [{"url": worker.url, "driver": "vllm"} for worker in scripted]
        text = orjson.dumps(
            {
                "listen": {"host": "127.0.0.1", "port": 0},
                "admin": {"host": "127.0.0.1", "port": 0},
                "models": [{"name": "m", "policy": policy, "workers": urls, **(model or {})}],
                "grace": 1,
                **sections,
            }
        ).decode()
        gateway = Gateway(loads(text))
        await gateway.start()
        bench = Bench(gateway, scripted, conservation)
        benches.append(bench)
        await until(lambda: all(worker.routable for worker in bench.fleet_workers))
        return bench

    yield begin
    for bench in benches:
        for client in bench.clients:
            client.writer.transport.abort()
        for worker in bench.workers:
            await worker.stop()
        await bench.gateway.stop(0.5)
        bench.obeys_conservation()
    for bench in benches:
        assert conservation.left_over(bench.gateway) == []


class BlackHole:
    """A worker that passes its first health check and then accepts nothing: with its backlog full, the kernel drops each SYN."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._listener.setblocking(False)
        self._fillers: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def passes_a_check(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(2):  # health, model cards
            sock, _ = await loop.sock_accept(self._listener)
            with sock:
                await loop.sock_recv(sock, 10_000)
                await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    def falls_silent(self) -> None:
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self._listener.getsockname())
            self._fillers.append(filler)

    def close(self) -> None:
        for sock in (self._listener, *self._fillers):
            sock.close()


@pytest.fixture
def black_hole() -> Any:
    """`await black_hole(start, url, ...)`: a bench of one worker that accepts no connection any more, and those at the urls."""
    hole = BlackHole()

    async def begin(start: Start, *urls: str, **sections: Any) -> Bench:
        workers = [{"url": url, "driver": "vllm"} for url in (hole.url, *urls)]
        bench, _ = await asyncio.gather(
            start(workers=0, model={"workers": workers}, health={"interval": 60}, **sections), hole.passes_a_check()
        )
        hole.falls_silent()
        return bench

    yield begin
    hole.close()


@pytest.fixture
def http() -> Any:
    """The words of transcripts."""
    return SimpleNamespace(
        answer=answer,
        chunk=chunk,
        post=post,
        SSE_HEAD=SSE_HEAD,
        CHAT=CHAT,
        ScriptedWorker=ScriptedWorker,
        Peer=Peer,
        until=until,
    )
