"""The device's block pool with its prefix cache, and the tiers below it.

Blocks have no numbers here. A block is either *cached*, under its chained key and with a count of the requests that use it, or
*private* to one request, and then only counted. Two facts keep this exact. A request that uses a key uses every key before it.
And keys whose last user leaves join the eviction order tail first, so that a key is always evicted after all that continue it.
Hence the cached keys of a chain are always its beginning. Once blocks are claimed, `simulator.engine.claims` keeps the order; the two
facts stay.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from simulator.engine.claims import DEFAULT, HIGHEST, LOWEST, Claims
from simulator.engine.outputs import BlockKey

Link = tuple[BlockKey, BlockKey | None]
"""A key and the key before it in its chain (None at the start)."""


class DeviceCache:
    """The device pool: free blocks, blocks in use, and cached blocks that nobody uses.

    Of those the least recently used is evicted first; where there are claims, the one that is worth least.

    vLLM keeps a second copy of a block that two requests computed at the same time. Here the later one takes over the
    earlier one's block, so that a key is held once.

    Attributes:
        total: blocks in the pool.
        free: blocks that hold nothing.
    """

    __slots__ = ("_claims", "_parents", "_unused", "_users", "free", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._users: dict[BlockKey, int] = {}
        self._parents: dict[BlockKey, BlockKey | None] = {}
        # In order of use; the values are stamps of it once there are claims.
        self._unused: OrderedDict[BlockKey, int] = OrderedDict()
        self._claims: Claims | None = None

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._users

    def __len__(self) -> int:
        """How many keys are cached, in use or not."""
        return len(self._users)

    @property
    def keys(self) -> frozenset[BlockKey]:
        """The cached keys."""
        return frozenset(self._users)

    @property
    def in_use(self) -> int:
        """Blocks that running requests hold."""
        return self.total - self.free - len(self._unused)

    def held(self, keys: Sequence[BlockKey], limit: int) -> int:
        """How many leading ones of the first `limit` keys are cached. They are the beginning of the chain, so it is bisected."""
        users = self._users
        return bisect_left(keys, True, 0, limit, key=lambda key: key not in users)

    def fits(self, keys: Sequence[BlockKey], held: int, blocks: int) -> bool:
        """Whether `blocks` more can be had while the first `held` keys stay."""
        available = self.free + len(self._unused) - blocks
        if available < 0:
            return False
        if available >= held:
            return True
        # Held keys without a user count as available above, but would be in use. They come after those that have one.
        unused = self._unused
        return available >= held - bisect_left(keys, True, 0, held, key=lambda key: key in unused)

    def take(self, keys: Sequence[BlockKey], held: int) -> None:
        """Use the first `held` keys, all of which are cached."""
        users = self._users
        for index in range(held):
            key = keys[index]
            count = users[key]
            if not count:
                del self._unused[key]
            users[key] = count + 1

    def allocate(self, blocks: int, now: float = 0.0) -> list[Link]:
        """Make `blocks` private blocks; they must fit. Returns what was evicted for them, leaf first.

        `now`: for claims that lapse.
        """
        if self._claims is not None:
            evicted = self._evict(self._claims, blocks - self.free, HIGHEST, now)
        else:
            evicted = []
            while self.free < blocks:
                key, _ = self._unused.popitem(last=False)
                del self._users[key]
                evicted.append((key, self._parents.pop(key)))
                self.free += 1
        self.free -= blocks
        return evicted

    def spare(self, blocks: int, priority: int, now: float) -> tuple[int, list[Link]]:
        """Make up to `blocks` private blocks out of what is free or worth at most `priority`. Returns how many, and what was evicted."""
        evicted = [] if blocks <= self.free else self._evict(self._claimed(), blocks - self.free, priority, now)
        made = min(blocks, self.free)
        self.free -= made
        return made, evicted

    def store(self, keys: Sequence[BlockKey], start: int, stop: int) -> int:
        """Cache a request's private blocks under ``keys[start:stop]``, which it uses from now on.

        The request uses all keys before `start` already. Returns the index of the first key that was not cached yet; it
        and those after it are new.
        """
        users = self._users
        first_new = start
        for index in range(start, stop):
            key = keys[index]
            count = users.get(key)
            if count is None:
                users[key] = 1
                self._parents[key] = keys[index - 1] if index else None
                continue
            if not count:
                del self._unused[key]
            users[key] = count + 1
            self.free += 1
            first_new = index + 1
        if self._claims is not None:
            for index in range(first_new, stop):
                self._claims.stored(keys[index - 1] if index else None)
        return first_new

    def release(self, keys: Sequence[BlockKey], shared: int, private: int) -> None:
        """A request gives back its first `shared` keys and its `private` blocks."""
        users, claims = self._users, self._claims
        for index in range(shared - 1, -1, -1):
            key = keys[index]
            count = users[key] - 1
            users[key] = count
            if not count:
                if claims is None:
                    self._unused[key] = 0
                else:
                    claims.left(key)
        self.free += private

    def claim(self, keys: Sequence[BlockKey], start: int, stop: int, priority: int, until: float) -> int:
        """What is cached of ``keys[start:stop]`` is worth `priority` until a time. Returns how many keys that are."""
        stop = self.held(keys, min(stop, len(keys)))
        if start >= stop:
            return 0
        self._claimed().claim(keys[start:stop], min(HIGHEST, max(LOWEST, priority)), until)
        return stop - start

    def priority(self, key: BlockKey, now: float) -> int:
        """What a cached key itself is worth."""
        if self._claims is None:
            return DEFAULT
        self._claims.lapse(now)
        return self._claims.priority(key)

    def clear(self) -> None:
        """Forget every key and every claim. No block may be in use."""
        self.free = self.total
        self._users.clear()
        self._parents.clear()
        self._unused.clear()
        self._claims = None

    def _claimed(self) -> Claims:
        """The claims, of which there may be none yet."""
        if self._claims is None:
            self._claims = Claims(self._parents, self._unused)
        return self._claims

    def _evict(self, claims: Claims, blocks: int, priority: int, now: float) -> list[Link]:
        """Evict up to `blocks` keys that are worth at most `priority`."""
        evicted: list[Link] = []
        if blocks <= 0:
            return evicted
        claims.lapse(now)
        while len(evicted) < blocks and (first := claims.first()) is not None and first[1] <= priority:
            key = first[0]
            del self._unused[key], self._users[key]
            parent = self._parents.pop(key)
            claims.gone(key, parent)
            evicted.append((key, parent))
        self.free += len(evicted)
        return evicted


class Tier:
    """Copies of blocks in slower memory, evicted least recently used first, pinned ones never. Several engines may share one as their l2.

    Attributes:
        capacity: in blocks; 0 holds nothing.
        pinned: how often each block is pinned; must be fewer than `capacity`.
    """

    __slots__ = ("_parents", "capacity", "pinned")

    def __init__(self, capacity: int) -> None:
        """`capacity` is in blocks; 0 holds nothing."""
        self.capacity = capacity
        self.pinned: dict[BlockKey, int] = {}
        self._parents: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def keys(self) -> frozenset[BlockKey]:
        """What it holds."""
        return frozenset(self._parents)

    def held(self, keys: Sequence[BlockKey], start: int, limit: int) -> int:
        """Index of the first of ``keys[start:limit]`` that is not here; `limit` when all are."""
        parents = self._parents
        for index in range(start, limit):
            if keys[index] not in parents:
                return index
        return limit

    def put(self, links: Iterable[Link]) -> tuple[list[Link], list[Link]]:
        """Copy blocks here, given leaf first so that a chain also leaves from its end. Returns what is new, what left."""
        if not self.capacity:
            return [], []
        parents = self._parents
        new: list[Link] = []
        for key, parent in links:
            if key in parents:
                parents.move_to_end(key)
            else:
                parents[key] = parent
                new.append((key, parent))
        if self.pinned:
            return new, self._make_room()
        removed = [parents.popitem(last=False) for _ in range(len(parents) - self.capacity)]
        return new, removed

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Keep these, all of which are here, until they are unpinned as often."""
        for key in keys:
            self.pinned[key] = self.pinned.get(key, 0) + 1

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Take one pin back from each."""
        for key in keys:
            left = self.pinned.get(key, 0) - 1
            if left > 0:
                self.pinned[key] = left
            else:
                self.pinned.pop(key, None)

    def touch(self, keys: Sequence[BlockKey], count: int) -> None:
        """The first `count` keys were used: they are evicted later than others, from their end."""
        parents = self._parents
        for index in range(count - 1, -1, -1):
            if keys[index] in parents:
                parents.move_to_end(keys[index])

    def discard(self, keys: Iterable[BlockKey]) -> list[Link]:
        """Forget these, but for pinned ones. Returns what was here."""
        parents = self._parents
        return [(key, parents.pop(key)) for key in keys if key in parents and key not in self.pinned]

    def clear(self) -> tuple[BlockKey, ...]:
        """Forget everything, pins too. Returns what was here."""
        keys = tuple(self._parents)
        self._parents.clear()
        self.pinned.clear()
        return keys

    def _make_room(self) -> list[Link]:
        """Evict down to the capacity; pinned blocks that are met on the way count as used now."""
        parents, removed = self._parents, list[Link]()
        for _ in range(len(parents)):
            if len(parents) <= self.capacity:
                break
            link = parents.popitem(last=False)
            if link[0] in self.pinned:
                parents[link[0]] = link[1]
            else:
                removed.append(link)
        return removed
