"""The prefix map: block hash to who holds the block, and how much of a prompt each worker holds.

**What a match is.** A worker's *run* in a set of tiers is the number of leading blocks of the prompt, without a gap, that it
holds in at least one of those tiers. With d, e, f and g the runs in {device}, {device, l1}, {device, l1, l2} and
{device, l1, l2, expected}: d blocks count as device, e - d as l1, f - e as l2 and g - f as expected. d <= e <= f <= g. An l2
that several workers share is a pool, and a block in it counts for each of its members.

**How it is found.** `HolderSet.reach` has a bit for each (worker, one of those four sets of tiers), so a run is the number of
leading blocks with that bit, for all workers at once. Walking 512 blocks costs about 20 us; instead the chain is bisected:
where two blocks are held by the same workers, so are those between. That is exact as long as a holder of a block holds the
blocks before it. It may fail in two ways, and neither gives a wrong answer to anybody:

* *device, expected*: an engine evicts the end of a prefix before its beginning (vLLM frees a request's blocks last one first,
  SGLang evicts leaves), so a gap means that an event was lost, or that this map itself evicted the block from its own memory
  while the worker still holds it (then looking over the gap gives the better answer). Only the second bound matters: a match is
  never longer than the deepest held block that was looked at, and an over-estimate sends a request to a worker that then
  computes the gap and announces it, which closes it. A gap is paid for at most once.
* *l1, l2*: an LRU of chunks may well drop the beginning first. In a map that has ever been told of l1 or l2, where a worker's
  run goes on beyond its device memory, the blocks from there on are walked one by one, and the answer is exact.

**Forgetting.** `clear` gives a worker another slot: its old bits mean nobody from then on and `sweep` takes them out later.
Time is passed in. No I/O.
"""

import heapq
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.prefix.holders import PLANES, SLOT, Holder, HolderSet, SetTable, Tier, Transition
from gateway.prefix.matches import Matches

if TYPE_CHECKING:
    from policies.base import Match

EXPECTED_SECONDS = 2.0
"""How long a worker has to confirm what it was sent, from the first byte of its answer on."""
DEFAULT_BUDGET = 512 * 1024 * 1024
"""Bytes that one map may take."""
BLOCK_BYTES = 152
"""The most that one block can take: its hash (32), and its entry in a dict that has just grown after many deletions (120)."""
DEADLINE_BYTES = 200
"""The same for a holding that ends by itself: its hash and entry in a dict, and its place in the list that the heap holds."""
MAX_TRANSITIONS = 65_536
"""Cached steps from one holder set to another; more are forgotten and found again."""

_UNSEEN = HolderSet(0, 0)
"""Stands for a set that is not known and equals no block's."""


@dataclass(slots=True)
class MapCounters:
    """What happened, in blocks unless said otherwise."""

    stored: int = 0
    removed: int = 0
    removed_unknown: int = 0
    """Removals of blocks that the map did not know."""
    evicted: int = 0
    """Forgotten because of the budget."""
    expired: int = 0
    clears: int = 0
    """Holders cleared or left."""


class Expectation:
    """What one worker will hold because of one request, as long as that is not answered."""

    __slots__ = ("_generation", "_hashes", "_holder", "_map")

    def __init__(self, prefix_map: "PrefixMap", holder: Holder, hashes: Sequence[int]) -> None:
        self._map = prefix_map
        self._holder = holder
        self._generation = holder.generation
        self._hashes = hashes

    def settle(self, now: float) -> None:
        """The answer has begun, or the request has ended without one. To be called once."""
        if self._hashes and self._generation == self._holder.generation:
            self._map.settle(self._holder, self._hashes, now)


class PrefixMap:
    """Which worker holds which block, for all workers with one block size."""

    def __init__(self, block_size: int, *, budget: int = DEFAULT_BUDGET) -> None:
        """`budget`: bytes; three quarters for blocks, an eighth each for holder sets and for deadlines."""
        self.block_size = block_size
        self.budget = budget
        self.counters = MapCounters()
        self._blocks: dict[int, HolderSet] = {}
        self._table = SetTable()
        self._holders: list[Holder | None] = []  # by slot
        self._spelled: dict[tuple[tuple[int, int], ...], Mapping[str, Match]] = {}  # see `Matches.held`
        self._pools: list[Holder] = []
        self._reachable = 0  # all bits of workers' slots; pools are seen through their members
        self._tiered = False  # whether anything was ever stored below the device
        self._free: list[int] = []
        self._dead: set[int] = set()
        self._sweeping: set[int] = set()
        self._sweep_keys: list[int] = []
        self._strip = Transition(self._table)
        self._deadlines: list[tuple[float, int, Holder, int, Tier, Sequence[int]]] = []
        self._deadline_count = 0  # hashes in that heap
        self._order = itertools.count()
        self._checked = 0  # `SetTable.transitions` at the last `_make_room`
        self._max_blocks = max(1, budget * 3 // 4 // BLOCK_BYTES)
        self._max_deadlines = max(1, budget // 8 // DEADLINE_BYTES)
        self._max_set_bytes = budget // 8

    def __len__(self) -> int:
        """Blocks known, those that only a cleared holder held and that were not swept yet included."""
        return len(self._blocks)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    @property
    def bytes(self) -> int:
        """Memory taken: dict and hashes exactly, holder sets and deadlines by an upper estimate. At most `budget`."""
        blocks = sys.getsizeof(self._blocks) + 32 * len(self._blocks)
        return blocks + self._table.bytes + self._deadline_count * DEADLINE_BYTES

    @property
    def workers(self) -> int:
        """Workers that have joined and not left."""
        return sum(holder is not None for holder in self._holders)

    @property
    def has_workers(self) -> bool:
        """Whether `workers` is above 0, without counting them: asked for every request."""
        return bool(self._reachable)

    @property
    def sets(self) -> int:
        """Distinct holder sets."""
        return len(self._table)

    # -- who --------------------------------------------------------------------------------------------------------

    def join(self, name: str, *, source: str = "event") -> Holder:
        """A worker that holds nothing yet. `source`: ``event`` or ``history``."""
        holder = Holder(name, source, is_pool=False)
        self._place(holder)
        return holder

    def join_pool(self, name: str, members: Iterable[Holder] = ()) -> Holder:
        """A memory that several workers can load from; what it holds in l2 counts for every member."""
        pool = Holder(name, "event", is_pool=True)
        self._place(pool)
        self._pools.append(pool)
        self.set_members(pool, members)
        return pool

    def set_members(self, pool: Holder, members: Iterable[Holder]) -> None:
        """Say who can load from `pool`. Costs one look at each distinct holder set."""
        pool.members = tuple(members)
        self._share(pool)

    def clear(self, holder: Holder) -> None:
        """Forget all that a worker or pool holds, in every tier, at a cost that does not depend on how much that is.

        (A member of a pool costs one look at each distinct holder set.)
        """
        self._displace(holder)
        self._place(holder)
        if holder.is_pool:
            self._share(holder)
        for pool in self._pools:
            if holder in pool.members:
                self._share(pool)

    def leave(self, holder: Holder) -> None:
        """Forget a worker or pool for good."""
        self._displace(holder)
        if holder.is_pool:
            self._pools.remove(holder)
        for pool in self._pools:
            if holder in pool.members:
                self.set_members(pool, [each for each in pool.members if each is not holder])

    # -- what -------------------------------------------------------------------------------------------------------

    def store(
        self, holder: Holder, hashes: Sequence[int], tier: Tier = Tier.DEVICE, *, expires: float | None = None
    ) -> None:
        """`holder` has these blocks in `tier`; on the device that also confirms what was expected there.

        Args:
            holder: of this map.
            hashes: consecutive blocks of a chain, first one first.
            tier: where.
            expires: when to forget it again (`expire`), for memories whose removals nobody reports. Storing again with a
                later time prolongs, without one makes permanent.
        """
        blocks = self._blocks
        if len(blocks) + len(hashes) > self._max_blocks or self._table.transitions != self._checked:
            hashes = hashes[: self._max_blocks]
            self._make_room(len(hashes))
        # Last block first: the dict keeps that order, eviction starts with the oldest, and the end of a chain is worth less.
        backward = hashes[::-1]
        # All in C: look the old set up, step to the new one, put it in place (measured: bench/prefix.py).
        blocks.update(zip(backward, map(holder.add[tier].__getitem__, map(blocks.get, backward)), strict=True))  # type: ignore[arg-type]
        self.counters.stored += len(hashes)
        if tier in (Tier.L1, Tier.L2):
            self._tiered = True
        if expires is not None:
            self._expire_at(holder, hashes, tier, expires)
        elif holder.deadlines[tier]:
            self._make_permanent(holder, hashes, tier)

    def expect(self, holder: Holder, hashes: Sequence[int]) -> "Expectation":
        """`holder` was sent a prompt with these blocks: believe that it has them until it had the time to say so.

        A request may wait for its prefill for long, and while it does its siblings are better off behind it than anywhere else. So the
        belief lasts as long as the request is unanswered; whoever holds the `Expectation` says when it no longer is.
        (A fixed time instead, 2 s, let siblings of waiting prompts scatter, and a thrashing fleet thrash: docs/adr/0010.)
        Give the blocks that it does not hold yet: believing costs something for each of them.
        """
        self.store(holder, hashes, Tier.EXPECTED)
        return Expectation(self, holder, hashes)

    def settle(self, holder: Holder, hashes: Sequence[int], now: float) -> None:
        """What was expected here must be confirmed from now on within `EXPECTED_SECONDS`."""
        bit = 1 << PLANES * holder.slot + Tier.EXPECTED
        # Sets are interned: among thousands of blocks there are a few distinct ones.
        if any(held is not None and held.raw & bit for held in set(map(self._blocks.get, hashes))):
            self._expire_at(holder, hashes, Tier.EXPECTED, now + EXPECTED_SECONDS)

    def remove(self, holder: Holder, hashes: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """`holder` no longer has these blocks in `tier`; what it holds in other tiers stays."""
        blocks = self._blocks
        get = blocks.get
        transition = holder.drop[tier]
        removed = unknown = 0
        for block_hash in hashes:
            old = get(block_hash)
            if old is None:
                unknown += 1
                continue
            new = transition[old]
            if new is None:
                del blocks[block_hash]
            elif new is not old:
                blocks[block_hash] = new
            removed += 1
        self.counters.removed += removed
        self.counters.removed_unknown += unknown

    def tiers(self, holder: Holder, block_hash: int) -> set[Tier]:
        """Where `holder` has one block."""
        held = self._blocks.get(block_hash)
        if held is None or holder.slot < 0:
            return set()
        return {tier for tier in Tier if held.raw >> PLANES * holder.slot & 1 << tier}

    def touch(self, hashes: Sequence[int], blocks: int) -> None:
        """The first `blocks` of `hashes` were of use: evict them later. Does nothing unless the map is nearly full."""
        if len(self._blocks) * 8 < self._max_blocks * 7:
            return
        pop = self._blocks.pop
        for block_hash in reversed(hashes[:blocks]):
            held = pop(block_hash, None)
            if held is not None:
                self._blocks[block_hash] = held

    # -- look-up ----------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[int], blocks: int | None = None) -> Matches:
        """How much of a prompt each worker holds.

        Args:
            hashes: the prompt's chain.
            blocks: look at that many leading blocks only (`Chain.hittable`).
        """
        count = len(hashes) if blocks is None else min(blocks, len(hashes))
        steps: list[tuple[int, int]] = []
        get = self._blocks.get
        if count <= 0 or (held := get(hashes[0])) is None or not (mask := held.reach & self._reachable):
            return Matches(self.block_size, steps, self._holders, self._spelled)
        tiered = self._tiered
        if tiered and self._beyond_device(mask):
            self._walk(hashes, count, 0, mask, steps)
            return Matches(self.block_size, steps, self._holders, self._spelled)
        # `mask` holds block `low` and those before it; block `high` is held by `seen`, a part of `mask`. Behind the end
        # nobody holds anything; `ahead` are blocks looked at further right, nearest last.
        low, high = 0, count
        seen = 0
        at_low: HolderSet | None = held
        at_high: HolderSet | None = None
        ahead: list[tuple[int, int]] = []
        middle = count - 1
        while True:
            # Find the first block that somebody drops out at, remembering what was seen on the way.
            while high - low > 1:
                held = get(hashes[middle])
                # Most blocks are held by the very set seen at `low` or at `high`: then nothing needs computing.
                if held is at_low:
                    low = middle
                elif held is at_high:
                    high = middle
                else:
                    there = 0 if held is None else held.reach & mask
                    if there == mask:
                        low = middle
                        at_low = held
                    else:
                        if there != seen:
                            ahead.append((high, seen))
                            seen = there
                        high = middle
                        at_high = held
                middle = (low + high) >> 1
            steps.append((high, mask))
            if not seen:
                break
            if tiered and self._beyond_device(seen):
                self._walk(hashes, count, high, seen, steps)
                break
            mask = seen
            at_low = at_high
            while True:
                low = high
                high, seen = ahead.pop()
                seen &= mask
                if seen != mask:
                    break
            at_high = _UNSEEN if seen else None
            middle = (low + high) >> 1
        return Matches(self.block_size, steps, self._holders, self._spelled)

    def _beyond_device(self, mask: int) -> bool:
        """Whether a run goes on in another tier where the worker's device run has ended."""
        return mask != (mask & self._table.ones) * SLOT

    def _walk(self, hashes: Sequence[int], count: int, low: int, mask: int, steps: list[tuple[int, int]]) -> None:
        """Go on from block `low`, held by `mask`, one block at a time."""
        get = self._blocks.get
        last: HolderSet | None = None
        for depth in range(low + 1, count):
            held = get(hashes[depth])
            if held is last and held is not None:
                continue
            last = held
            seen = 0 if held is None else held.reach & mask
            if seen != mask:
                steps.append((depth, mask))
                mask = seen
                if not mask:
                    return
        steps.append((count, mask))

    # -- forgetting -------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> int:
        """Forget holdings whose time has come; returns how many. Call it every few hundred milliseconds."""
        expired = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            expired += self._expire_first(now)
        return expired

    def sweep(self, limit: int = 2000) -> int:
        """Take cleared holders' bits out of up to `limit` blocks; returns how many are left to look at in this round.

        Until it is called, what was cleared costs memory, nothing else. Call it now and then while `unswept`.
        """
        if not self._sweep_keys:
            if not self._dead:
                return 0
            self._sweeping, self._dead = self._dead, set()
            self._sweep_keys = list(self._blocks)
            self._strip = Transition(self._table)
        blocks, keys, strip = self._blocks, self._sweep_keys, self._strip
        for block_hash in keys[-limit:]:
            old = blocks.get(block_hash)
            if old is not None:
                new = strip[old]
                if new is None:
                    del blocks[block_hash]
                elif new is not old:
                    blocks[block_hash] = new
        del keys[-limit:]
        if not keys:
            # Cached steps may drop a slot's bits as dead: forget them before the slot is used again.
            self._forget_transitions()
            self._free.extend(self._sweeping)
            self._sweeping = set()
        return len(keys)

    @property
    def unswept(self) -> bool:
        """Whether `sweep` has something to do."""
        return bool(self._dead or self._sweeping)

    def _place(self, holder: Holder) -> None:
        self._spelled.clear()
        if self._free:
            slot = self._free.pop()
            self._holders[slot] = None if holder.is_pool else holder
        else:
            slot = len(self._holders)
            self._holders.append(None if holder.is_pool else holder)
            self._table.widen(slot + 1)
        holder.place(self._table, slot)
        self._table.live |= holder.bits
        if not holder.is_pool:
            self._reachable |= holder.bits

    def _displace(self, holder: Holder) -> None:
        self._spelled.clear()
        self._table.live &= ~holder.bits
        self._reachable &= ~holder.bits
        self._holders[holder.slot] = None
        if holder.is_pool:
            self._table.unshare(holder.slot)
        self._dead.add(holder.slot)
        holder.displace()
        self.counters.clears += 1

    def _share(self, pool: Holder) -> None:
        self._table.share(pool.slot, [member.slot for member in pool.members if member.slot >= 0])

    def _expire_at(self, holder: Holder, hashes: Sequence[int], tier: Tier, expires: float) -> None:
        deadlines = holder.deadlines[tier]
        for block_hash in hashes:
            deadlines[block_hash] = max(expires, deadlines.get(block_hash, expires))
        self._deadline_count += len(hashes)
        heapq.heappush(self._deadlines, (expires, next(self._order), holder, holder.generation, tier, hashes))
        while self._deadline_count > self._max_deadlines and self._deadlines:
            self._expire_first(self._deadlines[0][0])

    def _make_permanent(self, holder: Holder, hashes: Sequence[int], tier: Tier) -> None:
        deadlines = holder.deadlines[tier]
        for block_hash in hashes:
            deadlines.pop(block_hash, None)

    def _expire_first(self, now: float) -> int:
        _, _, holder, generation, tier, hashes = heapq.heappop(self._deadlines)
        self._deadline_count -= len(hashes)
        if generation != holder.generation:
            return 0
        deadlines = holder.deadlines[tier]
        due = [block_hash for block_hash in dict.fromkeys(hashes) if deadlines.get(block_hash, now + 1) <= now]
        for block_hash in due:
            del deadlines[block_hash]
        bit = 1 << PLANES * holder.slot + tier
        get = self._blocks.get
        held = [block_hash for block_hash in due if (there := get(block_hash)) is not None and there.raw & bit]
        removed, unknown = self.counters.removed, self.counters.removed_unknown
        self.remove(holder, held, tier)
        self.counters.removed, self.counters.removed_unknown = removed, unknown
        self.counters.expired += len(held)
        return len(held)

    def _make_room(self, count: int) -> None:
        """Evict until `count` more blocks fit the budget, oldest first, a sixty-fourth more than needed at a time."""
        table = self._table
        if table.transitions > MAX_TRANSITIONS or table.bytes > self._max_set_bytes:
            self._forget_transitions()  # they keep sets that no block needs any more
        blocks = self._blocks
        while blocks and (len(blocks) + count > self._max_blocks or table.bytes > self._max_set_bytes):
            self._forget_transitions()
            surplus = max(0, len(blocks) + count - self._max_blocks) + max(1, self._max_blocks // 64)
            # Taking many at once matters: finding a dict's first key walks over all that were deleted before it.
            victims = list(itertools.islice(blocks, surplus))
            for block_hash in victims:
                del blocks[block_hash]
            self.counters.evicted += len(victims)
        self._checked = table.transitions

    def _forget_transitions(self) -> None:
        for holder in (*self._holders, *self._pools):
            if holder is not None:
                holder.forget_transitions()
        self._strip.clear()
        self._table.transitions = 0
