"""A worker's KV memory: the device cache, the tiers below it, and the events that tell of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from backends.profiles.profile import Profile
from simulator.engine.cache import DeviceCache, Link, Tier
from simulator.engine.claims import DEFAULT
from simulator.engine.outputs import BlockKey, Cleared, Output, Removed, Stored, TierName
from simulator.engine.request import ActiveRequest


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request would find and take if it were admitted now.

    Attributes:
        held: leading blocks on the device.
        blocks: blocks that it needs beyond those.
        cached_device, cached_l1, cached_l2: tokens credited, by tier.
        load_time: seconds for bringing in what is not on the device.
    """

    held: int
    blocks: int
    cached_device: int
    cached_l1: int
    cached_l2: int
    load_time: float

    @property
    def cached(self) -> int:
        """Tokens that need no computing."""
        return self.cached_device + self.cached_l1 + self.cached_l2


class KvMemory:
    """Device blocks and tiers of one worker; appends `Stored`, `Removed` and `Cleared` to the outputs it was given.

    Attributes:
        device: the device pool.
        l1, l2: the tiers below; of capacity 0 where the worker has none.
        stored, removed: device blocks so far.
    """

    __slots__ = ("_outputs", "_profile", "_tiered", "device", "l1", "l2", "removed", "stored")

    def __init__(self, profile: Profile, outputs: list[Output], l2: Tier | None = None) -> None:
        self._profile = profile
        self._outputs = outputs
        self.device = DeviceCache(profile.kv_blocks)
        self.l1 = Tier(profile.l1_blocks)
        self.l2 = Tier(profile.l2_blocks) if l2 is None else l2
        self._tiered = bool(self.l1.capacity or self.l2.capacity)
        self.stored = 0
        self.removed = 0

    def plan(self, request: ActiveRequest) -> Admission:
        """What admitting `request` would mean: the device's blocks, and those of the tiers where loading pays.

        The last token is always computed, since its output makes the next one, so a block that holds it is no hit. The
        run of blocks on the device is continued by one in l1, and that by one in l2; of loading nothing, l1, or both,
        the fastest is chosen.
        """
        profile = self._profile
        size = profile.block_size
        tokens, keys = request.target, request.keys
        limit = min((tokens - 1) // size, len(keys))
        held = self.device.held(keys, limit)
        blocks = profile.blocks_for(tokens) - held
        on_device = profile.credit(tokens, held * size)
        best = Admission(held, blocks, on_device, 0, 0, 0.0)
        if not self._tiered:
            return best
        load = request.request.load_tiers
        in_l1 = self.l1.held(keys, held, limit) if load is None or "l1" in load else held
        in_l2 = self.l2.held(keys, in_l1, limit) if load is None or "l2" in load else in_l1
        best_seconds = profile.prefill_seconds(tokens - on_device)
        for end in (in_l1, in_l2):
            credit = profile.credit(tokens, end * size)
            l1_tokens = max(0, min(credit, in_l1 * size) - held * size)
            l2_tokens = max(0, credit - in_l1 * size)
            load_time = profile.load_seconds(l1_tokens, l2_tokens)
            seconds = load_time + profile.prefill_seconds(tokens - credit)
            if seconds < best_seconds:
                best_seconds = seconds
                best = Admission(held, blocks, credit - l1_tokens - l2_tokens, l1_tokens, l2_tokens, load_time)
        return best

    def fits(self, request: ActiveRequest, admission: Admission) -> bool:
        """Whether the blocks of the plan can be had now."""
        return self.device.fits(request.keys, admission.held, admission.blocks)

    def admit(self, request: ActiveRequest, admission: Admission, time: float) -> None:
        """Give `request` the blocks of its plan, which fit."""
        self.device.take(request.keys, admission.held)
        request.shared = admission.held
        if request.request.retention:
            self._retain(request, 0, admission.held)
        self._allocate(admission.blocks, time)
        request.private = admission.blocks

    def grow(self, request: ActiveRequest, time: float) -> bool:
        """Give `request` one more block. False when every block is in use."""
        if not self.device.fits((), 0, 1):
            return False
        self._allocate(1, time)
        request.private += 1
        return True

    def store(self, request: ActiveRequest, time: float) -> None:
        """Cache the blocks that `request` has filled."""
        start, keys = request.shared, request.keys
        full = min(request.computed // self._profile.block_size, len(keys))
        if full <= start:
            return
        first_new = self.device.store(keys, start, full)
        request.private -= full - start
        request.shared = full
        if request.request.retention:
            self._retain(request, start, full)
        if first_new == full:
            return
        parent = keys[first_new - 1] if first_new else None
        new = tuple(keys[first_new:full])
        self.stored += len(new)
        self._outputs.append(Stored(time, new, parent, "device", request.id, first_new))
        if self._tiered and self._profile.offload == "store":
            most = request.request.offload_tokens
            last = full if most is None else min(full, most // self._profile.block_size)
            links: list[Link] = [(keys[index], keys[index - 1] if index else None) for index in range(first_new, last)]
            links.reverse()
            for tier, name in self._tiers():
                added, removed = tier.put(links)
                self._announce(added, name, time, request, first_new)
                self._forget(removed, name, time)

    def release(self, request: ActiveRequest) -> None:
        """Take all blocks from `request`. What it had cached stays cached, without a user."""
        self.device.release(request.keys, request.shared, request.private)
        if self._tiered:
            self.l1.touch(request.keys, request.shared)
            self.l2.touch(request.keys, request.shared)
        request.shared = request.private = 0

    def clear(self, time: float, *, offloaded: bool) -> bool:
        """Empty the device's prefix cache, and the worker's own l1 with `offloaded`. False when blocks are in use."""
        if self.device.in_use:
            return False
        self.device.clear()
        self._outputs.append(Cleared(time))
        if offloaded and (keys := self.l1.clear()):
            self._outputs.append(Removed(time, keys, "l1"))
        return True

    def drop(self, keys: Sequence[BlockKey], tier: TierName, time: float) -> int:
        """Let go of blocks in a tier, those that are pinned excepted. Returns how many went."""
        gone = (self.l1 if tier == "l1" else self.l2).discard(keys)
        self._forget(gone, tier, time)
        return len(gone)

    def arrive_on_device(self, keys: Sequence[BlockKey], first: int, stop: int, time: float) -> int:
        """Cache ``keys[first:stop]``, which have come from elsewhere, as if a request had used the chain up to there.

        They take what is free or worth no more than a block of which nothing was said. Returns up to where there was room.
        """
        device = self.device
        held = device.held(keys, stop)
        if held < first or held == stop:
            return min(max(held, first), stop)
        device.take(keys, held)
        made, evicted = device.spare(stop - held, DEFAULT, time)
        self._evicted(evicted, time)
        last = held + made
        device.store(keys, held, last)
        if made:
            self.stored += made
            parent = keys[held - 1] if held else None
            self._outputs.append(Stored(time, tuple(keys[held:last]), parent, "device", None, None))
        device.release(keys, last, 0)
        return last

    def arrive_in_l1(self, keys: Sequence[BlockKey], first: int, stop: int, time: float) -> None:
        """``keys[first:stop]`` have come to l1."""
        links: list[Link] = [(keys[index], keys[index - 1] if index else None) for index in range(first, stop)]
        links.reverse()
        added, removed = self.l1.put(links)
        # The beginning, which has arrived before, must not leave before what continues it.
        self.l1.touch(keys, stop)
        self._announce(added, "l1", time)
        self._forget(removed, "l1", time)
        if self._profile.offload == "evict" and removed and self.l2.capacity:
            added, removed = self.l2.put(removed)
            self._announce(added, "l2", time)
            self._forget(removed, "l2", time)

    def _retain(self, request: ActiveRequest, start: int, stop: int) -> None:
        """Its keys ``[start, stop)`` are on the device now: they are worth what it says."""
        for part in request.request.retention:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                self.device.claim(request.keys, first, last, part.priority, part.until)

    def _allocate(self, blocks: int, time: float) -> None:
        self._evicted(self.device.allocate(blocks, time), time)

    def _evicted(self, evicted: list[Link], time: float) -> None:
        """Tell of it, and copy it down where that is done on eviction."""
        if not evicted:
            return
        self.removed += len(evicted)
        self._forget(evicted, "device", time)
        if self._tiered and self._profile.offload == "evict":
            moving = evicted
            for tier, name in self._tiers():
                added, moving = tier.put(moving)
                self._announce(added, name, time)
                self._forget(moving, name, time)

    def _tiers(self) -> list[tuple[Tier, TierName]]:
        """The tiers that exist, fastest first."""
        tiers: list[tuple[Tier, TierName]] = [(self.l1, "l1"), (self.l2, "l2")]
        return [(tier, name) for tier, name in tiers if tier.capacity]

    def _announce(
        self, links: Sequence[Link], tier: TierName, time: float, request: ActiveRequest | None = None, first: int = 0
    ) -> None:
        """Tell that blocks, given leaf first, came into a tier: one event for each chain among them."""
        chain: list[BlockKey] = []
        parent: BlockKey | None = None
        for key, before in reversed(links):
            if chain and before != chain[-1]:
                self._announce_chain(chain, parent, tier, time, request, first)
                chain = []
            if not chain:
                parent = before
            chain.append(key)
        if chain:
            self._announce_chain(chain, parent, tier, time, request, first)

    def _announce_chain(
        self,
        chain: Sequence[BlockKey],
        parent: BlockKey | None,
        tier: TierName,
        time: float,
        request: ActiveRequest | None,
        first: int,
    ) -> None:
        if request is None:
            self._outputs.append(Stored(time, tuple(chain), parent, tier, None, None))
        else:
            index = request.keys.index(chain[0], first)
            self._outputs.append(Stored(time, tuple(chain), parent, tier, request.id, index))

    def _forget(self, links: Sequence[Link], tier: TierName, time: float) -> None:
        if links:
            self._outputs.append(Removed(time, tuple(key for key, _ in links), tier))
