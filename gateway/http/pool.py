"""Connections to workers that wait for their next request."""

import asyncio
import ssl
from typing import TYPE_CHECKING

from gateway.errors import OUT_OF_RESOURCES, GatewayError, Source
from gateway.http.chunks import SizeLines
from gateway.http.upstream import UpstreamConnection, unreachable

if TYPE_CHECKING:
    from gateway.fleet.worker import Worker


class UpstreamPool:
    """Idle connections by worker, the latest used first.

    A connection is dropped after `idle` seconds, which must be less than the worker keeps its side open: a request sent just as the
    worker closes is lost (and is then retried, but that costs a round trip).
    """

    __slots__ = ("_connections", "_idle", "_loop", "_size_lines", "_ssl", "max_idle", "max_idle_seconds")

    def __init__(self, *, idle: float, max_idle: int) -> None:
        """`idle` in seconds; at most `max_idle` idle connections per worker."""
        self.max_idle_seconds = idle
        self.max_idle = max_idle
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Worker, list[UpstreamConnection]] = {}
        self._connections: set[UpstreamConnection] = set()
        self._ssl: ssl.SSLContext | None = None
        self._size_lines = SizeLines()

    def take(self, worker: "Worker") -> UpstreamConnection | None:
        """An idle connection to `worker`, or None."""
        idle = self._idle.get(worker)
        oldest = self._loop.time() - self.max_idle_seconds
        while idle:
            connection = idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
            if connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    async def connect(self, worker: "Worker", timeout: float) -> UpstreamConnection:  # noqa: ASYNC109 - the error says which limit it was
        """A new connection to `worker`.

        Raises:
            GatewayError: it could not be made within `timeout` seconds (0: no limit); another worker may be tried, unless it is this
                process that has run out of descriptors or ports.
        """
        try:
            async with asyncio.timeout(timeout or None):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(worker, self._closed, self._size_lines),
                    worker.host,
                    worker.port,
                    ssl=self._ssl_for(worker),
                )
        except TimeoutError:
            raise unreachable(
                "The worker did not accept a connection in time.", status=504, error_type="upstream_connect_timeout"
            ) from None
        except (OSError, ssl.SSLError) as error:
            if error.errno in OUT_OF_RESOURCES:
                raise GatewayError(
                    503,
                    "gateway_exhausted",
                    "The gateway has no room for another connection.",
                    source=Source.GATEWAY,
                    code="gateway_exhausted",
                    retry_after=1,
                ) from error
            raise unreachable("The worker can't be reached.") from error
        if connection.transport is not None:  # else it is lost already, and `_closed` was called
            self._connections.add(connection)
        return connection

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose exchange has ended cleanly for the next one."""
        worker = connection.worker
        idle = self._idle.get(worker)
        if idle is None:
            idle = self._idle[worker] = []
        if len(idle) >= self.max_idle:
            connection.abort()
            return
        connection.reused = True
        connection.idle_since = self._loop.time()
        idle.append(connection)

    def prune(self, longest: float | None = None) -> None:
        """Close what has been idle for too long, or for `longest` seconds; called now and then."""
        oldest = self._loop.time() - (self.max_idle_seconds if longest is None else longest)
        for worker, idle in list(self._idle.items()):
            keep = [c for c in idle if c.idle_since >= oldest and c.transport is not None]
            for connection in idle:
                if connection.idle_since < oldest:
                    connection.abort()
            if keep:
                self._idle[worker] = keep
            else:
                del self._idle[worker]

    def counts(self) -> dict[str, tuple[int, int]]:
        """By worker id: open connections and how many of them are idle."""
        counts: dict[str, tuple[int, int]] = {}
        for connection in self._connections:
            opened, idle = counts.get(connection.worker.id, (0, 0))
            counts[connection.worker.id] = (opened + 1, idle)
        for worker, connections in self._idle.items():
            opened, idle = counts.get(worker.id, (0, 0))
            counts[worker.id] = (opened, idle + len(connections))
        return counts

    def close(self) -> None:
        """Close every connection, idle or not."""
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()

    def _closed(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        idle = self._idle.get(connection.worker)
        if idle and connection in idle:
            idle.remove(connection)

    def _ssl_for(self, worker: "Worker") -> ssl.SSLContext | None:
        if not worker.tls:
            return None
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        return self._ssl
