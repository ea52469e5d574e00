"""Which of a fleet's workers have room, and for whom: slots, pools, shares, and what is promised already. No clock, no I/O.

`gateway.admission.slots` says what one worker has; here it is put together for a fleet, and what runs is counted by stage and tenant.
"""

from math import inf
from typing import TYPE_CHECKING, Final, cast

from gateway.admission.reservations import Reservations
from gateway.admission.shares import Shares
from gateway.admission.slots import capacity, opens_at, paced, places, total
from gateway.admission.stages import Stage, Stages, kept_for_others, share_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.admission.queue import Ticket
    from gateway.config.schema import WorkerLimits
    from gateway.fleet.worker import Worker
    from policies.base import Candidate

_COUNT_EVERY: Final = 0.25
"""Seconds for which the count of a fleet's slots is good."""


class Room:
    """One fleet's.

    Attributes:
        stages: all of the configuration.
        ahead: seconds of prefill that may be before a new prompt at a worker that computes one at a time.
        headroom: share of the slots that tenants leave to others once they have their share.
        shares: who has its share.
        reservations: slots that are kept for requests to come.
        granted: requests whose turn has come and that are not decided yet, by pool.
        running: requests that were decided and have not ended, by stage.
    """

    __slots__ = (
        "_common",
        "_counted",
        "_ids",
        "_limits",
        "_pools",
        "_shared",
        "_slots",
        "_workers",
        "ahead",
        "granted",
        "headroom",
        "reservations",
        "running",
        "shares",
        "stages",
    )

    def __init__(self) -> None:
        self.stages = Stages({})
        self.ahead = inf
        self.headroom = 0.0
        self.shares = Shares()
        self.reservations = Reservations()
        self.granted: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self._common = 0  # of those, in the pool of all that have none of their own
        self._workers: Sequence[Worker] = ()
        self._limits: Mapping[str, WorkerLimits] = {}
        self._pools: dict[str, Sequence[Worker]] = {"": ()}
        self._ids: dict[str, frozenset[str]] = {}
        self._shared = False
        self._slots = self._counted = 0.0

    def configure(
        self,
        workers: "Sequence[Worker]",
        limits: "Mapping[str, WorkerLimits]",
        stages: Stages,
        ahead: float,
        headroom: float,
    ) -> None:
        """Go by another configuration; what runs goes on."""
        self.stages = stages
        self.ahead = ahead
        self.headroom = headroom
        self._workers = workers
        self._limits = limits
        self._shared = stages.shared
        ids = {worker.id for worker in workers}
        self._pools = {"": [worker for worker in workers if worker.id not in stages.pooled]}
        for stage in stages.by_name.values():
            if stage.pool & ids:
                self._pools[stage.name] = [worker for worker in workers if worker.id in stage.pool]
        self._ids = {name: frozenset(worker.id for worker in pool) for name, pool in self._pools.items()}
        self._counted = 0.0

    def pool_of(self, stage: Stage | None) -> str:
        """The name of the pool that a stage's requests go to."""
        return stage.name if stage is not None and stage.name in self._pools else ""

    def members(self, pool: str) -> "Sequence[Worker]":
        """A pool's workers; those of the others where a reload has taken the pool away."""
        return self._pools.get(pool) or self._pools[""]

    def among(self, candidates: "Sequence[Candidate]", pool: str) -> "Sequence[Candidate]":
        """Those of a pool."""
        if len(self._pools) == 1:
            return candidates
        ids = self._ids[pool if pool in self._pools else ""]
        return [candidate for candidate in candidates if candidate.worker.id in ids]

    def free(self, worker: "Worker") -> float:
        """Slots of a worker that nobody has and nobody is promised."""
        return capacity(worker, self._limits) - worker.in_flight - self.reservations.held.get(worker.id, 0)

    def roomy(self, candidates: "Sequence[Candidate]", now: float) -> "Sequence[Candidate] | None":
        """Those with room: `candidates` itself when all have, None when none takes requests at all."""
        limits, held, ahead = self._limits, self.reservations.held, self.ahead
        roomy: list[Candidate] = []
        routable = False
        for candidate in candidates:
            worker = cast("Worker", candidate.worker)
            if not worker.routable:
                continue
            routable = True
            if worker.in_flight:
                can = worker.capabilities
                most: float | None = can.slots
                if limits or held:
                    most = capacity(worker, limits) - held.get(worker.id, 0)
                if most is not None and worker.in_flight >= most:
                    continue
                if worker.backlog and can.prefill == "exclusive" and not paced(worker, now, ahead):
                    continue
            elif held and self.free(worker) <= 0:
                continue
            roomy.append(candidate)
        if not routable:
            return None
        return candidates if len(roomy) == len(candidates) else roomy

    def fits(
        self,
        stage: Stage | None,
        tenant: str,
        pool: str,
        now: float,
        only: frozenset[str] = frozenset(),
        *,
        queued: bool = True,
    ) -> bool:
        """Whether one more of `stage` and `tenant` may go, those counted in whose turn has come already; to `only` those workers, if any are named.

        Without `queued` nobody waits, and the caller knows that a worker has room.
        """
        if pool == "" and (self._shared or (tenant and self.headroom)):
            slots = self._count(now)
            if slots < inf:
                free = slots - self._common
                if tenant and free <= self.headroom * slots and self.shares.has_its_share(tenant, slots):
                    return False
                if self._shared and not self._has_share(stage, slots, free):
                    return False
        granted = self.granted.get(pool, 0)
        if not granted and not queued:
            return True
        workers = self.members(pool)
        if only:
            workers = [worker for worker in workers if worker.id in only] or workers
        if not any(worker.routable for worker in workers):
            return True
        left = -granted + 0.0
        for worker in workers:
            left += places(worker, now, self.ahead, self._limits, self.reservations.held.get(worker.id, 0))
            if left > 0:
                return True
        return False

    def started(self, ticket: "Ticket") -> None:
        """A request was decided."""
        name = ticket.name
        self.running[name] = self.running.get(name, 0) + 1
        if not ticket.pool:
            self._common += 1
        if ticket.tenant:
            self.shares.started(ticket.tenant)

    def ended(self, ticket: "Ticket") -> None:
        """One that was decided has ended."""
        self.running[ticket.name] -= 1
        if not ticket.pool:
            self._common -= 1
        if ticket.tenant:
            self.shares.ended(ticket.tenant)

    def reserve(self, stage: Stage, session: str, now: float) -> "Worker | None":
        """Choose the worker of a conversation's next request, of `stage`, and keep a slot there for `stage.hold` seconds."""
        pool = self.members(self.pool_of(stage))
        free = [worker for worker in pool if worker.routable and 0 < self.free(worker) < inf]
        return self.reservations.reserve(stage, session, free, self.free, now)

    def turnover(self, pool: str) -> float:
        """Requests per second that a pool's slots let go when all are taken, as far as is learned; 0: nothing is."""
        return sum(
            slots / worker.hold
            for worker in self.members(pool)
            if worker.routable and worker.hold > 0 and (slots := capacity(worker, self._limits)) < inf
        )

    def opens_at(self, now: float) -> float:
        """When the next worker has room by the passing of time alone; infinite: none will."""
        if self.ahead == inf:
            return inf
        return min(
            (opens_at(worker, now, self.ahead) for worker in self._workers if worker.backlog and worker.routable),
            default=inf,
        )

    def _count(self, now: float) -> float:
        if not self._counted or now - self._counted > _COUNT_EVERY:
            self._slots = total(self.members(""), self._limits)
            self._counted = now
        return self._slots

    def _has_share(self, stage: Stage | None, slots: float, free: float) -> bool:
        """Whether `stage` may have one of the slots that are free."""
        stages = [each for each in self.stages.by_name.values() if not self.pool_of(each)]
        used = self.running.get(stage.name, 0) if stage is not None else 0
        if stage is not None and stage.max_share < 1 and used >= share_of(slots, stage.max_share):
            return False
        own = share_of(slots, stage.reserve) if stage is not None else 0.0
        return used < own or free >= 1 + kept_for_others(stage, stages, self.running, slots)
