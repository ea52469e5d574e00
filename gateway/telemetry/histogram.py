"""A histogram with fixed buckets: a list of integers and a sum."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

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

# The buckets of the GenAI conventions for the time per output token, with two more below: a busy GPU makes a token in 5 ms.
PER_TOKEN_BOUNDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# The longest silence inside a stream: from the pace of a fast worker to a decode that another's prefill holds back for seconds.
GAP_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# What the gateway itself takes: some 30 us for a small request without tokens, up to a second to tokenize a long cold one.
GATEWAY_BOUNDS = (
    *(0.00005, 0.0001, 0.0002, 0.0005),
    *(0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0),
)


class Exemplar(NamedTuple):
    """One value and the trace that it is from.

    Attributes:
        trace_id: 32 hexadecimal digits.
        value: in the histogram's unit.
        time: Unix time in seconds at which it was counted.
    """

    trace_id: str
    value: float
    time: float


class Histogram:
    """Counts of values by bucket.

    Attributes:
        bounds: inclusive upper bounds, ascending.
        counts: one count per bound and one more for larger values; not cumulative.
        sum: of all values.
        exemplars: the latest by index of its bucket, where any was kept.
    """

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: "Histogram") -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        for one in other.exemplars.values():
            self.keep(one)

    def keep(self, exemplar: Exemplar) -> None:
        """Remember an exemplar of a value that was counted, unless a later one of its bucket is there."""
        index = bisect_left(self.bounds, exemplar.value)
        before = self.exemplars.get(index)
        if before is None or before.time <= exemplar.time:
            self.exemplars[index] = exemplar

    def copy(self) -> "Histogram":
        """The same counts, which stay as they are."""
        other = Histogram(self.bounds)
        other.counts = self.counts.copy()
        other.sum = self.sum
        other.exemplars = self.exemplars.copy()
        return other

    def cumulative(self, scale: float = 1.0) -> list[tuple[str, float]]:
        """Pairs of upper bound times `scale` and the count of values up to it, the last one ``+Inf``: what Prometheus wants."""
        pairs: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(self.bounds, self.counts[:-1], strict=True):
            total += count
            pairs.append((repr(bound * scale), total))
        pairs.append(("+Inf", total + self.counts[-1]))
        return pairs
