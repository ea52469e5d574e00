"""All that is known about who holds what: one map per block size, and per worker how it is fed."""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from gateway.prefix.history import DEFAULT_BLOCKS, History
from gateway.prefix.holders import Holder
from gateway.prefix.map import DEFAULT_BUDGET, Expectation, PrefixMap
from gateway.prefix.mirror import Mirror
from gateway.prompt.blocks import Chain, Hasher
from policies.base import NO_MATCH, Match

if TYPE_CHECKING:
    from gateway.prefix.events import Stored
    from gateway.prompt.prompt import Prompt

_NOTHING: Mapping[str, Match] = MappingProxyType({})


class Watcher(Protocol):
    """Whoever wants to know which prompts there are in a fleet: a directory of slower memory can be asked about them. No call may wait."""

    def saw(self, prompt: "Prompt", chains: Mapping[int, Chain], salt: str | None) -> None:
        """A prompt has come whose tokens are known, for no adapter."""

    def stored(self, event: "Stored", ours: Sequence[int], block_size: int) -> None:
        """A worker told what it has stored in its l1; `ours` are the hashes of those blocks in the map for `block_size`."""

    def missing(self, chains: Mapping[int, Chain], tokens: int) -> None:
        """A worker did not load what it was thought to reach in l2 of a prompt, from this token on."""


class PrefixIndex:
    """The maps, and one `Mirror` (events) or `History` (no events) per worker.

    Hashes carry their namespace, so models, adapters and tenants share the maps.

    Attributes:
        hasher: makes every chain that these maps are asked about.
        maps: by block size.
        workers: by id.
        watchers: by fleet.
    """

    def __init__(self, hasher: Hasher, *, budget: int = DEFAULT_BUDGET) -> None:
        """`budget`: bytes per block size."""
        self.hasher = hasher
        self.maps: dict[int, PrefixMap] = {}
        self.workers: dict[str, Mirror | History] = {}
        self.watchers: dict[str, Watcher] = {}
        self._budget = budget
        self._pools: dict[tuple[str, int], Holder] = {}

    @property
    def block_sizes(self) -> list[int]:
        """The block sizes in use: make chains for these."""
        return [size for size, prefix_map in self.maps.items() if prefix_map.has_workers]

    def map(self, block_size: int) -> PrefixMap:
        """The map for a block size, made when first asked for."""
        found = self.maps.get(block_size)
        if found is None:
            found = self.maps[block_size] = PrefixMap(block_size, budget=self._budget)
        return found

    def follow(self, worker: str, model: str, *, pool: str | None = None, **options: Any) -> Mirror:
        """A worker that sends events; replaces what was known of it.

        Args:
            worker: id.
            model: namespace.
            pool: name of the l2 that it shares with others, if any; it becomes a member when its block size is known.
            options: see `Mirror`.
        """
        self.remove(worker)
        mirror = Mirror(
            worker,
            model,
            self.hasher,
            self.map,
            pool=None if pool is None else functools.partial(self._enter_pool, pool),
            watched=functools.partial(self._stored, model),
            **options,
        )
        self.workers[worker] = mirror
        return mirror

    def imagine(self, worker: str, block_size: int, capacity: int = DEFAULT_BLOCKS) -> History:
        """A worker that sends none; replaces what was known of it. `capacity` in blocks."""
        self.remove(worker)
        history = self.workers[worker] = History(worker, self.map(block_size), capacity)
        return history

    def remove(self, worker: str) -> None:
        """Forget a worker for good; unknown ones are ignored."""
        found = self.workers.pop(worker, None)
        if found is not None:
            found.leave()

    def placed(self, worker: str) -> tuple[PrefixMap, Holder] | None:
        """Where a worker stands: its map, and who it is there; None as long as its block size is not known."""
        found = self.workers.get(worker)
        if found is None or found.map is None or found.holder is None:
            return None
        return found.map, found.holder

    def match(self, chains: Mapping[int, Chain]) -> Mapping[str, Match]:
        """What every worker holds of a prompt, by worker id; those that hold nothing are left out. Not to be changed.

        Args:
            chains: the prompt's chain for every block size (`Hasher.chains`); maps without one are not asked.
        """
        found: Mapping[str, Match] = _NOTHING
        for block_size, prefix_map in self.maps.items():
            chain = chains.get(block_size)
            if chain is not None:
                matches = prefix_map.match(chain.hashes, chain.hittable)
                if matches.steps:
                    found = {**found, **matches.held()} if found else matches.held()
        return found

    def sent(self, worker: str, chains: Mapping[int, Chain], held: Match = NO_MATCH) -> Expectation | None:
        """A prompt was sent to a worker that held `held` of it: believe that it will hold all of it.

        Returns:
            What is to be settled when the answer begins; None where there is nothing to be confirmed.
        """
        found = self.workers.get(worker)
        if isinstance(found, History):
            chain = chains.get(found.block_size)
            if chain is not None:
                found.record(chain.hashes, held.tokens // chain.block_size)
        elif found is not None and found.map is not None and found.holder is not None:
            chain = chains.get(found.map.block_size)
            if chain is not None:
                expectation = found.map.expect(found.holder, chain.hashes[held.tokens // chain.block_size :])
                found.map.touch(chain.hashes, len(chain.hashes))
                return expectation
        return None

    def tick(self, now: float, sweep: int = 2000) -> None:
        """Expire what is due and clear up a little; a few times a second."""
        for prefix_map in self.maps.values():
            prefix_map.expire(now)
            if prefix_map.unswept:
                prefix_map.sweep(sweep)

    def _stored(self, model: str, event: "Stored", ours: Sequence[int], block_size: int) -> None:
        watcher = self.watchers.get(model)
        if watcher is not None:
            watcher.stored(event, ours, block_size)

    def _enter_pool(self, name: str, prefix_map: PrefixMap, holder: Holder) -> Holder:
        key = name, prefix_map.block_size
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = prefix_map.join_pool(name)
        prefix_map.set_members(pool, (*pool.members, holder))
        return pool
