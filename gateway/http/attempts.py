"""One attempt after the other: a request sent to a worker, its answer relayed, the worker judged by it."""

import asyncio
from collections.abc import Mapping
from functools import lru_cache, partial
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING

from gateway.errors import GatewayError, Retry
from gateway.fleet.states import FailureKind
from gateway.http import hints
from gateway.http.outgoing import body_for, head_for
from gateway.http.relay import Exchange, set_deadlines
from gateway.http.upstream import upstream_error
from gateway.telemetry.record import Attempt

if TYPE_CHECKING:
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.health import HealthMonitor
    from gateway.fleet.worker import Worker
    from gateway.http.journey import Journey
    from gateway.http.pool import UpstreamPool
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
        retrying: requests that count against the retry budget.
    """

    __slots__ = ("_health", "_loop", "_metrics", "_pool", "_sweeper", "draining", "matchers", "name_worker", "retrying")

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
        self.retrying = 0

    async def make(
        self, journey: "Journey", request: "RouteRequest", fleet: "Fleet", worker: "Worker", *, fresh: bool = False
    ) -> GatewayError | None:
        """Ask one worker; with `fresh` not over a connection from the pool, which might be the next that has died there.

        Returns:
            None when an answer was relayed; else what went wrong, if another worker may try, or (`Retry.IF_REUSED`) the same one again.

        Raises:
            GatewayError: the request has failed for good.
        """
        journey.worker = worker
        attempt = Attempt(worker, monotonic())
        journey.attempts.append(attempt)
        reused = False
        exchange: Exchange | None = None
        error_type: str | None = None
        try:
            body = body_for(journey, worker, self.matchers)
            connection = None if fresh else self._pool.take(worker)
            if connection is None:
                connection = await self._pool.connect(worker, fleet.timeouts.connect)
                attempt.connect = monotonic() - attempt.at
            else:
                reused = True
            exchange = self._exchange(journey, request, fleet, worker)
            exchange.prepare(connection, head_for(journey, worker, len(body)), body)
            self._sweeper.exchanges.add(exchange)
            journey.request.connection.exchange = exchange
            exchange.start()
            await exchange.done
            status = exchange.status
            relayed = exchange.started
            if relayed or journey.hinted is None or not journey.hinted.refused:
                self._judge(worker, status)
            if not relayed or status >= 500:
                error_type = str(status)
            if relayed:
                if journey.watch is not None and status == HTTPStatus.OK and not exchange.encoded:
                    self._account(journey, worker, journey.watch, exchange)
                return None
            return upstream_error("upstream_status", f"The worker answered {status}.", status=status, retry=Retry.YES)
        except GatewayError as error:
            error_type = error.error_type
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
            attempt.error = error_type
            if exchange is not None:
                self._left(journey, attempt, exchange)
            self._metrics.attempt_ended(worker.id, error_type, attempt.first_byte or None)

    def _left(self, journey: "Journey", attempt: Attempt, exchange: Exchange) -> None:
        """Note what became of an exchange, whatever that was."""
        self._sweeper.exchanges.discard(exchange)
        journey.request.connection.exchange = None
        # After a clean end this does nothing; after a cancellation the worker stops at once.
        exchange.client_gone()
        journey.request.keep_alive = exchange.keep_alive
        journey.bytes_out = exchange.bytes_out
        attempt.status = exchange.status
        if exchange.first_byte:
            attempt.first_byte = exchange.first_byte - attempt.at
        if exchange.started:
            journey.status = exchange.status
            journey.pace = exchange.pace
            journey.first_byte_at = exchange.first_byte

    def _pass_on(self, journey: "Journey", request: "RouteRequest", fleet: "Fleet", worker: "Worker") -> bool:
        """Whether an answer of `worker` that another may do better is given up for that other's.

        Only where somebody else is there to be asked, and within the budget: a share of the requests in flight, and never less than a
        few. Failures to connect are not held to it: no worker has had any work with them. A body that may have offended by its hints goes
        to the same worker without them.
        """
        exchange = journey.request.connection.exchange
        if journey.hinted is not None and exchange is not None and hints.passes_on(journey.hinted, exchange.status):
            return True
        retries = fleet.retries
        if request.attempt + 1 >= retries.attempts:
            return False
        if not any(other.routable and other is not worker and other.id not in request.tried for other in fleet.workers):
            return False
        if not journey.retrying:
            if self.retrying >= max(retries.budget_min, retries.budget * self._metrics.in_flight):
                return False
            journey.retrying = True
            self.retrying += 1
        return True

    def _exchange(self, journey: "Journey", request: "RouteRequest", fleet: "Fleet", worker: "Worker") -> Exchange:
        message = journey.request.message
        assert journey.lease is not None
        own = b"x-request-id: %b\r\nvia: 1.1 warmroute\r\n" % journey.request_id
        if self.name_worker:
            own += _worker_line(worker.id)
        if journey.tenant is not None:
            own += journey.tenant.lines(monotonic())
        exchange = Exchange(
            journey.request.connection,
            self._pool,
            journey.lease,
            loop=self._loop,
            dialect=journey.route.dialect,
            own_lines=own,
            http10=message.version != (1, 1),
            keep_alive=not (message.should_close or message.upgrade or self.draining),
            retry_statuses=fleet.retries.statuses
            if journey.hinted is None or not journey.hinted.inside
            else (*fleet.retries.statuses, *hints.REFUSALS),
            watch=journey.watch,
            pass_on=partial(self._pass_on, journey, request, fleet, worker),
        )
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
