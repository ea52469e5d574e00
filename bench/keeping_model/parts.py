"""What is remembered of prompts: a tree of their parts, long after workers have evicted them.

A part is a run of a prompt that came and went together with nothing else: where two prompts part ways, parts end. Prompts are looked at by
marks, the hash of every so-manieth block, so that memory and work are a fraction of the blocks'. The parts looked at longest ago are
forgotten first, the end of a prompt before its beginning.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

PART_BYTES: Final = 700
"""Of a part, its facts and its place in the tree, without marks."""
MARK_BYTES: Final = 140
"""A 64-bit hash as an object, its place in a part and its entry in a dictionary."""
MOST_PARTS: Final = 16
"""In one prompt; where there are more and nothing branches off, those nearest to the beginning become one."""


class Part:
    """A run of marks.

    Attributes:
        parent: what comes before it; None at the beginning of a prompt.
        marks: hashes, in order.
        start: marks before it.
        children: parts that continue it.
        uses: prompts that had it.
        last: when the latest came.
        key: what is known of it, as of then (see `model.key_of`).
        watched: the age bin that is waited for.
        stamp: of its latest use; what was noted before is void.
        sampled: it is learned from.
    """

    __slots__ = ("children", "key", "last", "marks", "parent", "sampled", "stamp", "start", "uses", "watched")

    def __init__(self, parent: "Part | None", marks: list[int], start: int, sampled: bool) -> None:
        self.parent = parent
        self.marks = marks
        self.start = start
        self.children = 0
        self.uses = 0
        self.last = 0.0
        self.key = 0
        self.watched = 0
        self.stamp = 0
        self.sampled = sampled


class Parts:
    """The tree.

    Attributes:
        bytes: that it takes, as estimated from counts.
        marks: that are remembered.
    """

    __slots__ = ("_by_mark", "_most_bytes", "_order", "_sample", "bytes")

    def __init__(self, most_bytes: int, sample: int) -> None:
        """`sample`: one part in so many is learned from, by its hash."""
        self._by_mark: dict[int, Part] = {}
        self._order: OrderedDict[Part, None] = OrderedDict()
        self._most_bytes = most_bytes
        self._sample = sample
        self.bytes = 0

    def __iter__(self) -> Iterator[Part]:
        """Used longest ago first."""
        return iter(self._order)

    def __len__(self) -> int:
        """How many."""
        return len(self._order)

    @property
    def marks(self) -> int:
        """How many are remembered."""
        return len(self._by_mark)

    def path(self, marks: Sequence[int]) -> tuple[list[Part], int]:
        """The parts that a prompt consists of, last one first, and how many of its marks were known before."""
        by_mark = self._by_mark
        known = bisect_left(marks, True, key=lambda mark: mark not in by_mark)
        part = by_mark[marks[known - 1]] if known else None
        if part is not None and known < part.start + len(part.marks):
            part = self._split(part, known - part.start)
        if known < len(marks):
            part = self._add(part, list(marks[known:]), known)
        path: list[Part] = []
        order = self._order
        while part is not None:
            path.append(part)
            order.move_to_end(part)
            part = part.parent
        if len(path) > MOST_PARTS:
            self._join(path)
        while self.bytes > self._most_bytes and len(order) > len(path):
            self._forget(next(iter(order)))
        return path, known

    def _add(self, parent: Part | None, marks: list[int], start: int) -> Part:
        part = Part(parent, marks, start, marks[0] % self._sample == 0)
        if parent is not None:
            parent.children += 1
        for mark in marks:
            self._by_mark[mark] = part
        self._order[part] = None
        self.bytes += PART_BYTES + MARK_BYTES * len(marks)
        return part

    def _split(self, lower: Part, count: int) -> Part:
        """Make the first `count` marks of a part one of their own, which is returned."""
        upper = Part(lower.parent, lower.marks[:count], lower.start, lower.sampled)
        upper.children = 1
        upper.uses, upper.last, upper.key = lower.uses, lower.last, lower.key
        upper.watched = lower.watched
        lower.marks = lower.marks[count:]
        lower.start += count
        lower.parent = upper
        for mark in upper.marks:
            self._by_mark[mark] = upper
        self._order[upper] = None
        self.bytes += PART_BYTES
        return upper

    def _join(self, path: list[Part]) -> None:
        """One part less in a long path, if it can be: two near its beginning that nothing comes between."""
        for index in range(len(path) - 2, MOST_PARTS // 2, -1):
            part, before = path[index], path[index + 1]
            if part.children != 1 or before.children != 1:
                continue
            before.marks.extend(part.marks)
            for mark in part.marks:
                self._by_mark[mark] = before
            path[index - 1].parent = before
            part.stamp += 1
            del path[index], self._order[part]
            self.bytes -= PART_BYTES
            return

    def _forget(self, part: Part) -> None:
        del self._order[part]
        part.stamp += 1
        if part.parent is not None:
            part.parent.children -= 1
        for mark in part.marks:
            del self._by_mark[mark]
        self.bytes -= PART_BYTES + MARK_BYTES * len(part.marks)
