"""Who holds a block: sets of (worker, tier), interned, as bit masks.

Each worker (or shared pool) has a *slot*, and each slot has four bits, one per `Tier`. Printed in hexadecimal a mask reads as
one digit per worker. Thousands of blocks are held by the same few sets, so each distinct set exists once and blocks point at
it; adding or taking away a holder is then one look-up from the old set to the new one (`Transition`).
"""

import enum
import sys
from collections.abc import Iterable
from weakref import WeakValueDictionary

PLANES = 4
"""Bits per slot."""
SLOT = (1 << PLANES) - 1
"""All bits of slot 0."""
SET_OVERHEAD = 320
"""Bytes of a set besides its two masks: the object, its weak reference and its entry in the table (tests/prefix measure it)."""


class Tier(enum.IntEnum):
    """Where a block is, fastest first. `EXPECTED` is no memory: it marks what a worker was sent and has not confirmed."""

    DEVICE = 0
    L1 = 1
    L2 = 2
    EXPECTED = 3


class HolderSet:
    """One distinct set of holders.

    Attributes:
        raw: a bit per (slot, tier) that holds the block.
        reach: a bit per (slot, tier) for which the block is held in that tier *or a faster one*, a pool's members
            included. A run of blocks in any of several tiers is then a run of one bit (`gateway.prefix.map`).
    """

    __slots__ = ("__weakref__", "raw", "reach")

    def __init__(self, raw: int, reach: int) -> None:
        self.raw = raw
        self.reach = reach


class SetTable:
    """Every distinct holder set in use; sets that no block and no transition refers to vanish by themselves.

    Attributes:
        ones: bit 0 of every slot.
        live: all bits of the slots in use; the others are left over from holders that were cleared.
        transitions: entries in all `Transition` caches together; whoever clears those resets it.
    """

    __slots__ = ("_pools", "_sets", "live", "ones", "transitions")

    def __init__(self) -> None:
        self._sets: WeakValueDictionary[int, HolderSet] = WeakValueDictionary()
        self._pools: dict[int, int] = {}
        self.ones = 0
        self.live = 0
        self.transitions = 0

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def bytes(self) -> int:
        """An upper estimate of the memory that the sets take."""
        return len(self._sets) * (SET_OVERHEAD + 2 * sys.getsizeof(self.ones << PLANES))

    def widen(self, slots: int) -> None:
        """Make room for slots 0 to `slots` - 1."""
        self.ones = ((1 << PLANES * slots) - 1) // SLOT

    def get(self, raw: int) -> HolderSet | None:
        """The one set with these bits; None for no bits."""
        if not raw:
            return None
        found = self._sets.get(raw)
        if found is None:
            found = self._sets[raw] = HolderSet(raw, self._reach(raw))
        return found

    def share(self, pool_slot: int, member_slots: Iterable[int]) -> None:
        """Count what the pool in `pool_slot` holds in l2 for these slots too; costs one look at each distinct set."""
        self._pools[1 << PLANES * pool_slot + Tier.L2] = sum(
            (1 << Tier.L2 | 1 << Tier.EXPECTED) << PLANES * slot for slot in set(member_slots)
        )
        self._refresh()

    def unshare(self, pool_slot: int) -> None:
        """Forget the pool in `pool_slot`."""
        del self._pools[1 << PLANES * pool_slot + Tier.L2]
        self._refresh()

    def _refresh(self) -> None:
        for each in list(self._sets.values()):
            each.reach = self._reach(each.raw)

    def _reach(self, raw: int) -> int:
        ones = self.ones
        # A multiplication copies each slot's low bit into the tiers that are as slow or slower.
        reach = (
            (raw & ones) * 0b1111
            | (raw >> Tier.L1 & ones) * 0b1110
            | (raw >> Tier.L2 & ones) * 0b1100
            | (raw >> Tier.EXPECTED & ones) * 0b1000
        )
        for bit, members in self._pools.items():
            if raw & bit:
                reach |= members
        return reach


class Transition(dict[HolderSet | None, HolderSet | None]):
    """From a set to the set with some bits added and some taken away, filled as needed; None is the empty set."""

    __slots__ = ("_add", "_drop", "_table")

    def __init__(self, table: SetTable, add: int = 0, drop: int = 0) -> None:
        super().__init__()
        self._table = table
        self._add = add
        self._drop = drop

    def __missing__(self, old: HolderSet | None) -> HolderSet | None:
        table = self._table
        raw = 0 if old is None else old.raw & table.live
        new = self[old] = table.get((raw | self._add) & ~self._drop)
        table.transitions += 1
        return new


class Holder:
    """A worker as one prefix map knows it, or a pool that several workers share.

    Attributes:
        name: the worker's id.
        source: how its holdings are known: ``event`` or ``history``.
        slot: its place in the masks; changes when the holder is cleared, -1 once it has left.
        generation: how often it was cleared.
        members: of a pool, whom it serves; empty for a worker.
        deadlines: per tier, when a holding ends that was stored with one.
    """

    __slots__ = ("add", "deadlines", "drop", "generation", "is_pool", "members", "name", "slot", "source")

    def __init__(self, name: str, source: str, *, is_pool: bool) -> None:
        self.name = name
        self.source = source
        self.is_pool = is_pool
        self.slot = -1
        self.generation = 0
        self.members: tuple[Holder, ...] = ()
        self.deadlines: tuple[dict[int, float], ...] = ({}, {}, {}, {})
        self.add: tuple[Transition, ...] = ()
        self.drop: tuple[Transition, ...] = ()

    def __repr__(self) -> str:
        return f"<Holder {self.name} slot={self.slot} generation={self.generation}>"

    @property
    def bits(self) -> int:
        """All of its bits."""
        return SLOT << PLANES * self.slot if self.slot >= 0 else 0

    def place(self, table: SetTable, slot: int) -> None:
        """Move to a free slot, with nothing held."""
        self.slot = slot
        bits = [1 << PLANES * slot + tier for tier in Tier]
        # An event from the device confirms what was expected there.
        confirmed = (bits[Tier.EXPECTED], 0, 0, 0)
        self.add = tuple(Transition(table, bit, drop) for bit, drop in zip(bits, confirmed, strict=True))
        self.drop = tuple(Transition(table, 0, bit) for bit in bits)
        for deadlines in self.deadlines:
            deadlines.clear()

    def displace(self) -> None:
        """Leave the slot."""
        self.slot = -1
        self.generation += 1
        self.add = self.drop = ()

    def forget_transitions(self) -> None:
        """Empty the caches, so that unused sets can go."""
        for each in (*self.add, *self.drop):
            each.clear()
