"""What one worker says it holds, translated into the gateway's own hashes and put into the prefix map.

A worker names blocks by its own hashes, which depend on its version, its settings and often on a random seed. `Stored` brings
the token ids as well, so its blocks are hashed again with our function behind the parent that the event names; the worker's
hash is kept only to understand which block a later `Removed`, or a later child, refers to.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.prefix.events import FULL_ATTENTION, Batch, Cleared, Event, Removed, Stored
from gateway.prefix.holders import Holder, Tier
from gateway.prefix.map import PrefixMap
from gateway.prefix.orphans import Orphans
from gateway.prompt.blocks import TOKEN_BYTES, Hasher

MAX_BLOCKS = 2_000_000
"""Blocks that one worker may claim to hold; beyond that the oldest are forgotten. (2 M blocks of 16 tokens: 32 M tokens.)"""
MAX_DEPARTED = 32_768
"""Blocks no longer held whose hashes are still known: LMCache names parents that it has dropped itself."""

MEMORY_TIERS = (Tier.DEVICE, Tier.L1, Tier.L2)

Ours = int | tuple[int, ...]
"""Our hash of a worker's block, or several when its blocks are a multiple of the map's."""


@dataclass(slots=True)
class MirrorCounters:
    """What became of the events, in blocks unless said otherwise."""

    stored: int = 0
    removed: int = 0
    removed_unknown: int = 0
    """Removals of blocks that we did not know; normal after a late start."""
    cleared: int = 0
    """AllBlocksCleared events."""
    orphaned: int = 0
    """Stored behind an unknown parent; kept until the parent comes."""
    adopted: int = 0
    """Orphans whose parent came."""
    lost_orphans: int = 0
    """Orphans given up."""
    other_group: int = 0
    """Of KV cache groups that say nothing about prefixes, or of further groups of a hybrid model."""
    other_block_size: int = 0
    misaligned: int = 0
    """Token ids and hashes that do not fit together."""
    unresolved: int = 0
    """Named by hash only, and unknown."""
    overflowed: int = 0
    """Forgotten because the worker claims to hold more than `MAX_BLOCKS`."""


class Mirror:
    """One worker (one data-parallel rank) as its events show it.

    Attributes:
        worker: its id.
        holder: the worker in its map; None until its block size is known.
        map: the map of its block size; None until that is known.
        counters: what became of the events.
        problems: what the decoder left out, by name.
    """

    def __init__(
        self,
        worker: str,
        model: str,
        hasher: Hasher,
        maps: Callable[[int], PrefixMap],
        *,
        block_size: int | None = None,
        ttl: Mapping[Tier, float] | None = None,
        count_copies: bool = True,
        clears: Collection[Tier] = (Tier.DEVICE,),
        pool: Callable[[PrefixMap, Holder], Holder] | None = None,
        write_through: bool = False,
        max_blocks: int = MAX_BLOCKS,
        watched: Callable[[Stored, Sequence[int], int], None] | None = None,
    ) -> None:
        """Nothing is known yet.

        Args:
            worker: id.
            model: the namespace of its blocks, as used for prompts.
            hasher: the one that prompts are hashed with.
            maps: gives the map for a block size.
            block_size: tokens per block where known; otherwise learned from the first device event.
            ttl: seconds after which a tier's blocks are forgotten, for tiers whose removals nobody reports.
            count_copies: an engine may compute the same block twice and then reports two removals; the block is gone after
                the second. To be switched off for workers that announce blocks again without a new copy.
            clears: the tiers that AllBlocksCleared empties. vLLM resets the device only; LMCache's own feed its l1.
            pool: makes the worker a member of the shared memory that its l2 events are about, and returns that.
            write_through: what is stored in l1 is written to l2 as well, without an event; needs a `ttl` for l2.
            max_blocks: see `MAX_BLOCKS`.
            watched: told of what is stored in l1 with its tokens: the event, our hashes, and the map's block size.

        Raises:
            ValueError: `write_through` without a `ttl` for l2: nothing would ever end what was put there.
        """
        if write_through and Tier.L2 not in (ttl or {}):
            raise ValueError("write_through needs a ttl for l2")
        self.worker = worker
        self.model = model
        self.holder: Holder | None = None
        self.map: PrefixMap | None = None
        self.counters = MirrorCounters()
        self.problems: dict[str, int] = {}
        self._hasher = hasher
        self._maps = maps
        self._ttl = dict(ttl or {})
        self._count_copies = count_copies
        self._clears = tuple(clears)
        self._pool_of = pool
        self._pool: Holder | None = None
        self._write_through = write_through
        self._max_blocks = max_blocks
        self._watched = watched
        self._guessed = False  # the block size comes from a slower tier
        self._known: tuple[dict[int, Ours], ...]  # by tier, our hashes by the worker's
        self._departed: dict[int, Ours]
        self._copies: dict[int, int]  # of blocks that are on the device more than once, how often more
        self._orphans: Orphans
        self._group: int | None
        self._reset()
        if block_size is not None:
            self._bind(block_size)

    @property
    def block_size(self) -> int | None:
        """Tokens per block, where known."""
        return None if self.map is None else self.map.block_size

    @property
    def orphans(self) -> int:
        """Blocks that wait for their parent. Staying above 0 means that events were missed and a replay is wanted."""
        return self._orphans.blocks

    def blocks(self, tier: Tier) -> int:
        """How many of the worker's blocks are known to be in a tier (those with a time limit are not counted)."""
        return len(self._known[tier])

    def apply(self, batch: Batch, now: float) -> None:
        """Take one batch in. Never raises for what a worker may send."""
        for name, count in batch.problems.items():
            self.problems[name] = self.problems.get(name, 0) + count
        run: list[Removed] = []
        for event in batch.events:
            if type(event) is Removed:
                # Engines report removals one by one; a run of them is done in one go.
                if run and run[-1].tier is not event.tier:
                    self._remove(run)
                    run = []
                run.append(event)
                continue
            if run:
                self._remove(run)
                run = []
            self._apply(event, now)
        if run:
            self._remove(run)

    def forget(self) -> None:
        """The worker was restarted, or events were lost: nothing is known of it any more."""
        if self.map is not None and self.holder is not None:
            self._leave_pool()
            self.map.clear(self.holder)
        self._reset()

    def leave(self) -> None:
        """The worker is gone for good."""
        if self.map is not None and self.holder is not None:
            self._leave_pool()
            self.map.leave(self.holder)
        self.holder = self.map = self._pool = None
        self._reset()

    def _reset(self) -> None:
        self._known = ({}, {}, {})
        self._departed = {}
        self._copies = {}
        self._orphans = Orphans()
        self._group = None

    def _leave_pool(self) -> None:
        """Take back from the pool what this worker put there without a time limit: its removal would not be understood."""
        if self._pool is not None and self.map is not None:
            self.map.remove(self._pool, _flat(self._known[Tier.L2].values()), Tier.L2)

    def _bind(self, block_size: int) -> None:
        self.map = self._maps(block_size)
        self.holder = self.map.join(self.worker)
        self._pool = None if self._pool_of is None else self._pool_of(self.map, self.holder)

    def _apply(self, event: Event, now: float) -> None:
        if type(event) is Stored:
            self._store(event, now)
        elif type(event) is Cleared:
            self._clear()

    def _store(self, event: Stored, now: float) -> None:
        count = len(event.hashes)
        counters = self.counters
        if event.kind not in FULL_ATTENTION or not self._own_group(event.group, learn=True):
            counters.other_group += count
            return
        if not count:
            return
        if not event.tokens or not event.block_size:
            self._store_by_hash(event, now)
            return
        if not self._fits(event):
            counters.other_block_size += count
            return
        if len(event.tokens) != count * event.block_size * TOKEN_BYTES:
            counters.misaligned += count
            return
        if not self._place(event, now):
            counters.orphaned += count
            counters.lost_orphans += self._orphans.add(event)
        elif self._orphans.blocks:
            self._adopt(event.hashes, now)

    def _adopt(self, hashes: Sequence[int], now: float) -> None:
        """Place the orphans whose parent is among these blocks, and theirs."""
        waiting = self._orphans.adopt(hashes)
        while waiting:
            event, removed = waiting.pop()
            self._place(event, now)
            self.counters.adopted += len(event.hashes)
            waiting += self._orphans.adopt(event.hashes)
            if removed:
                self._remove([Removed(removed, event.tier, event.group)])

    def _place(self, event: Stored, now: float) -> bool:
        """Put the blocks into the map; False when their parent is unknown."""
        assert self.map is not None
        size = self.map.block_size
        salt, others = _extra_keys(event)
        if event.parent is None:
            parent = self._hasher.root(self.model, event.lora, salt)
        else:
            before = self._find(event.parent, event.tier)
            if before is None:
                return False
            parent = before if isinstance(before, int) else before[-1]
        if others:
            ours = self._distinct(parent, event, size, others)
        else:
            ours = self._hasher.blocks(parent, event.tokens, size)
        self._put(event.tier, ours, now)
        self.counters.stored += len(event.hashes)
        multiple = event.block_size // size
        values: Sequence[Ours] = ours
        if multiple > 1:
            values = [tuple(ours[start : start + multiple]) for start in range(0, len(ours), multiple)]
        self._learn(event.tier, event.hashes, values)
        if self._watched is not None and event.tier is Tier.L1 and not others:
            self._watched(event, ours, size)
        return True

    def _distinct(self, parent: int, event: Stored, size: int, others: Mapping[int, bytes]) -> list[int]:
        """Hashes of blocks of which some differ by more than their tokens, e.g. by an image."""
        ours: list[int] = []
        step = event.block_size * TOKEN_BYTES
        for index in range(len(event.hashes)):
            if index in others:
                parent = self._hasher.branch(parent, others[index])
            ours += self._hasher.blocks(parent, event.tokens[index * step : (index + 1) * step], size)
            parent = ours[-1]
        return ours

    def _store_by_hash(self, event: Stored, now: float) -> None:
        """Only hashes came (offload connectors): good for blocks that are known from another tier."""
        for engine_hash in event.hashes:
            ours = self._find(engine_hash, event.tier)
            if ours is None or self.map is None:
                self.counters.unresolved += 1
                continue
            self._put(event.tier, _flat((ours,)), now)
            self._learn(event.tier, [engine_hash], [ours])
            self.counters.stored += 1

    def _put(self, tier: Tier, ours: Sequence[int], now: float) -> None:
        assert self.map is not None
        assert self.holder is not None
        holder = self._pool if tier is Tier.L2 and self._pool is not None else self.holder
        ttl = self._ttl.get(tier)
        self.map.store(holder, ours, tier, expires=None if ttl is None else now + ttl)
        if self._write_through and tier is Tier.L1:
            self._put(Tier.L2, ours, now)

    def _learn(self, tier: Tier, hashes: Sequence[int], ours: Sequence[Ours]) -> None:
        """Remember which of our blocks the worker's hashes mean."""
        if tier in self._ttl:
            self._departed.update(zip(hashes, ours, strict=True))
            self._trim_departed()
            return
        known = self._known[tier]
        if tier is Tier.DEVICE and self._count_copies and not known.keys().isdisjoint(hashes):
            for engine_hash in hashes:
                if engine_hash in known:
                    self._copies[engine_hash] = self._copies.get(engine_hash, 0) + 1
        known.update(zip(hashes, ours, strict=True))
        if len(known) > self._max_blocks:
            victims = list(itertools.islice(known, len(known) - self._max_blocks + self._max_blocks // 64))
            for each in victims:
                self._copies.pop(each, None)
            self._remove([Removed(victims, tier)])
            self.counters.removed -= len(victims)
            self.counters.overflowed += len(victims)

    def _remove(self, events: Iterable[Removed]) -> None:
        """Take blocks out of one tier, the same for all events."""
        ours: list[Ours] = []
        tier = Tier.DEVICE
        unknown = 0
        for event in events:
            if not self._own_group(event.group, learn=False):
                self.counters.other_group += len(event.hashes)
                continue
            tier = event.tier
            known = self._known[tier]
            copies = self._copies if tier is Tier.DEVICE else {}
            for engine_hash in event.hashes:
                if engine_hash in copies:
                    if copies[engine_hash] == 1:
                        del copies[engine_hash]
                    else:
                        copies[engine_hash] -= 1
                    continue
                found = known.pop(engine_hash, None)
                if found is None:
                    found = self._departed.get(engine_hash) if tier in self._ttl else None
                if found is None:
                    unknown += 1
                    if self._orphans.blocks:
                        self._orphans.remove(tier, engine_hash)
                    continue
                self._departed[engine_hash] = found
                ours.append(found)
        self.counters.removed += len(ours)
        self.counters.removed_unknown += unknown
        if ours and self.map is not None and self.holder is not None:
            holder = self._pool if tier is Tier.L2 and self._pool is not None else self.holder
            self.map.remove(holder, _flat(ours), tier)
            self._trim_departed()

    def _clear(self) -> None:
        self.counters.cleared += 1
        self._orphans = Orphans()
        if self.map is None or self.holder is None:
            return
        kept = [tier for tier in MEMORY_TIERS if tier not in self._clears and not (tier is Tier.L2 and self._pool)]
        if not any(tier in self._ttl or self._known[tier] for tier in kept):
            self.map.clear(self.holder)
        else:
            # Something stays, so the rest goes block by block.
            for tier in self._clears:
                self.map.remove(self.holder, _flat(self._known[tier].values()), tier)
        for tier in self._clears:
            self._known[tier].clear()
        if Tier.DEVICE in self._clears:
            self._copies.clear()

    def _find(self, engine_hash: int, tier: Tier) -> Ours | None:
        """Our hash of a worker's block, in its own tier, another one, or among those no longer held."""
        found = self._known[tier].get(engine_hash)
        if found is None:
            for known in (*self._known, self._departed):
                found = known.get(engine_hash)
                if found is not None:
                    break
        return found

    def _fits(self, event: Stored) -> bool:
        """Whether the event's blocks are ours or a multiple of them; learns the block size from the first event."""
        if self._guessed and event.tier is Tier.DEVICE and event.block_size != self.block_size:
            # The size came from a slower tier, whose chunks may be longer than the engine's blocks.
            self.leave()
        if self.map is None:
            self._bind(event.block_size)
            self._guessed = event.tier is not Tier.DEVICE
        elif event.tier is Tier.DEVICE:
            self._guessed = False
        assert self.map is not None
        if event.tier is Tier.DEVICE:
            return event.block_size == self.map.block_size
        return event.block_size % self.map.block_size == 0

    def _own_group(self, group: int | None, *, learn: bool) -> bool:
        """Of a hybrid model's groups the first one with full attention is followed."""
        if group is None or group == self._group:
            return True
        if self._group is None and learn:
            self._group = group
            return True
        return self._group is None

    def _trim_departed(self) -> None:
        if len(self._departed) > MAX_DEPARTED:
            for each in list(itertools.islice(self._departed, len(self._departed) - MAX_DEPARTED * 7 // 8)):
                del self._departed[each]


def _flat(ours: Collection[Ours]) -> Sequence[int]:
    """Our hashes, those of multiples unpacked."""
    flat: list[int] = []
    for each in ours:
        if isinstance(each, int):
            flat.append(each)
        else:
            flat += each
    return flat


def _extra_keys(event: Stored) -> tuple[str | None, dict[int, bytes]]:
    """Split what vLLM mixes into its hashes besides tokens: LoRA name, images, salt, prompt embeddings, in this order.

    Returns:
        The salt, which only a prompt's first block carries (its children inherit it through their parent), and per block
        whatever else there is apart from the LoRA name.
    """
    salt: str | None = None
    others: dict[int, bytes] = {}
    for index, keys in enumerate(event.extra_keys):
        if not keys or index >= len(event.hashes):
            continue
        rest: list[Any] = list(keys) if isinstance(keys, list | tuple) else [keys]
        if event.lora is not None and (rest[0] == event.lora or type(rest[0]) is int):
            del rest[0]
        if index == 0 and event.parent is None:
            texts = [place for place, each in enumerate(rest) if isinstance(each, str)]
            if texts:
                salt = rest.pop(texts[-1])
        if rest:
            others[index] = repr(rest).encode()
    return salt, others
