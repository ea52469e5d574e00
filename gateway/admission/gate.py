"""The gate of one fleet: who may go to a worker now, who waits, who is refused. No clock, no I/O.

The proxy and the replay use the same object. A ticket's way through it::

    arrive   refused at once where the line alone makes it late; nothing is known of its prompt yet
    select   candidates that have room and will be in time; or it waits, and its `turn` is called when that is over: then
             everything that was looked up is out of date, and `select` is asked again
    started  it was decided
    close    it has ended, failed or left, wherever it was: always called, once

`opened` is called when a worker may have more room, `advance` when time has passed (`wake` says when that matters).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final, cast

from gateway.admission.queue import State, Ticket, WaitingLine
from gateway.admission.reservations import Reservations
from gateway.admission.room import Room
from gateway.admission.shedding import Estimate, Reason, Speed, refusal
from gateway.admission.stages import Stage, Stages
from policies.scorers.ttft import predicted_ttft

if TYPE_CHECKING:
    from gateway.config.schema import Admission, WorkerLimits
    from gateway.errors import GatewayError
    from gateway.fleet.worker import Worker
    from policies.base import Candidate, RouteRequest

_SLOWEST_LOOK: Final = 0.25
"""Seconds between two looks at a line, at most: workers come back without telling."""
_SOONEST_LOOK: Final = 0.002
_CAUTION: Final = 1.5
"""Those ahead count so many times where a wait decides about a refusal: better refused at once than after a wait."""


class Gate:
    """See the module.

    Attributes:
        fleet: its name.
        line: who waits.
        refused: how many were refused, by reason.
        room: who has room, and what runs.
    """

    __slots__ = (
        "_current",
        "_max_wait",
        "_now",
        "_overflow",
        "_speeds",
        "_stages",
        "fleet",
        "line",
        "refused",
        "room",
    )

    def __init__(self, fleet: str) -> None:
        self.fleet = fleet
        self.line = WaitingLine(max_requests=0, max_tokens=0, aging=0.0)
        self.refused: dict[str, int] = {}
        self.room = Room()
        self._stages = Stages({})
        self._max_wait = inf
        self._overflow = 429
        self._speeds: dict[str, Speed] = {}
        self._now = 0.0
        self._current: Ticket | None = None

    def configure(
        self,
        workers: "Sequence[Worker]",
        settings: "Admission | None",
        limits: "Mapping[str, WorkerLimits]",
        stages: Stages,
        defaults: "Admission",
    ) -> None:
        """Go by another configuration; who waits or runs goes on.

        Args:
            workers: of the fleet.
            settings: the model's, None: only `limits` matter.
            limits: of workers, by id.
            stages: all.
            defaults: for the line, where `settings` are None.
        """
        self._stages = stages
        ahead = inf if settings is None else settings.prefill_ahead
        settings = settings or defaults
        self.room.configure(workers, limits, stages, ahead, settings.headroom)
        self._max_wait = settings.max_wait or inf
        line = self.line
        queues = [limit.max_queue for limit in limits.values()]
        bounds = [queue for queue in queues if queue is not None]
        whole = len(bounds) == len(queues) == len(workers)
        line.max_requests = min(settings.max_requests, sum(bounds)) if whole else settings.max_requests
        line.max_tokens = settings.max_tokens
        line.aging = settings.aging
        self._overflow = next((limit.overflow_status for limit in limits.values()), 429)

    @property
    def reservations(self) -> Reservations:
        """Slots that are kept for requests to come."""
        return self.room.reservations

    def pool_of(self, stage: Stage | None) -> str:
        """The name of the pool that a stage's requests go to."""
        return self.room.pool_of(stage)

    def wait(self, ticket: Ticket, now: float, caution: float = 1.0) -> float:
        """Predicted seconds in the line of a request that comes now; those ahead of it count `caution` times."""
        rate = self._rate(ticket.pool, now)
        return (self.line.ahead(ticket) * caution + 1) / rate if rate > 0 else 0.0

    def arrive(self, ticket: Ticket, now: float) -> None:
        """Refuse `ticket` if it is sure to be late or finds no room to wait. Cheap: nothing of its prompt is known.

        Raises:
            GatewayError: 429, or what `overflow_status` says.
        """
        if ticket.tenant:
            self.room.shares.seen(ticket.tenant, ticket.weight, now)
        line = self.line
        if not line.tickets and (line.max_requests or self.room.fits(ticket.stage, ticket.tenant, ticket.pool, now)):
            return
        if (ticket.session, ticket.name) in self.reservations:
            return
        if not line.accepts(ticket):
            raise self._full(ticket, now)
        self._check_line(ticket, now)

    def select(
        self, ticket: Ticket, request: "RouteRequest", candidates: "Sequence[Candidate]", now: float
    ) -> "Sequence[Candidate] | None":
        """The candidates to decide among, `candidates` itself if there is nothing to say against any; None: it waits now.

        Args:
            ticket: new, or one whose turn has come.
            request: what the policy is told; `now` and `prompt_tokens` are used.
            candidates: of the whole fleet.
            now: seconds.

        Raises:
            GatewayError: it is refused.
        """
        self._now = now
        room = self.room
        reserved = room.reservations
        if reserved.held:
            reserved.expire(now)
        candidates = room.among(candidates, ticket.pool)
        if ticket.only:
            candidates = [each for each in candidates if each.worker.id in ticket.only] or candidates
        claimed = bool(reserved.held) and reserved.claim(ticket.session, ticket.name)
        roomy = room.roomy(candidates, now)
        if roomy is None:
            return candidates  # nobody takes requests: the policy says what that means
        if claimed or ticket.state is State.GRANTED:
            if roomy:
                return self._in_time(ticket, request, roomy, now)
        elif (
            not self.line.tickets
            and roomy
            and room.fits(ticket.stage, ticket.tenant, ticket.pool, now, ticket.only, queued=False)
        ):
            return self._in_time(ticket, request, roomy, now)
        self._ungrant(ticket)
        if not self._waits(ticket, now):
            return None
        return self._in_time(ticket, request, room.roomy(candidates, now) or candidates, now)

    def narrow(self, ticket: Ticket, only: frozenset[str]) -> None:
        """Of all workers only these are of use to `ticket` (a LoRA adapter, a longer context): from now on it waits for room at one of them."""
        ticket.only = only
        ticket.group = (ticket.name, ticket.tenant, only)

    def started(self, ticket: Ticket, request: "RouteRequest", chosen: "Candidate", now: float) -> None:
        """`ticket` was decided, with nothing awaited since `select`, and before its worker's load counts it."""
        self._ungrant(ticket)
        ticket.state = State.RUNNING
        ticket.sent = now
        self.room.started(ticket)
        if ticket.stage is None and ticket.deadline == inf:
            return
        ttft = predicted_ttft(request, chosen)
        estimate = self._estimate(ticket)
        ticket.ttft = estimate.first if ttft is None else ttft
        ticket.predicted = estimate.needs(ttft, _kind(ticket)) - estimate.margin
        if not ticket.session:
            return
        follower = self._stages.follower(ticket.stage)
        if ticket.stage is not None and ticket.stage.after is not None:
            self.reservations.went(ticket.stage, ticket.session, chosen.worker.id)
        if follower is not None:
            self.room.reserve(follower, ticket.session, now)

    def close(
        self, ticket: Ticket, now: float, first_byte: float = 0.0, *, completed: bool = False, output_tokens: int = 0
    ) -> None:
        """`ticket` is over. Calling it again does nothing.

        Args:
            ticket: in any state.
            now: seconds.
            first_byte: when the first byte of a streamed answer came; 0: never, or the answer came whole.
            completed: whether its answer came to its end.
            output_tokens: of its answer, as far as known; they count as served to its tenant.
        """
        if ticket.state is State.ENDED:
            return
        if ticket.state is State.RUNNING:
            self.room.ended(ticket)
            if output_tokens and self.line.tickets:
                self.line.charge(ticket.tenant, ticket.weight, output_tokens)
            if ticket.sent and completed and (ticket.stage is not None or ticket.deadline < inf):
                self._learn(ticket, now - ticket.sent, first_byte - ticket.sent if first_byte else None)
        elif ticket.state is State.GRANTED:
            self._ungrant(ticket)
        else:  # it had nothing that another could have now; in a flood there are many of these
            self.line.remove(ticket)
            ticket.state = State.ENDED
            return
        ticket.state = State.ENDED
        self.opened(now)

    def opened(self, now: float) -> None:
        """Somewhere there may be more room. `now`: 0 if nobody knows."""
        if self.line.tickets:
            self.advance(now or self._now)

    def advance(self, now: float) -> None:
        """Tell those whose turn it is, and those that can be in time no more."""
        self._now = now
        if self.reservations.held:
            self.reservations.expire(now)
        line = self.line
        for ticket in line.expired(now):
            waited = now - ticket.entered
            reason: Reason = "queue_timeout" if waited >= self._max_wait else "deadline_missed"
            self._tell(ticket, self._refuse(reason, self.wait(ticket, now)))
        self._pop(now)

    def late(self, now: float) -> int:
        """How many that wait are predicted to miss their deadline; where a line is long, they are refused soon."""
        rate = self._speed("").rate(now, self.room.turnover(""))
        return sum(1 for place, ticket in enumerate(self.line, 1) if rate > 0 and ticket.latest < now + place / rate)

    def wake(self, now: float) -> float | None:
        """When `advance` has to be called, if nothing else happens before; None: not at all."""
        if not self.line:
            return None
        return max(now + _SOONEST_LOOK, min(now + _SLOWEST_LOOK, self.line.next_expiry(), self.room.opens_at(now)))

    # The line.

    def _waits(self, ticket: Ticket, now: float) -> bool:
        """Put `ticket` into the line; whether its turn has come at once."""
        ticket.latest = min(
            ticket.deadline - self._estimate(ticket).needs(None, _kind(ticket)) if ticket.deadline < inf else inf,
            (ticket.entered if ticket.sequence else now) + self._max_wait,
        )
        if not ticket.sequence:
            self._check_line(ticket, now)
        losers = self.line.push(ticket, now)
        if losers is None:
            raise self._full(ticket, now)
        for loser in losers:
            self._tell(loser, self._refuse("shed", self.wait(loser, now)))
        self._current = ticket
        try:
            self._pop(now)
        finally:
            self._current = None
        return ticket.state is State.GRANTED

    def _pop(self, now: float) -> None:
        line = self.line
        by_name = self._stages.by_name

        def fits(group: object) -> bool:
            name, tenant, *only = cast("tuple[str, str] | tuple[str, str, frozenset[str]]", group)
            stage = by_name.get(name)
            return self.room.fits(stage, tenant, self.room.pool_of(stage), now, *only)

        while line:
            ticket = line.pop(now, fits)
            if ticket is None:
                return
            granted = self.room.granted
            granted[ticket.pool] = granted.get(ticket.pool, 0) + 1
            self._speed(ticket.pool).turn(now)
            if ticket is not self._current:
                self._tell(ticket, None)
        for speed in self._speeds.values():
            speed.pause()

    def _tell(self, ticket: Ticket, error: "GatewayError | None") -> None:
        if ticket.turn is not None:
            ticket.turn(error)

    def _ungrant(self, ticket: Ticket) -> None:
        if ticket.state is State.GRANTED:
            ticket.state = State.NEW
            self.room.granted[ticket.pool] -= 1

    # Predictions.

    def _learn(self, ticket: Ticket, whole: float, first: float | None) -> None:
        """An answer took `whole` seconds, and `first` to its first byte where that says when its prefill ended."""
        estimate = self._estimate(ticket)
        began = ticket.ttft if first is None else first
        estimate.took(min(began, whole), max(0.0, whole - began))
        if _kind(ticket) == "completion":
            estimate.missed(whole - ticket.predicted, ticket.sent + whole)
        elif first is not None:
            estimate.missed(first - ticket.predicted, ticket.sent + whole)

    def _check_line(self, ticket: Ticket, now: float) -> None:
        """Refuse what the line makes late. One whose stage has nothing running is let through: there is nobody to learn from."""
        if ticket.deadline < inf and self.room.running.get(ticket.name):
            rate, ahead = self._rate(ticket.pool, now), self.line.ahead(ticket)
            over = self._estimate(ticket).needs(None, _kind(ticket)) - (ticket.deadline - now)
            wait, cautious = ((ahead + 1) / rate, (ahead * _CAUTION + 1) / rate) if rate > 0 else (0.0, 0.0)
            if cautious + over > 0:
                raise self._refuse("deadline_unreachable", wait + over)

    def _in_time(
        self, ticket: Ticket, request: "RouteRequest", roomy: "Sequence[Candidate]", now: float
    ) -> "Sequence[Candidate]":
        if ticket.deadline == inf:
            return roomy
        request.now = now
        estimate, kind, slack = self._estimate(ticket), _kind(ticket), ticket.deadline - now
        if request.prompt_tokens <= 0:  # the same for all
            least = estimate.needs(None, kind)
            if least <= slack:
                return roomy
            needs = [least] * len(roomy)
        else:
            needs = [estimate.needs(predicted_ttft(request, candidate), kind) for candidate in roomy]
            if max(needs) <= slack:
                return roomy
        kept = [candidate for candidate, seconds in zip(roomy, needs, strict=True) if seconds <= slack]
        # Nobody else is there to learn from: one is tried whatever is predicted, or a bad guess would stay for good.
        if kept or not self.room.running.get(ticket.name):
            return kept or roomy
        raise self._refuse("deadline_missed" if ticket.sequence else "deadline_unreachable", min(needs) - slack)

    def _rate(self, pool: str, now: float) -> float:
        """Requests per second that leave the line to a pool."""
        return self._speed(pool).rate(now, self.room.turnover(pool))

    def _estimate(self, ticket: Ticket) -> Estimate:
        found = ticket.estimate
        if found is None:
            found = ticket.estimate = self._stages.estimate(self.fleet, ticket.stage)
        return found

    def _speed(self, pool: str) -> Speed:
        speed = self._speeds.get(pool)
        if speed is None:
            speed = self._speeds[pool] = Speed()
        return speed

    def _full(self, ticket: Ticket, now: float) -> "GatewayError":
        self._count("queue_full")
        return refusal("queue_full", self.wait(ticket, now), status=self._overflow)

    def _refuse(self, reason: Reason, wait: float) -> "GatewayError":
        self._count(reason)
        return refusal(reason, wait)

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


def waiting(gates: Iterable[Gate]) -> int:
    """Requests in the lines of all."""
    return sum(len(gate.line) for gate in gates)


def _kind(ticket: Ticket) -> str:
    return ticket.stage.kind if ticket.stage is not None else "ttft"
