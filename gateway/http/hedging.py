"""Hedging: a second attempt at another worker for a request whose prefill has probably not begun. Off by default.

A request that waits behind others, or for a worker that hangs, may be answered sooner elsewhere. So after a while without a first byte the
policy is asked again, among the other workers, and both attempts run. The first byte of an answer's *body* decides: its head proves nothing, for
vLLM sends it before the first token. Until then nothing is written to the client; the other attempt's connection is closed, which ends
its work. Each attempt has its own lease, released once; the request has one outcome.

What is given up is a prefill that may have begun, so a request whose prompt is probably being computed is left alone until that takes twice as long as
predicted. Second attempts are at most a share of the requests (`gateway.fleet.budget`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, cast

from gateway.errors import GatewayError, Retry
from gateway.fleet.budget import Budget
from gateway.http.racing import Entrant, Race
from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    from gateway.config.schema import Hedging as Section
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.health import HealthMonitor
    from gateway.fleet.worker import Lease, Worker
    from gateway.http.attempts import Attempts
    from gateway.http.journey import Journey
    from policies.base import Candidate, Decision, RouteRequest

WINDOW: Final = 60.0
"""Seconds of requests that second attempts are a share of."""
FIRST_BYTES: Final = 100
"""First bytes of which the percentile is taken."""
FEWEST: Final = 20
"""With fewer no percentile is known, and nothing is hedged."""
OVERDUE: Final = 2.0
"""A prefill that takes so many times as long as predicted has probably not begun, or will not end."""
_EVERY: Final = 5
"""First bytes after which the percentile is taken anew."""
SOONEST: Final = 0.02
"""Seconds between two looks at the same request, at least."""

_REPEATABLE: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
_EFFECTS: Final = (
    "background",
    "container",
    "conversation",
    "kv_transfer_params",
    "mcp_servers",
    "previous_response_id",
    "store",
)
"""Members that make a request more than a generation, or bind it to the worker that knows what they name."""
_CLIENTS_TOOLS: Final = frozenset({None, "function", "custom"})


def repeatable(path: str, body: Mapping[str, Any]) -> bool:
    """Whether generating the answer twice, and throwing one away, does nothing that generating it once would not.

    Not so: what is stored or runs on in the background (the Responses API stores unless it is told not to), what continues something stored, tools
    that the server itself calls, and KV blocks that are handed over to the worker.
    """
    if path not in _REPEATABLE or any(body.get(name) for name in _EFFECTS):
        return False
    if path == "/v1/responses" and body.get("store") is not False:
        return False
    tools = body.get("tools")
    if not tools:
        return True
    return isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") in _CLIENTS_TOOLS for tool in tools
    )


class Lane:
    """What hedging knows of one stage of one fleet, kept over reloads.

    Attributes:
        section: as configured.
        budget: of second attempts.
        results: how races with more than one attempt ended: ``won`` by a later attempt, ``lost`` to the first, ``failed``, ``ended`` (by the client).
    """

    __slots__ = ("_count", "_first_bytes", "_known", "budget", "results", "section")

    def __init__(self, section: "Section") -> None:
        self.section = section
        self.budget = Budget(section.budget, 0.0, WINDOW)
        self.results: dict[str, int] = {}
        self._count = 0
        self._first_bytes = {True: deque[float](maxlen=FIRST_BYTES), False: deque[float](maxlen=FIRST_BYTES)}
        self._known: dict[bool, float | None] = {True: None, False: None}

    def use(self, section: "Section") -> None:
        """Go by another configuration."""
        if section is not self.section:
            self.section = section
            self.budget.share = section.budget
            self._known = {stream: self._percentile(stream) for stream in (True, False)}

    def seen(self, seconds: float, *, stream: bool) -> None:
        """So long the first byte of a request took. Streams and whole answers have nothing in common."""
        self._first_bytes[stream].append(seconds)
        self._count += 1
        if self._count % _EVERY == 0:
            self._known[stream] = self._percentile(stream)

    def after(self, *, stream: bool) -> float | None:
        """Seconds without a first byte after which a request may be hedged; None: not known yet."""
        after = self.section.after
        return self._known[stream] if isinstance(after, str) else after

    def count(self, result: str) -> None:
        """A race has ended so."""
        self.results[result] = self.results.get(result, 0) + 1

    def _percentile(self, stream: bool) -> float | None:
        after, kept = self.section.after, sorted(self._first_bytes[stream])
        if not isinstance(after, str) or len(kept) < FEWEST:
            return None
        return kept[min(len(kept) - 1, int(len(kept) * int(after[1:]) / 100))]


class Hedging:
    """Makes the attempts of requests that may be hedged."""

    __slots__ = ("_attempts", "_health", "_tasks", "lanes")

    def __init__(self, attempts: "Attempts", health: "HealthMonitor") -> None:
        self._attempts = attempts
        self._health = health
        self._tasks = TaskGroup("hedging")
        self.lanes: dict[tuple[str, str], Lane] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def lane(self, journey: "Journey", fleet: "Fleet") -> Lane | None:
        """Where a request belongs, if it may be hedged at all; None: it may not."""
        stage = journey.stage
        own = stage.hedging if stage is not None else None
        section = own or fleet.hedging
        if section is None or not section.budget or not repeatable(journey.route.path, journey.parsed):
            return None
        key = (fleet.name, stage.name if stage is not None and own is not None else "")
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(section)
        lane.use(section)
        return lane

    async def run(
        self,
        lane: Lane,
        journey: "Journey",
        request: "RouteRequest",
        fleet: "Fleet",
        lease: "Lease",
        decide: "Callable[[Sequence[Candidate]], Decision | None]",
        candidates: "Sequence[Candidate]",
    ) -> GatewayError | None:
        """Like `Attempts.make`, with further attempts at other workers where the first waits too long.

        Args:
            lane: of `Hedging.lane`.
            journey: the request.
            request: what its policy is told.
            fleet: who serves it.
            lease: of the first attempt; released by the caller, unless that attempt ends before the others.
            decide: asks the policy for another worker.
            candidates: those of the first decision.

        Raises:
            GatewayError: the request has failed for good.
        """
        lane.budget.asked(lease.at)
        race = Race(journey, self._health)
        self._enter(race, Entrant(race, lease.worker, lease, journey.match, hedge=False), journey, request, fleet)
        after = lane.after(stream=journey.stream)
        due = inf if after is None else lease.at + after
        hedged = 0
        ended: tuple[GatewayError | None, bool] = (None, False)
        try:
            while race.tasks:
                waits = None if due == inf or race.winner is not None else max(0.0, due - monotonic())
                done, _ = await asyncio.wait(race.tasks, timeout=waits, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    entrant = race.tasks.pop(task)
                    race.running.discard(entrant)
                    if not entrant.lost:
                        ended = task.result()
                    if entrant is race.winner:
                        return self._over(lane, race, journey, ended)
                if done or race.winner is not None:
                    continue
                due = self._due(lease, monotonic())
                if due == 0.0:
                    hedged += 1
                    due = inf if hedged >= lane.section.max else monotonic() + (after or 0.0)
                    if not self._hedge(lane, race, journey, request, fleet, decide, candidates):
                        due = inf
        finally:
            await self._end(race)
            if len(race.entrants) > 1:
                undecided = "failed" if ended[0] is not None else "ended"
                lane.count(undecided if race.winner is None else "won" if race.winner.hedge else "lost")
        return self._over(lane, race, journey, ended)

    def _over(
        self, lane: Lane, race: Race, journey: "Journey", ended: tuple[GatewayError | None, bool]
    ) -> GatewayError | None:
        error, final = ended
        if race.winner is not None and error is None and journey.first_byte_at:
            lane.seen(journey.first_byte_at - race.entrants[0].lease.at, stream=journey.stream)
        if error is not None and final:
            raise error
        return error

    @staticmethod
    def _due(lease: "Lease", now: float) -> float:
        """When the request is to be hedged: 0 now, else seconds on the clock to look again, infinite: never."""
        begins = lease.worker.begins(lease, now)
        if begins is None:
            return inf  # its prefill is over
        if begins > now:
            return 0.0
        if lease.silent:
            return inf  # it is being computed, and nothing will tell how far it is
        overdue = begins + OVERDUE * lease.seconds
        return 0.0 if now >= overdue else max(overdue, now + SOONEST)

    def _hedge(
        self,
        lane: Lane,
        race: Race,
        journey: "Journey",
        request: "RouteRequest",
        fleet: "Fleet",
        decide: "Callable[[Sequence[Candidate]], Decision | None]",
        candidates: "Sequence[Candidate]",
    ) -> bool:
        """Send the request to another worker as well, if there is one with room and the budget allows it."""
        now = monotonic()
        asked = {entrant.worker.id for entrant in race.entrants}
        request.tried = tuple(dict.fromkeys((*request.tried, *asked)))
        others = [each for each in candidates if each.worker.id not in request.tried and _has_room(journey, each, now)]
        if not others or not lane.budget.spend(now):
            return False
        decision = decide(others)
        if decision is None:
            return False
        worker = cast("Worker", decision.chosen.worker)
        match = decision.chosen.match
        # Nothing was awaited since the decision: the next one sees this attempt.
        lease = worker.acquire(request.prompt_tokens, match=match, now=now, streamed=journey.stream)
        self._enter(race, Entrant(race, worker, lease, match, hedge=True), journey, request, fleet)
        return True

    def _enter(self, race: Race, entrant: Entrant, journey: "Journey", request: "RouteRequest", fleet: "Fleet") -> None:
        race.entrants.append(entrant)
        race.running.add(entrant)
        task = self._tasks.spawn("attempt", self._attempt(entrant, journey, request, fleet))
        race.tasks[task] = entrant

    async def _attempt(
        self, entrant: Entrant, journey: "Journey", request: "RouteRequest", fleet: "Fleet"
    ) -> tuple[GatewayError | None, bool]:
        """One attempt: what went wrong, if anything, and whether that is final."""
        make = self._attempts.make
        try:
            error = await make(journey, request, fleet, entrant.worker, entrant=entrant)
            if error is not None and error.retry is Retry.IF_REUSED and not entrant.lost:
                self._attempts.stale()
                error = await make(journey, request, fleet, entrant.worker, fresh=True, entrant=entrant)
        except GatewayError as final:
            return final, True
        else:
            return error, False
        finally:
            entrant.race.running.discard(entrant)
            again = journey.hinted is not None and journey.hinted.refused  # the same worker will be asked without hints
            if entrant.hedge or entrant.lost or (entrant.race.running and not again):
                entrant.lease.release(monotonic())

    async def _end(self, race: Race) -> None:
        """End what still runs, whatever the reason, and wait for its end."""
        for task in race.tasks:
            task.cancel()
        # Before anything is awaited: this may be interrupted, and a task that is cancelled before its first step releases nothing.
        for entrant in race.entrants[1:]:
            entrant.lease.release()
        if race.tasks:
            await asyncio.gather(*race.tasks, return_exceptions=True)


def _has_room(journey: "Journey", candidate: "Candidate", now: float) -> bool:
    """Whether another attempt may go there: it takes requests and, where requests wait for slots, nobody waits and it has one."""
    worker = cast("Worker", candidate.worker)
    if not worker.routable:
        return False
    gate = journey.gate
    if gate is None:
        return True
    return not gate.line.tickets and bool(gate.room.roomy([candidate], now))
