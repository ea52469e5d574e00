"""How many tokens caches could have spared at best: one cache of the fleet's size, and one without limits."""

from bisect import bisect_left
from collections import OrderedDict, deque
from itertools import repeat

from simulator.fleet.keys import RequestKeys


class Bounds:
    """A pooled LRU cache and an infinite one, over the requests in the order of their arrival.

    Both hold what a request brings as soon as it arrives, its answer's blocks included, which take room in real caches too. So
    `infinite` is never below what a fleet can reach; a fleet may beat `pooled` now and then, for LRU is not the best order.

    Attributes:
        tokens: of all prompts.
        pooled, infinite: of those, the ones that the cache held.
    """

    __slots__ = ("_block_size", "_capacity", "_ever", "_lru", "infinite", "pooled", "tokens")

    def __init__(self, capacity: int, block_size: int) -> None:
        """`capacity`: blocks of the pooled cache."""
        self._capacity = capacity
        self._block_size = block_size
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._ever: set[int] = set()
        self.tokens = 0
        self.pooled = 0
        self.infinite = 0

    def arrived(self, keys: RequestKeys) -> None:
        """Count a request, and keep what it brings."""
        hashes, limit = keys.blocks, keys.chain.hittable
        lru, ever = self._lru, self._ever
        self.tokens += keys.chain.tokens
        self.pooled += self._block_size * _leading(hashes, limit, lru)
        held = _leading(hashes, limit, ever)
        self.infinite += self._block_size * held
        ever.update(hashes[held : keys.known])
        # Last block first: a prefix is worth more than what continues it. All in C, for there may be millions of blocks.
        backward = hashes[::-1]
        deque(map(lru.pop, backward, repeat(None)), maxlen=0)
        lru.update(dict.fromkeys(backward))
        for _ in range(len(lru) - self._capacity):
            lru.popitem(last=False)


def _leading(hashes: list[int], limit: int, cache: OrderedDict[int, None] | set[int]) -> int:
    """How many of the first `limit` are in `cache`, which always holds all that comes before what it holds."""
    return bisect_left(hashes, True, 0, limit, key=lambda key: key not in cache)
