"""A race: attempts of one request side by side, of which the first whose answer's body begins goes to the client.

The first byte of a *body* decides: a head proves nothing, for vLLM sends it before the first token. Nothing is written to the client before.
"""

from time import time
from typing import TYPE_CHECKING, Self

from gateway.errors import GatewayError, Source
from gateway.http.relay import Exchange
from gateway.http.retry_after import retry_after_of

if TYPE_CHECKING:
    import asyncio

    from gateway.fleet.health import HealthMonitor
    from gateway.fleet.worker import Lease, Worker
    from gateway.http.journey import Journey
    from gateway.http.upstream import UpstreamConnection
    from gateway.http.watch import UsageWatch
    from policies.base import Match


class Entrant:
    """One attempt of a race.

    Attributes:
        race: which one.
        worker, lease, match: where it goes, as what it counts there, and what was believed to be held there.
        hedge: it is not the first.
        lost: another one has won.
        exchange: once there is a connection.
        watch: sees its answer's usage.
    """

    __slots__ = ("exchange", "hedge", "lease", "lost", "match", "race", "watch", "worker")

    def __init__(self, race: "Race", worker: "Worker", lease: "Lease", match: "Match", *, hedge: bool) -> None:
        self.race = race
        self.worker = worker
        self.lease = lease
        self.match = match
        self.hedge = hedge
        self.lost = False
        self.exchange: Contender | None = None
        self.watch: UsageWatch | None = None


class Race:
    """The attempts of one request that run side by side.

    Attributes:
        entrants: in their order.
        running: those whose end has not come.
        winner: whose answer goes to the client, once that is known.
    """

    __slots__ = ("_health", "_journey", "entrants", "running", "tasks", "winner")

    def __init__(self, journey: "Journey", health: "HealthMonitor") -> None:
        self._journey = journey
        self._health = health
        self.entrants: list[Entrant] = []
        self.running: set[Entrant] = set()
        self.tasks: dict[asyncio.Task[tuple[GatewayError | None, bool]], Entrant] = {}
        self.winner: Entrant | None = None

    def alone(self, entrant: Entrant) -> bool:
        """Whether no other attempt runs that may still answer."""
        return self.running <= {entrant}

    def wins(self, entrant: Entrant) -> None:
        """The first byte of an answer's body is there: from here on the request is this attempt's, and all others end."""
        if self.winner is not None:
            return
        self.winner = entrant
        journey = self._journey
        journey.worker = entrant.worker
        journey.lease = entrant.lease
        journey.match = entrant.match
        journey.watch = entrant.watch
        client, exchange = journey.request.connection, entrant.exchange
        if exchange is not None:
            client.exchange = exchange
            if client.writing_paused:
                exchange.pause()
        if entrant.hedge:
            first = self.entrants[0]
            self._health.waited_in_vain(first.worker)
        for task, other in self.tasks.items():
            if other is entrant or task.done():
                continue
            other.lost = True
            other.lease.release()
            if other.exchange is not None:
                other.exchange.overtaken()
            else:
                task.cancel()


class Contender(Exchange):
    """An exchange whose answer goes to the client only if its body begins before that of the others."""

    __slots__ = ("entrant",)

    entrant: Entrant

    def enters(self, entrant: Entrant) -> Self:
        """Take part in a race."""
        self.entrant = entrant
        entrant.exchange = self
        return self

    def begin(self, connection: "UpstreamConnection") -> bool:
        """The worker's head is there, and perhaps more: called again with each read until the body begins."""
        if connection.status < 400 and not (connection.has_pieces or connection.complete):
            self.status = connection.status
            self.moved = True
            return True
        return self._answers(connection)

    def declined(self, connection: "UpstreamConnection", status: int) -> bool:
        """A worker that fails or is busy does not win while another may still answer."""
        if (status >= 500 or status == 429) and not self.entrant.race.alone(self.entrant):
            self.retry_after = retry_after_of(connection.lines, time())
            return True
        return super().declined(connection, status)

    def end(self, connection: "UpstreamConnection | None" = None) -> None:
        """The answer is whole; one without a body, ended by its connection's end, begins only now."""
        upstream = self._connection
        if not self.started and upstream is not None and not self._answers(upstream):
            return
        super().end(connection)

    def overtaken(self) -> None:
        """Another one has won: the worker's connection is closed, so that it stops."""
        self.client_gone()
        self._finish()

    def _answers(self, connection: "UpstreamConnection") -> bool:
        if self.client.transport is None:
            # The client is gone, and only the exchange that it knows was told; the handler will hear of it in this turn of the loop.
            self.entrant.lost = True
            self.gives_up(connection)
            return False
        if connection.status < 400:
            self.entrant.race.wins(self.entrant)
            return super().begin(connection)
        begun = super().begin(connection)
        if begun:
            self.entrant.race.wins(self.entrant)
        return begun


def overtaken() -> GatewayError:
    """How an attempt ends that has lost its race. Never seen by a client."""
    return GatewayError(503, "hedge_lost", "Another attempt was quicker.", source=Source.GATEWAY)
