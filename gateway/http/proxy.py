"""The walk of a request: bytes to decision to relay to outcome.

`Proxy.handle` is what aiohttp's server calls for each request. Whatever happens, its ``finally`` counts the request out exactly
once, with exactly one of three outcomes: completed, client gone, failed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, cast

import structlog

from gateway.errors import GatewayError, Retry, Source
from gateway.http import hints
from gateway.http.admission import arrive, leave, priority_of
from gateway.http.attempts import STALE, Attempts
from gateway.http.errors import client_error, error_answer, unexpected
from gateway.http.headers import RequestIds
from gateway.http.hedging import Hedging
from gateway.http.journey import Journey
from gateway.http.local import LocalAnswers, model_not_found
from gateway.http.routes import ROUTES, origin_form
from gateway.http.server import CLOSE, KEEP, Answered, Request
from gateway.http.sweep import gateway_stopping
from gateway.http.tenants import admit, charge, settle
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.reasons import Reason, reason_of
from gateway.telemetry.record import Decided, loads_of
from policies.base import Candidate, Decision, Match, RouteRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.admission.controller import Admissions
    from gateway.admission.tenants import Tenants
    from gateway.config.schema import Config
    from gateway.fleet.fleet import Fleet, Fleets
    from gateway.fleet.health import HealthMonitor
    from gateway.fleet.models import ModelCards
    from gateway.fleet.worker import Worker
    from gateway.http.pool import UpstreamPool
    from gateway.http.report import Reports
    from gateway.http.sweep import Sweeper
    from gateway.overload.guard import Guard
    from gateway.prefix.lookup import Lookup, Matcher
    from gateway.residency.live import FleetResidency
    from gateway.telemetry.spans import Tracing

_log = structlog.get_logger(__name__)

HINTS_REFUSED = "hints_refused"
"""What is said of a body that a worker did not take because of the hints in it."""

_NO_MATCHES: Mapping[str, Match] = {}


class Proxy:
    """The handler of the data listener.

    Attributes:
        fleets: the routing table; replaced as a whole by `reconfigure`.
        tenants: who may use it; None: everybody.
        admissions: where requests wait for their turn; None: nowhere.
        guard: says what is refused because the process is at its limit; None: nothing is.
        hedging: makes second attempts beside the first, where that is configured.
        residencies: by fleet, what is wished of the workers' caches; fleets without cost nothing.
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
        tracing: "Tracing | None",
        reports: "Reports",
        ids: RequestIds,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._metrics = reports.metrics
        self._ids = ids
        self._health = health
        self._attempts = Attempts(health=health, pool=pool, sweeper=sweeper, metrics=self._metrics, loop=loop)
        self.hedging = Hedging(self._attempts, health)
        self.stopping = False
        self.tenants: Tenants | None = None
        self.admissions: Admissions | None = None
        self.guard: Guard | None = None
        self.residencies: Mapping[str, FleetResidency] = {}
        self._local = LocalAnswers(
            cards, ids=ids, limits=config.limits, any_routable=self._any_routable, refused=self.refused
        )
        self.reconfigure(config, fleets, tracing, reports)

    def reconfigure(self, config: "Config", fleets: "Fleets", tracing: "Tracing | None", reports: "Reports") -> None:
        """Use another configuration for requests from now on; those under way keep theirs."""
        self.fleets = fleets
        self._tracing = tracing
        self._reports = reports
        self._limits = self._local.limits = config.limits
        self._attempts.name_worker = config.headers.worker

    @property
    def matchers(self) -> "Mapping[str, Matcher]":
        """What looks up prompts, by name of the fleets whose policy wants that."""
        return self._attempts.matchers

    @matchers.setter
    def matchers(self, matchers: "Mapping[str, Matcher]") -> None:
        self._attempts.matchers = matchers

    @property
    def session_ended(self) -> "Callable[[str], int]":
        """Told of conversations that their clients have ended (`LocalAnswers.session_ended`)."""
        return self._local.session_ended

    @session_ended.setter
    def session_ended(self, ended: "Callable[[str], int]") -> None:
        self._local.session_ended = ended

    @property
    def draining(self) -> bool:
        """The gateway is being stopped: answers ask clients to close their connection."""
        return self._attempts.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._attempts.draining = draining

    def refused(self, error: GatewayError) -> None:
        """Count an answer to something that never became a request to a model."""
        self._metrics.refused(error.error_type)

    async def handle(self, request: Request) -> Answered:
        """Answer one request."""
        message = request.message
        target = origin_form(message.path)
        route = ROUTES.get(target) or ROUTES.get(target.partition("?")[0])
        if route is None:
            return await self._local.answer(request, target.partition("?")[0], self.tenants)
        reports = self._reports
        journey = Journey(request, route, target, monotonic())
        reports.begun(journey)
        guard = self.guard
        try:
            if guard is not None and guard.step:
                guard.check(None)
            if self._tracing is not None:
                journey.tracing = self._tracing
                journey.trace = trace = self._tracing.begin(message.headers)
                journey.wants_usage |= trace.sampled
            await journey.read(self._ids, self._limits, self.tenants)
            journey.fleet = fleet = self._resolve(journey.model)
            if journey.tenant is not None:
                admit(journey, journey.tenant, fleet)
            if self.admissions is not None:
                arrive(journey, fleet, self.admissions)
            if guard is not None and guard.step:
                guard.check(priority_of(journey))
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
            journey.end = monotonic()
            if journey.ticket is not None:
                leave(journey)
            if journey.hinted is not None:
                hints.ended(journey, journey.hinted)
            if journey.tenant is not None:
                settle(journey, journey.tenant)
            reports.ended(journey)

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
        request = journey.route_request = RouteRequest(
            model=fleet.name,
            path=journey.route.path,
            headers=journey.request.message.headers,
            body=journey.parsed,
        )
        matcher = self.matchers.get(fleet.name) if self.matchers and journey.parsed else None
        lookup = await _look_up(journey, matcher) if matcher is not None else None
        candidates: Sequence[Candidate] = fleet.candidates
        if lookup is not None:
            request.prompt_tokens = lookup.prompt.token_count
            candidates = lookup.candidates(candidates)
        if journey.tenant is not None:
            charge(journey, journey.tenant, fleet, request.prompt_tokens)
        roomy = candidates
        if journey.gate is not None and (ticket := journey.ticket) is not None:
            ticket.tokens = request.prompt_tokens or ticket.tokens
            selected = self._select(journey, fleet, request, candidates)
            if selected is not None:
                roomy = selected
            else:
                candidates, roomy = await self._turn(journey, fleet, request)
                lookup = journey.lookup
        error: GatewayError | None = None
        lane = None
        if fleet.hedging is not None or (journey.stage is not None and journey.stage.hedging is not None):
            lane = self.hedging.lane(journey, fleet)
        while True:
            decision = self._decide(journey, fleet, request, roomy)
            if decision is None and roomy is not candidates:
                # Its filters look at load as well, and drop all that have room.
                decision = self._decide(journey, fleet, request, candidates)
            if decision is None:
                raise error or self._nobody(fleet)
            if error is None:
                fleet.retry_budget.asked(request.now)
            if journey.gate is not None and journey.ticket is not None and error is None:
                journey.gate.started(journey.ticket, request, decision.chosen, request.now)
            if error is not None:
                self._metrics.retry(error.error_type)
            worker = cast("Worker", decision.chosen.worker)
            # Nothing is awaited between the decision and this line: the next decision sees this request.
            match = journey.match = decision.chosen.match
            lease = journey.lease = worker.acquire(
                request.prompt_tokens, match=match, now=request.now, streamed=journey.stream
            )
            # A reload since the lookup may have left this fleet without a matcher.
            if lookup is not None and (matcher := self.matchers.get(fleet.name)) is not None:
                lease.expectation = matcher.sent(worker.id, lookup, request.now)
            if self.residencies and (live := self.residencies.get(fleet.name)) is not None:
                hints.sent(journey, live, worker, match, request.now)
            try:
                if lane is None:
                    error = await self._attempts.make(journey, request, fleet, worker)
                else:
                    decide = partial(self._decide, journey, fleet, request, hedge=True)
                    error = await self.hedging.run(lane, journey, request, fleet, lease, decide, candidates)
                if error is not None and error.retry is Retry.IF_REUSED:
                    self._metrics.retry(STALE)
                    error = await self._attempts.make(journey, request, fleet, worker, fresh=True)
                if error is not None and journey.hinted is not None and journey.hinted.refused:
                    self._metrics.retry(HINTS_REFUSED)
                    hints.strip(journey.hinted)
                    error = await self._attempts.make(journey, request, fleet, worker)
            finally:
                lease.release(monotonic())
                if journey.hinted is not None:
                    hints.attempted(journey, journey.hinted)
            if error is None:
                return self._completed(journey)
            journey.ready = monotonic()
            request.attempt += 1
            request.tried = tuple(dict.fromkeys((*request.tried, worker.id)))
            if request.attempt >= fleet.retries.attempts:
                raise error
            roomy = candidates = [each for each in candidates if each.worker.id not in request.tried]

    @staticmethod
    def _select(
        journey: Journey, fleet: "Fleet", request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate] | None:
        """The candidates to decide among, or None: it waits now.

        If those with room are not what it asks for (a LoRA adapter, a longer context), it waits for those that are, and for no others.
        """
        gate, ticket = journey.gate, journey.ticket
        assert gate is not None
        assert ticket is not None
        roomy = gate.select(ticket, request, candidates, monotonic())
        if roomy is None or roomy is candidates or ticket.only:
            return roomy
        policy = fleet.policy_for(request.headers, journey.stage.name if journey.stage is not None else None)
        let_through = getattr(policy, "let_through", None)
        if let_through is None:
            return roomy
        fitting = frozenset(each.worker.id for each in let_through(request, candidates))
        if not fitting or any(each.worker.id in fitting for each in roomy):
            return roomy
        gate.narrow(ticket, fitting)
        return gate.select(ticket, request, candidates, monotonic())

    async def _turn(
        self, journey: Journey, fleet: "Fleet", request: RouteRequest
    ) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
        """Wait until it is the request's turn: all candidates, looked up anew, and those to decide among."""
        gate, ticket, admissions = journey.gate, journey.ticket, self.admissions
        assert gate is not None
        assert ticket is not None
        while True:
            candidates: Sequence[Candidate] = fleet.candidates
            if admissions is None:  # a reload has just taken it away
                gate.close(ticket, monotonic())
                return candidates, candidates
            if (live := self.residencies.get(fleet.name)) is not None and journey.lookup is not None:
                holders = journey.lookup.candidates(candidates)
                policy = fleet.policy_for(request.headers, journey.stage.name if journey.stage is not None else None)
                hints.waits(journey, live, policy, request, holders)
            await admissions.turn(gate, ticket)
            journey.ready = monotonic()
            # The map has moved; the prompt has not.
            if (matcher := self.matchers.get(fleet.name)) is not None and journey.lookup is not None:
                at = journey.looked_up
                lookup = await _look_up(journey, matcher)
                journey.looked_up = at
                request.prompt_tokens = lookup.prompt.token_count
                candidates = lookup.candidates(candidates)
            roomy = self._select(journey, fleet, request, candidates)
            if roomy is not None:
                return candidates, roomy

    def _decide(
        self,
        journey: Journey,
        fleet: "Fleet",
        request: RouteRequest,
        candidates: Sequence[Candidate],
        *,
        hedge: bool = False,
    ) -> Decision | None:
        """Ask the policy of this request, and keep what it takes to say later why it answered so."""
        policy = fleet.policy_for(request.headers, journey.stage.name if journey.stage is not None else None)
        request.now = now = monotonic()
        decision = policy.decide(request, candidates)
        done = monotonic()
        if self._reports.recording or (journey.trace is not None and journey.trace.sampled):
            loads = loads_of(candidates)
            journey.decisions.append(Decided(policy, request, candidates, loads, decision, now, done - now))
        if decision is not None:
            matches = journey.lookup.matches if journey.lookup is not None else _NO_MATCHES
            reason = Reason.HEDGE if hedge else reason_of(decision, matches, request.attempt)
            self._metrics.decided(fleet.name, decision.policy, reason, done - (now if hedge else journey.ready))
        return decision

    def _nobody(self, fleet: "Fleet") -> GatewayError:
        """Why no worker takes the request: they have asked for a rest, or none is well."""
        soonest = self._health.soonest(fleet)
        if soonest is None:
            return _no_healthy_worker()
        seconds, status = soonest
        return GatewayError(
            status,
            "workers_busy",
            "All workers that could take this request have asked not to be sent more for now.",
            source=Source.WORKER,
            code="workers_busy",
            retry_after=max(1, ceil(seconds)),
        )

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
        journey.error_message = error.message
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


async def _look_up(journey: Journey, matcher: "Matcher") -> "Lookup":
    """What the workers hold of the prompt."""
    path, body, size = journey.route.path, journey.parsed, len(journey.body)
    lookup = journey.lookup = matcher.now(path, body, size) or await matcher.lookup(path, body, size)
    journey.looked_up = monotonic()
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
