"""What happens, as it happens: fleet ticks and finished requests as server-sent events.

One task makes each frame once for everybody who watches, and runs only while somebody does. Nobody is waited for: each client has
a short queue, and one that does not keep up is cut off, to come back by itself.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    from gateway.telemetry.decisions import DecisionLog
    from gateway.telemetry.record import RequestRecord

MAX_CLIENTS: Final = 16
QUEUE: Final = 8
"""Frames that may wait for one client."""
REQUESTS_EVERY: Final = 0.25
"""Seconds between two frames of finished requests."""
PER_FRAME: Final = 50
"""Requests in one frame; when more have ended, the latest ones are shown and the frame says so."""
FLEET_EVERY: Final = 1.0
"""Seconds between two frames of the fleet; with more than `MANY` workers in proportion more."""
MANY: Final = 200
_SOFT: Final = 4 * 1024 * 1024
"""Bytes of one frame that are still sent; a fleet too large for that is asked for by `/api/fleet`."""


class Live:
    """The stream. `watch` answers one client; `close` ends all."""

    def __init__(self, decisions: "DecisionLog", fleet: Callable[[], dict[str, Any]]) -> None:
        """`fleet` makes the document of a tick."""
        self._decisions = decisions
        self._fleet = fleet
        self._clients: set[_Client] = set()
        self._tasks = TaskGroup("live")
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def clients(self) -> int:
        """How many watch."""
        return len(self._clients)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """Send frames until the client leaves, falls behind, or `close`.

        Raises:
            HTTPServiceUnavailable: too many watch already.
        """
        if len(self._clients) >= MAX_CLIENTS or self._closed:
            raise web.HTTPServiceUnavailable
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        # The guard sets headers on what a handler returns; here they have to be there before the first byte.
        response.headers.update({"cache-control": "no-store", "x-content-type-options": "nosniff"})
        await response.prepare(request)
        client = _Client(request)
        client.put(_frame("fleet", self._fleet()))
        self._clients.add(client)
        if self._running is None or self._running.done():
            self._running = self._tasks.spawn("frames", self._run())
        try:
            while (frame := await client.frames.get()) is not None:
                await response.write(frame)
        except ConnectionError:
            pass
        finally:
            self._clients.discard(client)
        return response

    async def close(self) -> None:
        """End every stream."""
        self._closed = True
        for client in self._clients:
            client.end()
        await self._tasks.cancel()

    async def _run(self) -> None:
        """Make frames while anybody watches."""
        last = next(iter(self._decisions.recent(1)), None)
        loop = asyncio.get_running_loop()
        due = loop.time() + FLEET_EVERY
        while self._clients:
            await asyncio.sleep(REQUESTS_EVERY)
            records, more = _since(self._decisions.recent(PER_FRAME + 1), last)
            if records:
                last = records[0]
                self._send(
                    _frame("requests", {"requests": [each.summary() for each in reversed(records)], "more": more})
                )
            if loop.time() >= due:
                document = self._fleet()
                workers = sum(len(fleet["workers"]) for fleet in document["fleets"])
                due = loop.time() + FLEET_EVERY * max(1.0, workers / MANY)
                self._send(_frame("fleet", document))

    def _send(self, frame: bytes) -> None:
        if len(frame) > _SOFT:
            return
        for client in list(self._clients):
            if not client.put(frame):
                self._clients.discard(client)


class _Client:
    """One who watches."""

    def __init__(self, request: web.Request) -> None:
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE)
        self._request = request

    def put(self, frame: bytes) -> bool:
        """Queue a frame; a client whose queue is full is cut off: False."""
        try:
            self.frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.end()
            if self._request.transport is not None:
                self._request.transport.abort()
            return False
        return True

    def end(self) -> None:
        """No more frames: what waits is dropped."""
        while not self.frames.empty():
            self.frames.get_nowait()
        self.frames.put_nowait(None)


def _since(records: "Sequence[RequestRecord]", last: "RequestRecord | None") -> "tuple[Sequence[RequestRecord], bool]":
    """Those that are newer than `last`, latest first, and whether there were more than are shown."""
    for index, record in enumerate(records):
        if record is last:
            return records[:index], False
    return records[:PER_FRAME], len(records) > PER_FRAME


def _frame(event: str, document: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), orjson.dumps(document))
