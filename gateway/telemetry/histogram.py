"""A histogram with fixed buckets: a list of integers and a sum."""

from bisect import bisect_left
from collections.abc import Sequence

# The buckets of the GenAI conventions for server durations, 0.01 * 2^n, extended to 300 s: a long prompt on Neuron
# prefills for minutes.
DURATION_BOUNDS = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
    163.84,
    300.0,
)
# The buckets of the GenAI conventions for the time to first token, extended from 10 s to 300 s.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0),
)


class Histogram:
    """Counts of values by bucket.

    Attributes:
        bounds: inclusive upper bounds, ascending.
        counts: one count per bound and one more for larger values; not cumulative.
        sum: of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: "Histogram") -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of upper bound and the count of values up to it, the last one ``+Inf``: what Prometheus wants."""
        pairs: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(self.bounds, self.counts[:-1], strict=True):
            total += count
            pairs.append((repr(float(bound)), total))
        pairs.append(("+Inf", total + self.counts[-1]))
        return pairs
