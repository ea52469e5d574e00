"""What LMCache's directory says about the chunks of prompts, put into the prefix map: storage as a pool, and the workers' CPU memories.

The directory knows chunks by their names (`backends.hints.chunks`), the map knows blocks by the gateway's own hashes. A chunk is known
here by both as soon as a prompt with it was seen, or a worker's event told its tokens; then the directory is asked about its keys:
at once, again after `AGAIN` seconds, then less and less often while its answer stays the same. A chunk of which the gateway has never
seen the tokens matches no prompt, so nothing is lost by not asking about it.

An answer is what the directory knows: servers report to it about once a second. Where a worker's own events tell of its CPU memory too,
they are sooner, and the directory has the last word: it knows chunks that were prefetched (whose tokens the server never saw, so it
sends no event) and keeps salts apart (events don't).

No clock, no I/O.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from backends.hints import chunks
from gateway.prefix.holders import Holder, Tier
from gateway.residency.chunk_names import AGAIN, MAX_CHUNKS, Chunk, ChunkNames

if TYPE_CHECKING:
    from backends.hints.lmcache_coordinator import Held
    from gateway.prefix.index import PrefixIndex
    from gateway.prefix.map import PrefixMap
    from gateway.prompt.blocks import Chain

SLOWEST: Final = 64.0
"""Seconds to which that grows, doubling with each answer that is the same."""
DOUBT: Final = 60.0
"""Seconds for which storage is not believed to have a chunk that a worker could not load from it."""
FRESH: Final = 5.0
"""What was asked about within so many seconds is not asked about again because a prompt has come with it."""


@dataclass(slots=True)
class DirectoryCounters:
    """In chunks."""

    asked: int = 0
    changed: int = 0
    """Answers that were not the same as the one before."""
    corrected: int = 0
    """Taken out of a worker's l1 although its events had put it there."""
    doubted: int = 0
    """Not loaded by a worker although storage was said to have it."""


class Directory:
    """One fleet's chunks.

    Attributes:
        fleet: its name.
        model: what LMCache calls its model.
        chunk: tokens in each chunk.
        world_size: devices over which each worker spreads the model: a chunk is held where all of them hold their part.
        names: of the chunks that are known.
        counters: what happened.
    """

    def __init__(
        self,
        fleet: str,
        index: "PrefixIndex",
        *,
        model: str,
        chunk: int = chunks.DEFAULT_CHUNK,
        world_size: int = 1,
        shared: bool = True,
        limit: int = MAX_CHUNKS,
    ) -> None:
        """Nothing is known yet.

        Args:
            fleet: name.
            index: where knowledge goes.
            model: see the class.
            chunk: see the class.
            world_size: see the class.
            shared: all workers reach each other's storage, though the directory names only who stored; otherwise what is not marked as shared
                there counts for the worker that stored it.
            limit: of chunks, see `MAX_CHUNKS`.
        """
        self.fleet = fleet
        self.model = model
        self.chunk = chunk
        self.world_size = world_size
        self.counters = DirectoryCounters()
        self._index = index
        self._shared = shared
        self._soon: deque[Chunk] = deque()
        self.names = ChunkNames(chunk, limit, added=self._soon.append, dropped=self._dropped)
        self._later: list[tuple[float, int, Chunk]] = []
        self._order = itertools.count()
        self._pools: dict[tuple[str, int], Holder] = {}
        self._members: dict[str, Sequence[str]] = {}  # names in the index by worker id
        self._worker_of: dict[str, str] = {}  # by instance

    @property
    def waiting(self) -> int:
        """Chunks that are to be asked about now."""
        return len(self._soon)

    # -- what to ask ------------------------------------------------------------------------------------------------

    def touch(self, chains: "Mapping[int, Chain]", now: float) -> None:
        """A prompt has come: ask soon about those of its known chunks that were not asked about lately."""
        self.names.use(chains)
        for found in self.names.of(chains):
            if found.due is not None and (found.asked is None or found.asked + FRESH <= now):
                # And again soon after that: it may be stored, or fetched, because of this very prompt.
                found.delay = AGAIN / 2
                self._hurry(found)

    def due(self, now: float, most: int) -> list[Chunk]:
        """Up to `most` chunks to ask about now: new ones and those of prompts that have just come first. Each must be given to `learned` or `again`."""
        while self._later and self._later[0][0] <= now:
            due, _, chunk = heapq.heappop(self._later)
            if chunk.due == due:
                self._hurry(chunk)
        found: list[Chunk] = []
        while self._soon and len(found) < most:
            chunk = self._soon.popleft()
            if chunk.blocks:
                found.append(chunk)
        return found

    def keys(self, wanted: Sequence[Chunk]) -> list[dict[str, Any]]:
        """The keys to ask about, for all devices of each chunk."""
        return [key for chunk in wanted for key in chunks.keys([chunk.name], self.model, self.world_size, chunk.salt)]

    def again(self, wanted: Sequence[Chunk], now: float) -> None:
        """The question was not answered."""
        for chunk in wanted:
            self._schedule(chunk, now + AGAIN)

    def learned(self, wanted: Sequence[Chunk], answers: "Sequence[Held]", now: float) -> None:
        """The answer to a question about `keys`.

        Args:
            wanted: the chunks.
            answers: for each of their keys, in order.
            now: seconds.
        """
        size = self.world_size
        for place, chunk in enumerate(wanted):
            if not chunk.blocks:
                continue
            parts = answers[place * size : (place + 1) * size]
            if len(parts) != size or any(part.key.chunk_hash_hex != chunk.name.hex() for part in parts):
                self._schedule(chunk, now + SLOWEST)
                continue
            l2 = frozenset.intersection(*(self._stored_in(part) for part in parts))
            if now < chunk.doubted:
                l2 = frozenset()
            l1 = frozenset.intersection(*(self._near(part) for part in parts))
            chunk.asked = now
            self.counters.asked += 1
            changed = self._apply(chunk, l1, l2)
            if changed:
                self.counters.changed += 1
            chunk.delay = AGAIN if changed else min(SLOWEST, chunk.delay * 2)
            self._schedule(chunk, now + chunk.delay)

    def missing(self, chains: "Mapping[int, Chain]", tokens: int, now: float) -> None:
        """A worker took only so many tokens of a prompt from its caches, of which storage was said to have more.

        Either the directory is wrong (LMCache 0.5.6 lets any server delete the files of a common folder, which then says that they are
        gone from itself, not from the one that had stored them), or the worker had no room to load them. For a while nobody counts on them.
        """
        for found in self.names.of(chains, tokens // self.chunk):
            if found.l2:
                for pool in found.l2:
                    self._remove_l2(found, pool)
                found.l2 = frozenset()
                found.doubted = now + DOUBT
                self.counters.doubted += 1

    def forget(self) -> None:
        """The directory is away: nothing that it said counts any more."""
        for chunk in self.names:
            for worker in chunk.l1:
                self._remove_l1(chunk, worker)
            chunk.l1 = chunk.l2 = frozenset()
            chunk.delay = AGAIN
        for (_, size), pool in self._pools.items():
            if (prefix_map := self._index.maps.get(size)) is not None:
                prefix_map.clear(pool)

    def leave(self) -> None:
        """Forget everything for good."""
        self.forget()
        for (_, size), pool in self._pools.items():
            self._index.maps[size].leave(pool)
        self._pools.clear()
        self.names.clear()
        self._soon.clear()
        self._later.clear()

    def _dropped(self, gone: Chunk) -> None:
        for pool in gone.l2:
            self._remove_l2(gone, pool)
        for worker in gone.l1:
            self._remove_l1(gone, worker)

    def _hurry(self, chunk: Chunk) -> None:
        chunk.due = None
        self._soon.append(chunk)

    def _schedule(self, chunk: Chunk, due: float) -> None:
        chunk.due = due
        heapq.heappush(self._later, (due, next(self._order), chunk))

    # -- who is who -------------------------------------------------------------------------------------------------

    def workers(self, names: Mapping[str, Sequence[str]], instances: Mapping[str, str]) -> None:
        """Say who there is, a few times a second: costs next to nothing while nothing changes.

        Args:
            names: by worker id, under which names it stands in the index.
            instances: the worker's id by the directory's name of its server.
        """
        self._members = dict(names)
        self._worker_of = dict(instances)
        for (site, size), pool in self._pools.items():
            prefix_map = self._index.maps[size]
            members = [
                placed[1]
                for worker in (self._members if site == _EVERYBODY else (site,))
                for placed in self._places(worker)
                if placed[0] is prefix_map
            ]
            if set(map(id, members)) != set(map(id, pool.members)):
                prefix_map.set_members(pool, members)

    def _places(self, worker: str) -> "Iterable[tuple[PrefixMap, Holder]]":
        for name in self._members.get(worker, ()):
            placed = self._index.placed(name)
            if placed is not None:
                yield placed

    def _stored_in(self, part: "Held") -> frozenset[str]:
        """The pools that hold it."""
        sites = set()
        for each in part.placements:
            if each.tier == "l2":
                if self._shared or each.shared:
                    sites.add(_EVERYBODY)
                elif (worker := self._worker_of.get(each.instance_id)) is not None:
                    sites.add(worker)
        return frozenset(sites)

    def _near(self, part: "Held") -> frozenset[str]:
        """The workers that hold it in l1."""
        return frozenset(
            worker
            for each in part.placements
            if each.tier == "l1" and (worker := self._worker_of.get(each.instance_id)) is not None
        )

    # -- into the map -----------------------------------------------------------------------------------------------

    def _apply(self, chunk: Chunk, l1: frozenset[str], l2: frozenset[str]) -> bool:
        """Bring the map in line with an answer; whether it is another one than before."""
        changed = l1 != chunk.l1 or l2 != chunk.l2
        for site in chunk.l2 - l2:
            self._remove_l2(chunk, site)
        for site in l2:
            self._store_l2(chunk, site)
        chunk.l2 = l2
        missed = set()
        for worker in self._worker_of.values():
            if worker in l1:
                self._store_l1(chunk, worker)
            elif worker in chunk.l1:
                self._remove_l1(chunk, worker)
            elif self._has_l1(chunk, worker):
                # Its events say so. They are sooner than the directory, but it is right if it says no twice.
                if worker in chunk.missed:
                    self._remove_l1(chunk, worker)
                    self.counters.corrected += 1
                else:
                    missed.add(worker)
                    changed = True
        chunk.l1, chunk.missed = l1, frozenset(missed)
        return changed

    def _store_l2(self, chunk: Chunk, site: str) -> None:
        for size, hashes in chunk.blocks.items():
            prefix_map = self._index.maps.get(size)
            if prefix_map is None:
                continue
            pool = self._pools.get((site, size))
            if pool is None:
                pool = self._pools[site, size] = prefix_map.join_pool(f"{self.fleet} l2 {site}".rstrip())
                self.workers(self._members, self._worker_of)
            # What the map has forgotten for want of room is stored again when it is asked about again.
            if Tier.L2 not in prefix_map.tiers(pool, hashes[-1]):
                prefix_map.store(pool, hashes, Tier.L2)

    def _remove_l2(self, chunk: Chunk, site: str) -> None:
        for size, hashes in chunk.blocks.items():
            pool = self._pools.get((site, size))
            if pool is not None:
                self._index.maps[size].remove(pool, hashes, Tier.L2)

    def _store_l1(self, chunk: Chunk, worker: str) -> None:
        for prefix_map, holder in self._places(worker):
            hashes = chunk.blocks.get(prefix_map.block_size)
            if hashes is not None and Tier.L1 not in prefix_map.tiers(holder, hashes[-1]):
                prefix_map.store(holder, hashes, Tier.L1)

    def _remove_l1(self, chunk: Chunk, worker: str) -> None:
        for prefix_map, holder in self._places(worker):
            hashes = chunk.blocks.get(prefix_map.block_size)
            if hashes is not None:
                prefix_map.remove(holder, hashes, Tier.L1)

    def _has_l1(self, chunk: Chunk, worker: str) -> bool:
        return any(
            Tier.L1 in prefix_map.tiers(holder, hashes[-1])
            for prefix_map, holder in self._places(worker)
            if (hashes := chunk.blocks.get(prefix_map.block_size)) is not None
        )


_EVERYBODY: Final = ""
"""The pool of storage that all workers reach."""
