"""What a worker without events probably holds: what we sent there, in a cache as large as its own.

Kept apart from what workers say (`Match.source` is ``history``): it is an estimate, and it knows nothing of requests that
reached the worker by another way.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Final

from gateway.prefix.holders import Holder, Tier
from gateway.prefix.map import PrefixMap

DEFAULT_BLOCKS = 4096
"""Capacity for workers that do not tell theirs."""

_RENEWAL: Final = 8
_MAX_RENEWED: Final = 4096
_SPARE: Final = 64
"""A full cache is emptied by one `_SPARE`th at a time."""


class History:
    """One worker's imagined cache: least recently used blocks go first, the end of a prefix before its beginning.

    Attributes:
        holder: the worker in its map.
        capacity: blocks.
    """

    __slots__ = ("_blocks", "_map", "_recorded", "_renewed", "capacity", "holder")

    def __init__(self, worker: str, prefix_map: PrefixMap, capacity: int = DEFAULT_BLOCKS) -> None:
        """`capacity`: blocks that the worker can cache, at least 1."""
        self.capacity = max(1, capacity)
        self.holder: Holder = prefix_map.join(worker, source="history")
        self._map = prefix_map
        self._blocks: dict[int, None] = {}  # least recently used first
        self._recorded = 0  # blocks that were new
        self._renewed: dict[int, int] = {}  # by the last block of a held prefix: `_recorded` when it was last renewed

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def map(self) -> PrefixMap:
        """Its map."""
        return self._map

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._map.block_size

    def record(self, hashes: Sequence[int], held: int = 0) -> None:
        """The worker has computed (or taken from its cache) these blocks of one prompt, first one first.

        The first `held` of them it held before. They count as used now, but no more often than once for each
        `_RENEWAL`th of the capacity that is new: a prefix that many prompts share costs nothing for most of them.
        """
        hashes = hashes[: self.capacity]
        new = len(hashes) - held
        if held:
            last = hashes[held - 1]
            if self._recorded - self._renewed.get(last, -self.capacity) < self.capacity // _RENEWAL:
                hashes = hashes[held:]
                if not hashes:
                    return
            else:
                if len(self._renewed) >= _MAX_RENEWED:
                    self._renewed.clear()
                self._renewed[last] = self._recorded
        self._recorded += new
        blocks = self._blocks
        # Last block first, so that the beginning counts as used most recently.
        backward = hashes[::-1]
        deque(map(blocks.pop, backward, itertools.repeat(None)), maxlen=0)
        blocks.update(dict.fromkeys(backward))
        self._map.store(self.holder, hashes, Tier.DEVICE)
        surplus = len(blocks) - self.capacity
        if surplus > 0:
            # Some at a time: finding a dict's first key walks over all that were deleted before it.
            surplus += self.capacity // _SPARE
            victims = list(itertools.islice(blocks, surplus))
            for each in victims:
                del blocks[each]
            self._map.remove(self.holder, victims, Tier.DEVICE)

    def resize(self, capacity: int) -> None:
        """The worker's capacity became known or has changed."""
        self.capacity = max(1, capacity)
        self.record(())

    def forget(self) -> None:
        """The worker was restarted, or its cache was reset."""
        self._blocks.clear()
        self._renewed.clear()
        self._map.clear(self.holder)

    def leave(self) -> None:
        """The worker is gone for good."""
        self._blocks.clear()
        self._map.leave(self.holder)
