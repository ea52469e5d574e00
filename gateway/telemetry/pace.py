"""How evenly a stream came: the gaps between its reads, counted cheaply while it runs."""

from array import array
from math import ceil, log
from operator import sub
from typing import Final

import msgspec

KEPT: Final = 2048
"""Moments kept of one stream, 16 KiB; those of longer ones are counted into buckets."""


class Gaps(msgspec.Struct, frozen=True, gc=False):
    """Seconds between the reads of one stream, from the first one on. A read is what the worker wrote at once: most often one token.

    Attributes:
        p50, p95, max: of the gaps.
        count: how many gaps there were.
    """

    p50: float
    p95: float
    max: float
    count: int

    def document(self) -> dict[str, float]:
        """Ready for JSON."""
        return {"p50": round(self.p50, 6), "p95": round(self.p95, 6), "max": round(self.max, 6), "count": self.count}


class Pace:
    """The moments at which the reads of one stream came.

    Whoever relays appends to `stamps` himself, which costs 0.1 us a read, and calls `fold` when there are more than `KEPT`.

    Attributes:
        stamps: seconds of the monotonic clock.
    """

    __slots__ = ("_counts", "_longest", "stamps")

    def __init__(self) -> None:
        self.stamps = array("d")
        self._counts: dict[int, int] = {}
        self._longest = 0.0

    def fold(self) -> None:
        """Count the gaps so far into buckets, and forget all moments but the last."""
        stamps = self.stamps
        counts = self._counts
        for gap in map(sub, stamps[1:], stamps):
            bucket = _bucket(gap)
            counts[bucket] = counts.get(bucket, 0) + 1
            self._longest = max(self._longest, gap)
        del stamps[:-1]

    def gaps(self) -> Gaps | None:
        """What they come to; exact for up to `KEPT` reads, within 5 % for more. None for less than two."""
        stamps = self.stamps
        if not self._counts:
            if len(stamps) < 2:
                return None
            gaps = sorted(map(sub, stamps[1:], stamps))
            count = len(gaps)
            return Gaps(gaps[_rank(count, 0.5)], gaps[_rank(count, 0.95)], gaps[-1], count)
        self.fold()
        count = sum(self._counts.values())
        return Gaps(self._quantile(count, 0.5), self._quantile(count, 0.95), self._longest, count)

    def _quantile(self, count: int, share: float) -> float:
        left = _rank(count, share)
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left < 0:
                return min(self._longest, _LEAST * float(_FACTOR ** (bucket + 0.5)))
        return self._longest


_LEAST: Final = 1e-6
_FACTOR: Final = 1.1
_LOG: Final = log(_FACTOR)


def _bucket(gap: float) -> int:
    """Buckets grow by a tenth, from a microsecond on; the first one takes all that is less."""
    return int(log(gap / _LEAST) / _LOG) if gap > _LEAST else 0


def _rank(count: int, share: float) -> int:
    """Index of a quantile among `count` sorted values: the least one that is not below so many (nearest rank)."""
    return max(0, ceil(share * count) - 1)
