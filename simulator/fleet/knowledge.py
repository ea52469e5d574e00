"""What the gateway knows of the workers' caches in a replay: its own `PrefixIndex`, fed late and, if wished, with losses."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Final, TypeAlias

from gateway.prefix.holders import Holder, Tier
from gateway.prefix.index import PrefixIndex
from gateway.prefix.map import Expectation
from gateway.prompt.blocks import Chain, Hasher
from policies.base import Knowledge, Match
from simulator.engine import Cleared, Output, Removed, Stored

KvEvent: TypeAlias = Stored | Removed | Cleared

_TICK: Final = 0.25
"""Seconds between two looks at what has expired, as in `gateway.prefix.feed`."""
_TIERS: Final = {"device": Tier.DEVICE, "l1": Tier.L1, "l2": Tier.L2}
_NOTHING: Final[Mapping[str, Match]] = {}


class CacheKnowledge:
    """Looks prompts up as the gateway would.

    The engines' keys are our hashes, so what a `Mirror` does for a real worker (hashing its tokens again, minding its own
    hashes) is left out, but for one thing: blocks behind one that we were not told of are not believed.
    """

    def __init__(
        self,
        workers: Sequence[str],
        *,
        knowledge: Knowledge,
        hasher: Hasher,
        block_size: int,
        capacity: int,
        lag: float,
        loss: float,
        random: Random,
        shared_l2: bool = False,
    ) -> None:
        """Nothing is known yet.

        Args:
            workers: ids.
            knowledge: what the policy wants to know. With ``none`` all this does nothing.
            hasher: that of the chains.
            block_size: tokens per block.
            capacity: blocks that a worker's device holds.
            lag: seconds that an event takes.
            loss: share of batches that are lost.
            random: which.
            shared_l2: there is an l2, one for all workers.
        """
        self._index = PrefixIndex(hasher)
        self._block_size = block_size
        self._listening = knowledge == "events"
        self._asked = knowledge != "none"
        self._lag = lag
        self._loss = loss
        self._random = random
        self._due: deque[tuple[float, int, list[KvEvent]]] = deque()
        self._next_tick = 0.0
        self._known: list[set[object]] = [set() for _ in workers] if loss else []
        self._holders: list[Holder] = []
        self._pool: Holder | None = None
        for worker in workers if self._asked else ():
            if self._listening:
                mirror = self._index.follow(worker, "", block_size=block_size)
                assert mirror.holder is not None
                self._holders.append(mirror.holder)
            else:
                self._index.imagine(worker, block_size, capacity)
        self._map = self._index.map(block_size)
        if self._listening and shared_l2:
            self._pool = self._map.join_pool("l2", self._holders)

    @property
    def asked(self) -> bool:
        """Whether the policy wants to know anything."""
        return self._asked

    def heard(self, now: float, worker: int, outputs: Iterable[Output]) -> None:
        """A worker publishes what changed in its cache. To be called in order of time."""
        if not self._listening:
            return
        batch: list[KvEvent] = [event for event in outputs if type(event) in _KV]  # type: ignore[misc]  # they are what `_KV` says
        if batch and not (self._loss and self._random.random() < self._loss):
            self._due.append((now + self._lag, worker, batch))

    def match(self, chain: Chain, now: float) -> Mapping[str, Match]:
        """What each worker is believed to hold of a prompt, by id."""
        if not self._asked:
            return _NOTHING
        self._catch_up(now)
        return self._index.match({self._block_size: chain})

    def sent(self, worker: str, chain: Chain, held: Match) -> Expectation | None:
        """The prompt goes to `worker`; what is returned is to be settled when its answer begins."""
        return self._index.sent(worker, {self._block_size: chain}, held) if self._asked else None

    def _catch_up(self, now: float) -> None:
        """Take in what has arrived by now. Nobody looks in between, so that is early enough."""
        due = self._due
        while due and due[0][0] <= now:
            _, worker, batch = due.popleft()
            for event in batch:
                self._take(worker, event)
        if now >= self._next_tick:
            self._index.tick(now)
            self._next_tick = now + _TICK

    def _take(self, worker: int, event: KvEvent) -> None:
        holder = self._holders[worker]
        if isinstance(event, Cleared):
            self._map.clear(holder)
            if self._known:
                self._known[worker].clear()
            return
        tier = _TIERS[event.tier]
        if tier is Tier.L2 and self._pool is not None:
            holder = self._pool
        # The engine's keys are the ints that we gave it.
        if isinstance(event, Removed):
            self._map.remove(holder, event.keys, tier)  # type: ignore[arg-type]
        elif not self._known or self._believed(worker, event):
            self._map.store(holder, event.keys, tier)  # type: ignore[arg-type]

    def _believed(self, worker: int, event: Stored) -> bool:
        """Whether we were told of the block before; a real feed would keep the event until it hears of that one."""
        known = self._known[worker]
        if event.parent is not None and event.parent not in known:
            return False
        known.update(event.keys)
        return True


_KV: Final = frozenset({Stored, Removed, Cleared})
