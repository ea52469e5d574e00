"""Sequences of content ids in little memory: most are a few runs of successive numbers."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import overload


class Runs(Sequence[int]):
    """Several ranges, one after another; immutable.

    A Claude Code prompt of 2,000 ids is some five runs. Iterating is as fast as over a list (`itertools.chain`).
    """

    __slots__ = ("_ends", "_ranges")

    def __init__(self, ranges: Iterable[range]) -> None:
        joined: list[range] = []
        for run in ranges:
            if not run:
                continue
            if joined and joined[-1].stop == run.start:
                joined[-1] = range(joined[-1].start, run.stop)
            else:
                joined.append(run)
        self._ranges = tuple(joined)
        self._ends = tuple(accumulate(map(len, joined)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._ranges)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return list(self)[index]
            return self.part(start, stop)
        length = len(self)
        position = index + length if index < 0 else index
        if not 0 <= position < length:
            raise IndexError(index)
        run = bisect_right(self._ends, position)
        return self._ranges[run][position - self._ends[run]]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Runs):
            return self._ranges == other._ranges
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._ranges)

    def __repr__(self) -> str:
        return f"Runs({list(self._ranges)!r})"

    @property
    def ranges(self) -> Sequence[range]:
        """The runs, no two of which could be one."""
        return self._ranges

    def part(self, start: int, stop: int | None = None) -> "Runs":
        """From number `start` up to `stop`, both at least 0, as `[start:stop]`."""
        limit = len(self) if stop is None else stop
        parts: list[range] = []
        first = 0
        for run in self._ranges:
            parts.append(run[max(start - first, 0) : max(limit - first, 0)])
            first += len(run)
        return Runs(parts)


class Ids:
    """Hands out content ids that nobody else has."""

    __slots__ = ("_next",)

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def fresh(self, count: int) -> range:
        """`count` new ids in a row."""
        start = self._next
        self._next += count
        return range(start, self._next)
