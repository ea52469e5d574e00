"""Time limits of everything that is under way, looked after by one periodic callback.

A timer handle per request and phase would cost more than the rest of a small request's bookkeeping, and a stream would have to re-arm one per
token. Instead each exchange carries its deadlines and a flag that says whether a byte has moved, and a few times a second all of them are looked at.
"""

import asyncio
from typing import TYPE_CHECKING

from gateway.errors import GatewayError, Source
from gateway.http.errors import client_error
from gateway.http.upstream import upstream_error

if TYPE_CHECKING:
    from gateway.http.pool import UpstreamPool
    from gateway.http.relay import Exchange
    from gateway.http.server import GatewayServer

PERIOD = 0.25
"""Seconds between two looks: the precision of every time limit here."""


class Sweeper:
    """Ends what has lasted too long.

    Attributes:
        exchanges: attempts under way; the proxy adds and removes them.
        header_read: seconds a client has for a request's head.
    """

    __slots__ = ("_due", "_handle", "_loop", "_pool", "_server", "exchanges", "header_read")

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: "UpstreamPool", header_read: float) -> None:
        self._loop = loop
        self._pool = pool
        self._server: GatewayServer | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self.exchanges: set[Exchange] = set()
        self.header_read = header_read

    def start(self, server: "GatewayServer") -> None:
        """Begin; `server` is whose unfinished request heads are watched."""
        self._server = server
        self._next(self._loop.time())

    def stop(self) -> None:
        """End."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _next(self, now: float) -> None:
        self._due = now + PERIOD
        self._handle = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        late = now - self._due
        self._next(now)
        if late > PERIOD:
            self._stood_still(late)
            return
        overdue = [
            (exchange, error) for exchange in self.exchanges if (error := limit_passed(exchange, now)) is not None
        ]
        for exchange, error in overdue:
            exchange.fail(error)
        self._pool.prune()
        if self._server is not None and self.header_read:
            oldest = now - self.header_read
            for connection in [c for c in self._server.heads if c.head_since < oldest]:
                connection.head_overdue()

    def _stood_still(self, seconds: float) -> None:
        """The loop could neither send nor read: that time is ours, and on a machine that is too busy the others had little of it either."""
        for exchange in self.exchanges:
            exchange.first_byte_deadline += seconds
            exchange.total_deadline += seconds
            exchange.since += seconds
        if self._server is not None:
            for connection in self._server.heads:
                connection.head_since += seconds


def limit_passed(exchange: "Exchange", now: float) -> GatewayError | None:
    """What to fail `exchange` with at `now`, if one of its limits has passed. Notes when its present silence began."""
    if exchange.moved:
        exchange.moved = False
        exchange.since = now
    if not exchange.first_byte:
        if now > exchange.first_byte_deadline:
            return upstream_error(
                "upstream_timeout_first_byte", "The worker did not begin to answer in time.", status=504
            )
    elif now - exchange.since > exchange.silence:
        if exchange.paused:
            return client_error(408, "client_stalled", "The client stopped reading the answer.")
        return upstream_error(
            "upstream_timeout_idle", "The worker fell silent in the middle of its answer.", status=504
        )
    if now > exchange.total_deadline and not exchange.stream:
        return upstream_error("upstream_timeout_total", "The worker did not finish its answer in time.", status=504)
    return None


def gateway_stopping() -> GatewayError:
    """What is still running at the end of the grace period is ended with this."""
    return GatewayError(
        503,
        "gateway_stopping",
        "The gateway is being stopped; send the request again.",
        source=Source.GATEWAY,
        code="gateway_stopping",
        retry_after=1,
    )
