"""What a worker without events probably holds: what we sent there, in a cache as large as its own.

Kept apart from what workers say (`Match.source` is ``history``): it is an estimate, and it knows nothing of requests that
reached the worker by another way.
"""

import itertools
from collections import deque
from collections.abc import Sequence

from gateway.prefix.holders import Holder, Tier
from gateway.prefix.map import PrefixMap

DEFAULT_BLOCKS = 4096
"""Capacity for workers that do not tell theirs."""


class History:
    """One worker's imagined cache: least recently used blocks go first, the end of a prefix before its beginning.

    Attributes:
        holder: the worker in its map.
        capacity: blocks.
    """

    __slots__ = ("_blocks", "_map", "capacity", "holder")

    def __init__(self, worker: str, prefix_map: PrefixMap, capacity: int = DEFAULT_BLOCKS) -> None:
        """`capacity`: blocks that the worker can cache, at least 1."""
        self.capacity = max(1, capacity)
        self.holder: Holder = prefix_map.join(worker, source="history")
        self._map = prefix_map
        self._blocks: dict[int, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._map.block_size

    def record(self, hashes: Sequence[int]) -> None:
        """The worker has computed (or taken from its cache) these blocks of one prompt, first one first."""
        hashes = hashes[: self.capacity]
        blocks = self._blocks
        # Last block first, so that the beginning counts as used most recently.
        backward = hashes[::-1]
        deque(map(blocks.pop, backward, itertools.repeat(None)), maxlen=0)
        blocks.update(dict.fromkeys(backward))
        self._map.store(self.holder, hashes, Tier.DEVICE)
        surplus = len(blocks) - self.capacity
        if surplus > 0:
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
        self._map.clear(self.holder)

    def leave(self) -> None:
        """The worker is gone for good."""
        self._blocks.clear()
        self._map.leave(self.holder)
