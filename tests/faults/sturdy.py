"""A worker that answers every request by itself and never fails: what goes wrong is the proxy's doing."""

import asyncio

import httptools

EVENT = b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = b'{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"


def stream_body(events: int) -> bytes:
    """What a client gets from a stream."""
    return b"".join(EVENT % number for number in range(events)) + DONE


class SturdyWorker:
    """Answers health checks, and chats with `WHOLE` or a stream of `events` events a few milliseconds apart.

    Attributes:
        asked: requests so far, without GETs.
        serving: answers under way.
    """

    def __init__(self, events: int = 5, interval: float = 0.002) -> None:
        self.events = events
        self.interval = interval
        self.asked = 0
        self.serving = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        """Where it listens, or listened."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on a free port, or again on that it had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Be gone at once, as after a kill."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.transport.abort()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, worker: SturdyWorker) -> None:
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._worker.connections.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._worker.connections.discard(self)
        self._ended()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self.transport.write(_HEAD % (b"application/json", b"content-length: 2") + b"{}")
            return
        self._worker.asked += 1
        self._worker.serving += 1
        self._serving = True
        if b'"stream":true' in self._body:
            self.transport.write(_HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
            self._later(0)
        else:
            self.transport.write(_HEAD % (b"application/json", b"content-length: %d" % len(WHOLE)) + WHOLE)
            self._ended()

    def _later(self, number: int) -> None:
        asyncio.get_running_loop().call_later(self._worker.interval, self._next, number)

    def _next(self, number: int) -> None:
        if self.transport.is_closing():
            return
        if number < self._worker.events:
            event = EVENT % number
            self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            self._later(number + 1)
        else:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))
            self._ended()

    def _ended(self) -> None:
        self._worker.serving -= self._serving
        self._serving = False
