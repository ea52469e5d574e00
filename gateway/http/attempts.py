"""One attempt after the other: a request sent to a worker, its answer relayed, the worker judged by it."""

import asyncio
from collections.abc import Mapping
from functools import lru_cache, partial
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, cast

from gateway.errors import GatewayError, Retry
from gateway.fleet.states import FailureKind
from gateway.http import hints
from gateway.http.outgoing import body_for, head_for
from gateway.http.racing import Contender, overtaken
from gateway.http.relay import Exchange, set_deadlines
from gateway.http.upstream import upstream_error
from gateway.telemetry.record import HEDGE_LOST, Attempt

if TYPE_CHECKING:
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.health import HealthMonitor
    from gateway.fleet.worker import Worker
    from gateway.http.journey import Journey
    from gateway.http.pool import UpstreamPool
    from gateway.http.racing import Entrant
    from gateway.http.sweep import Sweeper
    from gateway.http.watch import UsageWatch
    from gateway.prefix.lookup import Matcher
    from gateway.telemetry.metrics import Metrics
    from policies.base import RouteRequest

STALE = "stale_connection"
"""What is said of a connection from the pool that died as a request was sent."""

_NOT_IMPLEMENTED = 501
_KINDS: Mapping[str, FailureKind] = {
    "upstream_connect": FailureKind.CONNECT,
    "upstream_connect_timeout": FailureKind.CONNECT,
    "upstream_timeout_first_byte": FailureKind.TIMEOUT,
    "upstream_timeout_idle": FailureKind.TIMEOUT,
    "upstream_timeout_total": FailureKind.TIMEOUT,
    "upstream_reset": FailureKind.BROKE_OFF,
    "upstream_reset_midstream": FailureKind.BROKE_OFF,
    "upstream_protocol": FailureKind.BROKE_OFF,
}


class Attempts:
    """Makes attempts.

    Attributes:
        matchers: what looks up prompts, by name of the fleets whose policy wants that.
        draining: answers ask clients to close their connection.
        name_worker: answers say who gave them.
    """

    __slots__ = ("_health", "_loop", "_metrics", "_pool", "_sweeper", "draining", "matchers", "name_worker")

    def __init__(
        self,
        *,
        health: "HealthMonitor",
        pool: "UpstreamPool",
        sweeper: "Sweeper",
        metrics: "Metrics",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._health = health
        self._pool = pool
        self._sweeper = sweeper
        self._metrics = metrics
        self._loop = loop
        self.matchers: Mapping[str, Matcher] = {}
        self.draining = False
        self.name_worker = True

    def stale(self) -> None:
        """Count that a connection from the pool had died."""
        self._metrics.retry(STALE)

    async def make(
        self,
        journey: "Journey",
        request: "RouteRequest",
        fleet: "Fleet",
        worker: "Worker",
        *,
        fresh: bool = False,
        entrant: "Entrant | None" = None,
    ) -> GatewayError | None:
        """Ask one worker; with `fresh` not over a connection from the pool, which might be the next that has died there.

        With `entrant` it is one of several attempts that run side by side, of which one answers (`gateway.http.hedging`).

        Returns:
            None when an answer was relayed; else what went wrong, if another worker may try, or (`Retry.IF_REUSED`) the same one again.

        Raises:
            GatewayError: the request has failed for good.
        """
        hedge = entrant is not None and entrant.hedge
        if not hedge:
            journey.worker = worker
        attempt = Attempt(worker, monotonic(), hedge=hedge)
        number = len(journey.attempts)
        journey.attempts.append(attempt)
        reused = False
        exchange: Exchange | None = None
        error_type: str | None = None
        try:
            # What a body tells of caches was wished of the first worker.
            body = body_for(journey, worker, self.matchers, hints=not hedge)
            watch = journey.watch
            connection = None if fresh else self._pool.take(worker)
            if connection is None:
                connection = await self._pool.connect(worker, fleet.timeouts.connect)
                attempt.connect = monotonic() - attempt.at
            else:
                reused = True
            exchange = self._exchange(journey, request, fleet, worker, attempt, watch, entrant)
            exchange.prepare(connection, head_for(journey, worker, len(body), number), body)
            self._sweeper.exchanges.add(exchange)
            if not hedge:
                journey.request.connection.exchange = exchange
            exchange.start()
            await exchange.done
            if entrant is not None and entrant.lost:
                return overtaken()
            return self._ended(journey, fleet, worker, attempt, exchange)
        except GatewayError as error:
            error_type = error.error_type
            if entrant is not None and entrant.lost:
                return error
            if reused and error.retry is Retry.IF_REUSED:
                error_type = STALE
                return error
            if (kind := _KINDS.get(error_type)) is not None:
                self._health.failed(worker, kind)
            if error.retry is Retry.YES:
                return error
            raise
        except asyncio.CancelledError:
            error_type = "client_disconnect"
            raise
        finally:
            attempt.seconds = monotonic() - attempt.at
            if entrant is not None and entrant.lost:
                error_type = HEDGE_LOST
            attempt.error = error_type = error_type or attempt.error
            if exchange is not None:
                self._left(journey, attempt, exchange, lost=error_type == HEDGE_LOST)
            self._metrics.attempt_ended(worker.id, error_type, attempt.first_byte or None)

    def _ended(
        self, journey: "Journey", fleet: "Fleet", worker: "Worker", attempt: Attempt, exchange: Exchange
    ) -> GatewayError | None:
        """The worker has answered: judge it by that. An error where its answer was not relayed."""
        status = exchange.status
        relayed = exchange.started
        if relayed or journey.hinted is None or not journey.hinted.refused:
            self._judge(worker, status)
        if exchange.retry_after is not None and fleet.retries.retry_after_max:
            self._health.rests(worker, exchange.retry_after, status, fleet.retries.retry_after_max)
        if not relayed or status >= 500:
            attempt.error = str(status)
        if relayed:
            if exchange.watch is not None and status == HTTPStatus.OK and not exchange.encoded:
                self._account(journey, worker, exchange.watch, exchange)
            return None
        return upstream_error("upstream_status", f"The worker answered {status}.", status=status, retry=Retry.YES)

    def _left(self, journey: "Journey", attempt: Attempt, exchange: Exchange, *, lost: bool) -> None:
        """Note what became of an exchange, whatever that was; of one that has `lost` its race, that it is over."""
        self._sweeper.exchanges.discard(exchange)
        if journey.request.connection.exchange is exchange:
            journey.request.connection.exchange = None
        # After a clean end this does nothing; after a cancellation the worker stops at once.
        exchange.client_gone()
        attempt.status = exchange.status
        if lost:
            return
        journey.request.keep_alive = exchange.keep_alive
        journey.bytes_out = exchange.bytes_out
        if exchange.first_byte:
            attempt.first_byte = exchange.first_byte - attempt.at
        if exchange.started:
            journey.status = exchange.status
            journey.pace = exchange.pace
            journey.first_byte_at = exchange.first_byte

    def _pass_on(
        self,
        journey: "Journey",
        request: "RouteRequest",
        fleet: "Fleet",
        worker: "Worker",
        attempt: Attempt,
        exchange: Exchange,
    ) -> bool:
        """Whether an answer of `worker` that another may do better is given up for that other's.

        Only where somebody else is there to be asked, and within the fleet's budget: a share of the requests of the last seconds, and never
        less than a few. Failures to connect are not held to it: no worker has had any work with them. A body that may have offended by its
        hints goes to the same worker without them.
        """
        if journey.hinted is not None and not attempt.hedge and hints.passes_on(journey.hinted, exchange.status):
            return True
        retries = fleet.retries
        if request.attempt + 1 >= retries.attempts:
            return False
        if exchange.status not in retries.statuses and not retries.retry_after_max:
            return False
        if not any(other.routable and other is not worker and other.id not in request.tried for other in fleet.workers):
            return False
        if not fleet.retry_budget.spend(monotonic()):
            attempt.unspent = True
            return False
        return True

    def _exchange(
        self,
        journey: "Journey",
        request: "RouteRequest",
        fleet: "Fleet",
        worker: "Worker",
        attempt: Attempt,
        watch: "UsageWatch | None",
        entrant: "Entrant | None",
    ) -> Exchange:
        message = journey.request.message
        lease = journey.lease if entrant is None else entrant.lease
        assert lease is not None
        own = b"x-request-id: %b\r\nvia: 1.1 warmroute\r\n" % journey.request_id
        if self.name_worker:
            own += _worker_line(worker.id)
        if journey.tenant is not None:
            own += journey.tenant.lines(monotonic())
        exchange = (Exchange if entrant is None else Contender)(
            journey.request.connection,
            self._pool,
            lease,
            loop=self._loop,
            dialect=journey.route.dialect,
            own_lines=own,
            http10=message.version != (1, 1),
            keep_alive=not (message.should_close or message.upgrade or self.draining),
            retry_statuses=fleet.retries.statuses
            if journey.hinted is None or not journey.hinted.inside
            else (*fleet.retries.statuses, *hints.REFUSALS),
            watch=watch,
            pass_on=partial(self._pass_on, journey, request, fleet, worker, attempt),
        )
        if entrant is not None:
            entrant.watch = watch
            cast("Contender", exchange).enters(entrant)
        set_deadlines(exchange, fleet.timeouts, self._loop.time(), stream=journey.stream)
        return exchange

    def _account(self, journey: "Journey", worker: "Worker", watch: "UsageWatch", exchange: Exchange) -> None:
        """Count what the answer says it cost, and hold it against what was predicted."""
        usage = journey.usage = watch.usage(journey.route.dialect, stream=exchange.stream)
        if usage is None:
            return
        self._metrics.answered(worker.id, usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)
        now = monotonic()
        if exchange.stream and exchange.first_byte and journey.fleet is not None:
            self._metrics.streamed(journey.fleet.name, now - exchange.first_byte, usage.completion_tokens)
        lookup = journey.lookup
        matcher = self.matchers.get(lookup.fleet) if lookup is not None else None
        if lookup is not None and matcher is not None:
            matcher.answered(worker, lookup, journey.match, usage, now)

    def _judge(self, worker: "Worker", status: int) -> None:
        """Tell the health monitor what an answer's status says about its worker."""
        if status < 400:
            self._health.succeeded(worker)
        elif status == 429:
            self._health.failed(worker, FailureKind.RATE_LIMITED)
        elif status < 500 or status == _NOT_IMPLEMENTED:
            self._health.failed(worker, FailureKind.CLIENT_ERROR)
        else:
            self._health.failed(worker, FailureKind.SERVER_ERROR)


@lru_cache(maxsize=4096)
def _worker_line(worker_id: str) -> bytes:
    return b"x-warmroute-worker: %b\r\n" % worker_id.encode()
