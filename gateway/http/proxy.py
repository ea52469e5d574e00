"""The walk of a request: bytes to decision to relay to outcome.

`Proxy.handle` is what aiohttp's server calls for each request. Whatever happens, its ``finally`` counts the request out exactly
once, with exactly one of three outcomes: completed, client gone, failed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING, cast

import structlog

from gateway.errors import GatewayError, Retry, Source
from gateway.fleet.states import FailureKind
from gateway.http.errors import client_error, error_answer, unexpected
from gateway.http.headers import RequestIds
from gateway.http.journey import Journey
from gateway.http.local import LocalAnswers, model_not_found
from gateway.http.outgoing import body_for, head_for
from gateway.http.relay import Exchange, set_deadlines
from gateway.http.report import report
from gateway.http.routes import ROUTES, origin_form
from gateway.http.server import CLOSE, KEEP, Answered, Request
from gateway.http.sweep import gateway_stopping
from gateway.http.upstream import upstream_error
from gateway.http.watch import UsageWatch
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.reasons import reason_of
from policies.base import Candidate, Match, RouteRequest

if TYPE_CHECKING:
    from gateway.config.schema import Config
    from gateway.fleet.fleet import Fleet, Fleets
    from gateway.fleet.health import HealthMonitor
    from gateway.fleet.models import ModelCards
    from gateway.fleet.worker import Worker
    from gateway.http.pool import UpstreamPool
    from gateway.http.sweep import Sweeper
    from gateway.prefix.lookup import Lookup, Matcher
    from gateway.telemetry.logs import RequestLog
    from gateway.telemetry.metrics import Metrics
    from gateway.telemetry.spans import Tracing

_log = structlog.get_logger(__name__)

_NOT_IMPLEMENTED = 501
_STALE = "stale_connection"
_NO_MATCHES: Mapping[str, Match] = {}
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


class Proxy:
    """The handler of the data listener.

    Attributes:
        fleets: the routing table; replaced as a whole by `reconfigure`.
        matchers: what looks up prompts, by name of the fleets whose policy wants that.
        draining: the gateway is being stopped: answers ask clients to close their connection.
        stopping: the grace period is over.
    """

    def __init__(
        self,
        config: "Config",
        fleets: "Fleets",
        *,
        health: "HealthMonitor",
        cards: "ModelCards",
        pool: "UpstreamPool",
        sweeper: "Sweeper",
        metrics: "Metrics",
        tracing: "Tracing | None",
        request_log: "RequestLog",
        ids: RequestIds,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._health = health
        self._pool = pool
        self._sweeper = sweeper
        self._metrics = metrics
        self._ids = ids
        self._loop = loop
        self._retrying = 0
        self.matchers: Mapping[str, Matcher] = {}
        self.draining = False
        self.stopping = False
        self._local = LocalAnswers(
            cards, ids=ids, limits=config.limits, any_routable=self._any_routable, refused=self.refused
        )
        self.reconfigure(config, fleets, tracing, request_log)

    def reconfigure(
        self, config: "Config", fleets: "Fleets", tracing: "Tracing | None", request_log: "RequestLog"
    ) -> None:
        """Use another configuration for requests from now on; those under way keep theirs."""
        self.fleets = fleets
        self._tracing = tracing
        self._request_log = request_log
        self._limits = self._local.limits = config.limits
        self._name_worker = config.headers.worker
        self._log_successes = config.telemetry.logs.requests > 0

    def refused(self, error: GatewayError) -> None:
        """Count an answer to something that never became a request to a model."""
        self._metrics.refused(error.error_type)

    async def handle(self, request: Request) -> Answered:
        """Answer one request."""
        message = request.message
        target = origin_form(message.path)
        route = ROUTES.get(target) or ROUTES.get(target.partition("?")[0])
        if route is None:
            return await self._local.answer(request, target.partition("?")[0])
        self._metrics.request_started()
        journey = Journey(request, route, target, self._loop.time())
        try:
            if self._tracing is not None:
                journey.span = self._tracing.server_span(message.method, route.path, message.headers)
            await journey.read(self._ids, self._limits)
            journey.fleet = fleet = self._resolve(journey.model)
            return await self._relay(journey, fleet)
        except GatewayError as error:
            return self._failed(journey, error)
        except asyncio.CancelledError:
            journey.outcome = Outcome.FAILED if self.stopping else Outcome.CLIENT_GONE
            journey.error_type = "gateway_stopping" if self.stopping else "client_disconnect"
            if self.stopping and not journey.status and request.connection.transport is not None:
                self._failed(journey, gateway_stopping())
            raise
        except Exception:  # noqa: BLE001 - the last resort: this request fails, all others go on
            _log.exception("request handler failed", path=route.path)
            return self._failed(journey, unexpected())
        finally:
            self._ended(journey)

    def _any_routable(self) -> bool:
        return any(worker.routable for worker in self.fleets.workers())

    def _resolve(self, model: str | None) -> "Fleet":
        fleet = self.fleets.resolve(model)
        if fleet is not None:
            return fleet
        if model is None:
            raise client_error(
                400, "invalid_request", "`model` is missing; GET /v1/models lists what there is.", param="model"
            )
        raise model_not_found()

    async def _relay(self, journey: Journey, fleet: "Fleet") -> Answered:
        """Decide, send, relay; again with another worker as long as that is safe and allowed.

        A connection from the pool that died as we sent says nothing about its worker, which is asked once more on a fresh one; that
        counts neither as one of `retries.attempts` nor against the budget.
        """
        request = RouteRequest(
            model=fleet.name,
            path=journey.route.path,
            headers=journey.request.message.headers,
            body=journey.parsed,
            now=journey.start,
        )
        matcher = self.matchers.get(fleet.name) if self.matchers and journey.parsed else None
        lookup = await _look_up(journey, matcher) if matcher is not None else None
        candidates: Sequence[Candidate] = fleet.candidates
        if lookup is not None:
            request.prompt_tokens = lookup.prompt.token_count
            candidates = lookup.candidates(candidates)
        error: GatewayError | None = None
        while True:
            decision = fleet.policy.decide(request, candidates)
            if decision is None:
                raise error or _no_healthy_worker()
            if error is not None:
                self._metrics.retry(error.error_type)
            reason = reason_of(decision, lookup.matches if lookup is not None else _NO_MATCHES, request.attempt)
            self._metrics.decided(fleet.name, decision.policy, reason, perf_counter() - journey.ready)
            worker = cast("Worker", decision.chosen.worker)
            # Nothing is awaited between the decision and this line: the next decision sees this request.
            match = journey.match = decision.chosen.match
            lease = journey.lease = worker.acquire(request.prompt_tokens, max(0, request.prompt_tokens - match.tokens))
            # A reload since the lookup may have left this fleet without a matcher.
            if lookup is not None and (matcher := self.matchers.get(fleet.name)) is not None:
                matcher.sent(worker.id, lookup, journey.start)
            try:
                error = await self._attempt(journey, request, fleet, worker)
                if error is not None and error.retry is Retry.IF_REUSED:
                    self._metrics.retry(_STALE)
                    error = await self._attempt(journey, request, fleet, worker, fresh=True)
            finally:
                lease.release()
            if error is None:
                return self._completed(journey)
            journey.ready = perf_counter()
            request.attempt += 1
            request.tried = (*request.tried, worker.id)
            if request.attempt >= fleet.retries.attempts:
                raise error
            candidates = [candidate for candidate in candidates if candidate.worker.id not in request.tried]

    def _pass_on(self, journey: Journey, request: RouteRequest, fleet: "Fleet", worker: "Worker") -> bool:
        """Whether an answer of `worker` that another may do better is given up for that other's.

        Only where somebody else is there to be asked, and within the budget: a share of the requests in flight, and never less than a
        few. Failures to connect are not held to it: no worker has had any work with them.
        """
        retries = fleet.retries
        if request.attempt + 1 >= retries.attempts:
            return False
        if not any(other.routable and other is not worker and other.id not in request.tried for other in fleet.workers):
            return False
        if not journey.retrying:
            if self._retrying >= max(retries.budget_min, retries.budget * self._metrics.in_flight):
                return False
            journey.retrying = True
            self._retrying += 1
        return True

    async def _attempt(
        self, journey: Journey, request: RouteRequest, fleet: "Fleet", worker: "Worker", *, fresh: bool = False
    ) -> GatewayError | None:
        """Ask one worker; with `fresh` not over a connection from the pool, which might be the next that has died there.

        Returns:
            None when an answer was relayed; else what went wrong, if another worker may try, or (`Retry.IF_REUSED`) the same one again.

        Raises:
            GatewayError: the request has failed for good.
        """
        journey.worker = worker
        journey.attempts += 1
        span = journey.span.attempt(worker, fleet.name, journey.attempts - 1) if journey.span is not None else None
        start = self._loop.time()
        reused = False
        exchange: Exchange | None = None
        error_type: str | None = None
        try:
            body = body_for(journey, worker, self.matchers)
            connection = None if fresh else self._pool.take(worker)
            if connection is None:
                connection = await self._pool.connect(worker, fleet.timeouts.connect)
            else:
                reused = True
            exchange = self._exchange(journey, request, fleet, worker)
            exchange.prepare(connection, head_for(journey, worker, span, len(body)), body)
            self._sweeper.exchanges.add(exchange)
            journey.request.connection.exchange = exchange
            exchange.start()
            await exchange.done
            status = exchange.status
            relayed = exchange.started
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
                error_type = _STALE
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
            status = 0
            if exchange is not None:
                self._sweeper.exchanges.discard(exchange)
                journey.request.connection.exchange = None
                # After a clean end this does nothing; after a cancellation the worker stops at once.
                exchange.client_gone()
                journey.request.keep_alive = exchange.keep_alive
                status = exchange.status
                journey.bytes_out = exchange.bytes_out
                if exchange.started:
                    journey.status = status
                    journey.first_byte = exchange.first_byte - journey.start if exchange.first_byte else None
            first_byte = exchange.first_byte - start if exchange is not None and exchange.first_byte else None
            self._metrics.attempt_ended(worker.id, error_type, first_byte)
            if span is not None:
                span.end(status or None, error_type, first_byte)

    def _exchange(self, journey: Journey, request: RouteRequest, fleet: "Fleet", worker: "Worker") -> Exchange:
        message = journey.request.message
        assert journey.lease is not None
        own = b"x-request-id: %b\r\nvia: 1.1 warmroute\r\n" % journey.request_id
        if self._name_worker:
            own += _worker_line(worker.id)
        exchange = Exchange(
            journey.request.connection,
            self._pool,
            journey.lease,
            loop=self._loop,
            dialect=journey.route.dialect,
            own_lines=own,
            http10=message.version != (1, 1),
            keep_alive=not (message.should_close or message.upgrade or self.draining),
            retry_statuses=fleet.retries.statuses,
            watch=journey.watch,
            pass_on=partial(self._pass_on, journey, request, fleet, worker),
        )
        set_deadlines(exchange, fleet.timeouts, self._loop.time(), stream=journey.parsed.get("stream") is True)
        return exchange

    def _account(self, journey: Journey, worker: "Worker", watch: UsageWatch, exchange: Exchange) -> None:
        """Count what the answer says it cost, and hold it against what was predicted."""
        usage = journey.usage = watch.usage(journey.route.dialect, stream=exchange.stream)
        if usage is None:
            return
        self._metrics.answered(worker.id, usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)
        if (lookup := journey.lookup) is None:
            return
        now = self._loop.time()
        if exchange.stream and exchange.first_byte:
            self._metrics.streamed(lookup.fleet, now - exchange.first_byte, usage.completion_tokens)
        matcher = self.matchers.get(lookup.fleet)
        if matcher is not None:
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

    # Ends.

    def _completed(self, journey: Journey) -> Answered:
        if journey.status < 500:
            journey.outcome = Outcome.COMPLETED
        if journey.status >= 400:
            journey.error_type = str(journey.status)
        return KEEP if journey.request.keep_alive and not self.draining else CLOSE

    def _failed(self, journey: Journey, error: GatewayError) -> Answered:
        """Answer with `error`, unless a part of the worker's answer has gone out: then the relay has said what there is to say."""
        request = journey.request
        journey.error_type = error.error_type
        journey.outcome = Outcome.COMPLETED if error.source is Source.CLIENT else Outcome.FAILED
        if journey.status:
            if error.source is Source.CLIENT:
                journey.outcome = Outcome.CLIENT_GONE
                if request.connection.transport is not None:
                    # It does not read: a close would wait for it to take what is still unsent.
                    request.connection.transport.abort()
            return CLOSE
        journey.status = error.status
        if not journey.attempts:
            self._metrics.refused(error.error_type)
        keep_alive = (
            not (error.close or self.draining or request.message.should_close or request.message.upgrade)
            and request.payload.is_eof()
            and request.message.version == (1, 1)
        )
        if request.connection.transport is not None:
            answer = error_answer(
                error,
                dialect=journey.route.dialect,
                request_id=journey.request_id,
                close=not keep_alive,
                head_only=request.message.method == "HEAD",
            )
            request.connection.transport.write(answer)
            journey.bytes_out = len(answer)
        return KEEP if keep_alive else CLOSE

    def _ended(self, journey: Journey) -> None:
        """Count the request out: always called, exactly once."""
        if journey.retrying:
            self._retrying -= 1
        report(
            journey, self._loop.time() - journey.start, self._metrics, self._request_log, successes=self._log_successes
        )


@lru_cache(maxsize=4096)
def _worker_line(worker_id: str) -> bytes:
    return b"x-warmroute-worker: %b\r\n" % worker_id.encode()


async def _look_up(journey: Journey, matcher: "Matcher") -> "Lookup":
    """What the workers hold of the prompt."""
    path, body, size = journey.route.path, journey.parsed, len(journey.body)
    lookup = journey.lookup = matcher.now(path, body, size) or await matcher.lookup(path, body, size)
    return lookup


def _no_healthy_worker() -> GatewayError:
    return GatewayError(
        503,
        "no_healthy_worker",
        "No worker is ready to take this request.",
        source=Source.GATEWAY,
        code="no_healthy_worker",
        retry_after=1,
    )
