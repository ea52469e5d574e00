"""Which cached block goes next where some of them are claimed: the least worth first, among equals the least recently used.

A claim says what a block is worth, from 0 (first to go) to 100 (last to go), until a time; a block without one is worth `DEFAULT`. Only
the ends of chains can go, so a block is in fact kept as long as the best of all that continue it: what is worth more at the end of
a chain protects all before it.

Nothing here is looked at while no claim was ever made: that is plain LRU, and `simulator.engine.cache` does it without.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from simulator.engine.outputs import BlockKey

DEFAULT: Final = 50
"""What a block without a claim is worth."""
LOWEST: Final = 0
HIGHEST: Final = 100
_SLACK: Final = 1024
"""Entries that the order may have beyond twice what it needs, before it is made anew."""

Claim = tuple[int, float]
"""A priority, and the time at which it lapses."""


class Claims:
    """The order in which unused keys leave a `DeviceCache`, with whose own tables it works.

    A key is a candidate while it is unused and no cached key continues it. The order is a heap of (priority, stamp, key), in which what
    has become wrong stays until it is met: `_current` says whether an entry still holds.
    """

    __slots__ = ("_children", "_claimed", "_lapses", "_order", "_stamp", "_unused")

    def __init__(self, parents: Mapping[BlockKey, BlockKey | None], unused: dict[BlockKey, int]) -> None:
        """`unused`: in the order of their use; the values become stamps of it."""
        self._claimed: dict[BlockKey, Claim] = {}
        self._lapses: list[tuple[float, int, Sequence[BlockKey], Claim]] = []
        self._unused = unused
        self._stamp = 0
        self._children: dict[BlockKey, int] = {}
        for parent in parents.values():
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
        for key in unused:
            self._stamp += 1
            unused[key] = self._stamp
        self._order: list[tuple[int, int, BlockKey]] = []
        self._rebuild()

    def __len__(self) -> int:
        """How many keys are claimed, lapsed claims included that nobody has looked at since."""
        return len(self._claimed)

    def priority(self, key: BlockKey) -> int:
        """What a cached key itself is worth, as of the latest `lapse`."""
        claim = self._claimed.get(key)
        return DEFAULT if claim is None else claim[0]

    def claim(self, keys: Sequence[BlockKey], priority: int, until: float) -> None:
        """From now on these cached keys are worth `priority`, until a time; earlier claims on them are void."""
        claim = (priority, until)
        claimed, unused, children = self._claimed, self._unused, self._children
        for key in keys:
            claimed[key] = claim
            stamp = unused.get(key)
            if stamp is not None and key not in children:
                heappush(self._order, (priority, stamp, key))
        if until != float("inf"):
            self._stamp += 1
            heappush(self._lapses, (until, self._stamp, keys, claim))

    def lapse(self, now: float) -> None:
        """Claims whose time is over no longer count: their keys are where they would be without."""
        lapses, claimed, unused = self._lapses, self._claimed, self._unused
        while lapses and lapses[0][0] <= now:
            _, _, keys, claim = heappop(lapses)
            for key in keys:
                if claimed.get(key) is not claim:
                    continue
                del claimed[key]
                stamp = unused.get(key)
                if stamp is not None and key not in self._children:
                    heappush(self._order, (DEFAULT, stamp, key))

    def stored(self, parent: BlockKey | None) -> None:
        """A key that continues `parent` is cached."""
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def left(self, key: BlockKey) -> None:
        """The last user of `key` has left it: it is unused from now on."""
        self._stamp += 1
        self._unused[key] = self._stamp
        if key not in self._children:
            heappush(self._order, (self.priority(key), self._stamp, key))
            if len(self._order) > 2 * len(self._unused) + _SLACK:
                self._rebuild()

    def first(self) -> tuple[BlockKey, int] | None:
        """The key that goes next and what it is worth; None when nothing can go. Claims must have lapsed, see `lapse`."""
        order = self._order
        while order:
            priority, stamp, key = order[0]
            if self._current(priority, stamp, key):
                return key, priority
            heappop(order)
        return None

    def gone(self, key: BlockKey, parent: BlockKey | None) -> None:
        """`key` was evicted: it is in none of the cache's tables any more."""
        self._claimed.pop(key, None)
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        stamp = self._unused.get(parent)
        if stamp is not None:
            heappush(self._order, (self.priority(parent), stamp, parent))

    def _current(self, priority: int, stamp: int, key: BlockKey) -> bool:
        return self._unused.get(key) == stamp and key not in self._children and self.priority(key) == priority

    def _rebuild(self) -> None:
        self._order = [
            (self.priority(key), stamp, key) for key, stamp in self._unused.items() if key not in self._children
        ]
        heapify(self._order)
