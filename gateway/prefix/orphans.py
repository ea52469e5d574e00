"""Stored events whose parent is not known (yet): kept for a while, within bounds."""

from collections.abc import Sequence

from gateway.prefix.events import Stored
from gateway.prefix.holders import Tier

MAX_BLOCKS = 16_384
"""Blocks kept; beyond that the oldest parent's children are given up."""


class Orphans:
    """Events by the parent that they wait for.

    Attributes:
        blocks: how many blocks they hold together.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.blocks = 0
        self._max_blocks = max_blocks
        self._children: dict[int, list[Stored]] = {}
        # Every block that waits; True once it was removed before its parent came.
        self._removed: dict[tuple[Tier, int], bool] = {}

    def add(self, event: Stored) -> int:
        """Keep an event; returns how many blocks of others (or of this one) had to be given up for it."""
        assert event.parent is not None
        if len(event.hashes) > self._max_blocks:
            return len(event.hashes)
        self._children.setdefault(event.parent, []).append(event)
        self.blocks += len(event.hashes)
        for each in event.hashes:
            self._removed[event.tier, each] = False
        lost = 0
        while self.blocks > self._max_blocks:
            for dropped in self._children.pop(next(iter(self._children))):
                lost += len(dropped.hashes)
                self._release(dropped)
        return lost

    def adopt(self, hashes: Sequence[int]) -> list[tuple[Stored, list[int]]]:
        """Those that waited for one of these parents, which are known now. They no longer wait.

        Returns:
            Each event with the hashes of those of its blocks that were removed in the meantime.
        """
        children: list[tuple[Stored, list[int]]] = []
        if not self._children.keys().isdisjoint(hashes):
            for parent in hashes:
                children += [(child, self._release(child)) for child in self._children.pop(parent, ())]
        return children

    def remove(self, tier: Tier, engine_hash: int) -> None:
        """A block was removed; if it waits here, it must not be counted as held when its parent comes."""
        if (tier, engine_hash) in self._removed:
            self._removed[tier, engine_hash] = True

    def _release(self, event: Stored) -> list[int]:
        self.blocks -= len(event.hashes)
        return [each for each in event.hashes if self._removed.pop((event.tier, each), False)]
