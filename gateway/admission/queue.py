"""The waiting line of one fleet: who comes next, in virtual or real time. No clock, no I/O.

Order: the priority class first (smaller is sooner, as in vLLM). Within a class, the tenant that was served least for its weight;
of its requests the one with the earliest deadline. Served is counted in tokens by virtual token counters (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024): a tenant that comes back after a pause starts level with whoever was
served least of those that wait, so pauses save nothing up. Every `AGED`-th turn goes to the one that waits longest, once that
is longer than `aging`: nothing starves, and however many old requests of a low class there are, they take no more than that share.
"""

import enum
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from gateway.admission.shedding import Estimate
    from gateway.admission.stages import Stage
    from gateway.errors import GatewayError

AGED: Final = 8
"""Of so many turns one goes to the request that has waited longest."""
_REMEMBERED: Final = 4096
"""Counters of tenants that are kept while nothing of theirs waits."""
_SLACK: Final = 16
"""Dead entries that a heap may hold beside as many as live ones."""

Turn = Callable[["GatewayError | None"], None]
"""Told when a ticket's waiting is over: None, it is its turn; else why it is refused."""


class State(enum.Enum):
    """Where a ticket is."""

    NEW = "new"
    WAITING = "waiting"
    GRANTED = "granted"
    """Its turn has come; it has not been decided yet."""
    RUNNING = "running"
    ENDED = "ended"


class Ticket(msgspec.Struct, eq=False):
    """One request on its way to a worker.

    Attributes:
        tenant: whose it is, by name; empty where there are no tenants.
        weight: that tenant's share beside others'.
        stage: its class of work, or None.
        group: requests of one group fit the same workers: when one does not, none does.
        pool: which workers those are, by name; groups may have one together.
        priority: smaller is sooner.
        deadline: until when what its stage promises must have happened, on the caller's clock; infinite: no matter when.
        tokens: of its prompt, at least 1.
        session: conversation that it belongs to, empty: unknown.
        entered: when it came; once it waits, since when.
        latest: when it has to be sent at the latest, to make its deadline.
        turn: see `Turn`; needed from the moment on at which it waits.
        estimate: what was learned of its stage, for the gate.
        state: see `State`.
        sent: when it was decided.
        predicted: seconds from then on that what its stage promises was predicted to take; 0: not predicted.
        ttft: the part of them to the first token.
        waited: seconds in the line.
        only: ids of the workers that are of use to it; empty: all of its pool.
    """

    entered: float
    tenant: str = ""
    weight: float = 1.0
    stage: "Stage | None" = None
    group: Hashable = ""
    pool: str = ""
    priority: int = 0
    deadline: float = inf
    tokens: int = 1
    session: str = ""
    turn: Turn | None = None
    estimate: "Estimate | None" = None
    state: State = State.NEW
    latest: float = inf
    sequence: int = 0
    sent: float = 0.0
    predicted: float = 0.0
    ttft: float = 0.0
    waited: float = 0.0
    only: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its stage's name; empty without one."""
        return self.stage.name if self.stage is not None else ""


class _Lane:
    """Requests of one tenant, group and priority, by deadline. Those that left stay in the heap until they come up."""

    __slots__ = ("count", "group", "heap", "pool", "tenant", "weight")

    def __init__(self, ticket: Ticket) -> None:
        self.tenant = ticket.tenant
        self.group = ticket.group
        self.pool = ticket.pool
        self.weight = ticket.weight
        self.heap: list[tuple[float, int, Ticket]] = []
        self.count = 0

    def push(self, ticket: Ticket) -> None:
        self.count += 1
        self.weight = ticket.weight
        heappush(self.heap, (ticket.deadline, ticket.sequence, ticket))

    def head(self) -> tuple[float, int, Ticket]:
        """The first that waits; there is one."""
        heap = self.heap
        while heap[0][2].state is not State.WAITING:
            heappop(heap)
        return heap[0]

    def left(self) -> None:
        """One of its tickets waits no more."""
        self.count -= 1
        if len(self.heap) > 2 * self.count + _SLACK:
            self.heap = [entry for entry in self.heap if entry[2].state is State.WAITING]
            heapify(self.heap)


_Class = dict[tuple[str, Hashable], _Lane]


class WaitingLine:
    """Requests that wait. Bounded in requests and in tokens.

    Attributes:
        max_requests, max_tokens: the bounds.
        aging: seconds of waiting after which a request counts as old.
        tickets: of all that wait, by number, longest first. Whether there are any is asked with every request: an attribute is cheap.
        tokens: of all that wait.
    """

    __slots__ = (
        "_classes",
        "_latest",
        "_level",
        "_order",
        "_sequence",
        "_served",
        "_tenants",
        "_turns",
        "aging",
        "max_requests",
        "max_tokens",
        "tickets",
        "tokens",
    )

    def __init__(self, *, max_requests: int, max_tokens: int, aging: float) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.aging = aging
        self.tokens = 0
        self._order: list[int] = []
        self._classes: dict[int, _Class] = {}
        self.tickets: OrderedDict[int, Ticket] = OrderedDict()
        self._latest: list[tuple[float, int, Ticket]] = []
        self._served: dict[str, float] = {}
        self._tenants: dict[str, int] = {}
        self._level = 0.0
        self._sequence = 0
        self._turns = 0

    def __len__(self) -> int:
        return len(self.tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Those that wait, longest first."""
        return iter(self.tickets.values())

    def oldest(self, now: float) -> float:
        """Seconds that the one at the front has waited; 0 without any."""
        return now - next(iter(self)).entered if self.tickets else 0.0

    def push(self, ticket: Ticket, now: float) -> list[Ticket] | None:
        """Let `ticket` wait. One that was here before keeps its age, and its place among its tenant's.

        Returns:
            Those that had to go for it, of lower classes and of tenants that have more waiting, the last to come first; None: there is no
            room, and nothing has changed.
        """
        losers = self._losers(ticket)
        if losers is None:
            return None
        for loser in losers:
            self.remove(loser)
        self._lift(ticket.tenant)
        if not ticket.sequence:
            self._sequence += 1
            ticket.sequence = self._sequence
            ticket.entered = now
        ticket.state = State.WAITING
        if ticket.priority not in self._classes:
            insort(self._order, ticket.priority)
            self._classes[ticket.priority] = {}
        lanes = self._classes[ticket.priority]
        key = (ticket.tenant, ticket.group)
        if key not in lanes:
            lanes[key] = _Lane(ticket)
        lanes[key].push(ticket)
        self.tickets[ticket.sequence] = ticket
        self._tenants[ticket.tenant] = self._tenants.get(ticket.tenant, 0) + 1
        self.tokens += ticket.tokens
        if ticket.latest < inf:
            heappush(self._latest, (ticket.latest, ticket.sequence, ticket))
        return losers

    def pop(self, now: float, fits: Callable[[Hashable], bool] | None = None) -> Ticket | None:
        """The next whose group `fits`, taken out and counted as served; None: nobody fits."""
        if not self.tickets:
            return None
        verdicts: dict[Hashable, bool] = {}

        def fit(group: Hashable) -> bool:
            if fits is None:
                return True
            if (verdict := verdicts.get(group)) is None:
                verdict = verdicts[group] = fits(group)
            return verdict

        found = self._aged(now, fit) if self._turns % AGED == AGED - 1 else None
        if found is None:
            found = self._first(fit)
        if found is None:
            return None
        self._turns += 1
        self._take(found, State.GRANTED)
        found.waited = now - found.entered
        self._level = self._served[found.tenant]
        self.charge(found.tenant, found.weight, found.tokens)
        return found

    def remove(self, ticket: Ticket) -> bool:
        """Take `ticket` out: its client left, or it is refused. False: it did not wait."""
        if ticket.state is not State.WAITING:
            return False
        self._take(ticket, State.ENDED)
        return True

    def expired(self, now: float) -> list[Ticket]:
        """Take out all that can make their deadline no more."""
        gone = []
        while self._latest and (self._latest[0][0] < now or self._latest[0][2].state is not State.WAITING):
            ticket = heappop(self._latest)[2]
            if self.remove(ticket):
                gone.append(ticket)
        return gone

    def next_expiry(self) -> float:
        """When the next can make its deadline no more; infinite: never."""
        while self._latest and self._latest[0][2].state is not State.WAITING:
            heappop(self._latest)
        return self._latest[0][0] if self._latest else inf

    def charge(self, tenant: str, weight: float, tokens: float) -> None:
        """Count `tokens` as served to `tenant` (of an answer, say)."""
        self._served[tenant] = self._served.get(tenant, self._level) + tokens / weight

    def ahead(self, ticket: Ticket) -> int:
        """About how many of its pool come before a new `ticket`: all of higher classes, and of its own those that fairness puts there."""
        before = 0
        for priority in self._order:
            if priority > ticket.priority:
                break
            counts: dict[str, int] = {}
            weights: dict[str, float] = {}
            for lane in self._classes[priority].values():
                if lane.pool == ticket.pool:
                    counts[lane.tenant] = counts.get(lane.tenant, 0) + lane.count
                    weights[lane.tenant] = lane.weight
            count = sum(counts.values())
            if priority == ticket.priority:
                turns = counts.pop(ticket.tenant, 0) + 1
                # While it has so many turns, another tenant has as many for each unit of weight, if it has so many requests.
                fair = sum(min(each, turns * weights[name] / ticket.weight) for name, each in counts.items())
                count = int(fair) + turns - 1
            before += count
        return before

    def accepts(self, ticket: Ticket) -> bool:
        """Whether `push` would let it wait."""
        return self._losers(ticket) is not None

    def _first(self, fit: Callable[[Hashable], bool]) -> Ticket | None:
        served = self._served
        for priority in self._order:
            best: tuple[float, float, int, Ticket] | None = None
            for lane in self._classes[priority].values():
                if fit(lane.group):
                    entry = (served[lane.tenant], *lane.head())
                    if best is None or entry[:3] < best[:3]:
                        best = entry
            if best is not None:
                return best[3]
        return None

    def _aged(self, now: float, fit: Callable[[Hashable], bool]) -> Ticket | None:
        for ticket in self.tickets.values():
            if now - ticket.entered < self.aging:
                break
            if fit(ticket.group):
                return ticket
        return None

    def _losers(self, ticket: Ticket) -> list[Ticket] | None:
        requests = len(self.tickets) + 1 - self.max_requests
        tokens = self.tokens + ticket.tokens - self.max_tokens
        # A prompt that is longer than the bound may wait alone: no other way leads to a worker.
        if requests <= 0 and (tokens <= 0 or not self.tickets):
            return []
        losers: list[Ticket] = []
        for priority in reversed(self._order):
            if priority < ticket.priority:
                break
            for loser in self._by_age(priority) if priority > ticket.priority else self._greediest(ticket):
                losers.append(loser)
                requests -= 1
                tokens -= loser.tokens
                if requests <= 0 and (tokens <= 0 or len(losers) == len(self.tickets)):
                    return losers
        return None

    def _by_age(self, priority: int) -> list[Ticket]:
        """Those of one class, the last to come first."""
        entries = [entry for lane in self._classes[priority].values() for entry in lane.heap]
        waiting = [ticket for _, _, ticket in entries if ticket.state is State.WAITING]
        return sorted(waiting, key=lambda each: each.sequence, reverse=True)

    def _greediest(self, newcomer: Ticket) -> Iterator[Ticket]:
        """Of the newcomer's class, those of tenants that have more waiting for their weight than it would have: a flood takes nobody's room."""
        lanes = self._classes[newcomer.priority].values()
        counts: dict[str, float] = {}
        for lane in lanes:
            counts[lane.tenant] = counts.get(lane.tenant, 0.0) + lane.count / lane.weight
        own = counts.pop(newcomer.tenant, 0.0) + 1 / newcomer.weight
        if not counts or max(counts.values()) <= own:
            return
        weights = {lane.tenant: lane.weight for lane in lanes}
        for ticket in self._by_age(newcomer.priority):
            count = counts.get(ticket.tenant, 0.0)
            if count > own and count >= max(counts.values()):
                counts[ticket.tenant] = count - 1 / weights[ticket.tenant]
                yield ticket

    def _take(self, ticket: Ticket, state: State) -> None:
        ticket.state = state
        del self.tickets[ticket.sequence]
        self.tokens -= ticket.tokens
        self._tenants[ticket.tenant] -= 1
        if not self._tenants[ticket.tenant]:
            del self._tenants[ticket.tenant]
        lanes = self._classes[ticket.priority]
        key = (ticket.tenant, ticket.group)
        lane = lanes[key]
        lane.left()
        if not lane.count:
            del lanes[key]
            if not lanes:
                del self._classes[ticket.priority]
                self._order.remove(ticket.priority)
        if len(self._latest) > 2 * len(self.tickets) + _SLACK:
            self._latest = [entry for entry in self._latest if entry[2].state is State.WAITING]
            heapify(self._latest)

    def _lift(self, tenant: str) -> None:
        """A tenant of which nothing waited is level with those that were served least."""
        if tenant in self._tenants:
            return
        served = self._served
        level = min((served[other] for other in self._tenants), default=self._level)
        served[tenant] = max(served.get(tenant, level), level)
        if len(served) > _REMEMBERED:
            self._served = {name: count for name, count in served.items() if name in self._tenants or name == tenant}
