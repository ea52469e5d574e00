"""A least-recently-used mapping bounded by the bytes that its owner says each value takes."""

import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

V = TypeVar("V")

ENTRY_OVERHEAD = 400
"""Bytes that CPython takes for an entry besides its text and what the owner counts: measured (tracemalloc) at 385 for a
segment with its array and JSON, most of it object headers and the linked dict."""


class ByteLru(Generic[V]):
    """Text to value, holding at most `max_bytes`; the entry that was used least recently goes first.

    Looked up by the text itself and not by a digest of it: a dict hashes the text in any case (siphash, keyed per
    process) and then compares it, so that no client can craft two texts that share an entry.

    Not thread-safe: one event loop owns it.
    """

    __slots__ = ("_entries", "bytes", "evictions", "hits", "max_bytes", "misses")

    def __init__(self, max_bytes: int) -> None:
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> V | None:
        """The value of `key`, which becomes the most recently used one; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def find(self, keys: Iterable[str]) -> list[V | None]:
        """What `get` gives for each of `keys`."""
        entries = self._entries
        look, touch = entries.get, entries.move_to_end
        values: list[V | None] = []
        misses = 0
        for key in keys:
            entry = look(key)
            if entry is None:
                misses += 1
                values.append(None)
            else:
                touch(key)
                values.append(entry[0])
        self.misses += misses
        self.hits += len(values) - misses
        return values

    def peek(self, key: str) -> V | None:
        """The value of `key`, without any consequence."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: str, value: V, size: int) -> None:
        """Keep `value`, which takes `size` bytes besides its key. One that alone exceeds the budget is not kept."""
        size += ENTRY_OVERHEAD + sys.getsizeof(key)
        if size > self.max_bytes:
            return
        previous = self._entries.pop(key, None)
        if previous is not None:
            self.bytes -= previous[1]
        self._entries[key] = (value, size)
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed
            self.evictions += 1

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.bytes = 0
