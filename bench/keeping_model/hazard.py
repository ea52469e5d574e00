"""When a part of a prompt is asked for again, learned from a few facts about it, and what room is worth that it takes until then.

A discrete-time proportional-odds hazard (D. R. Cox, "Regression Models and Life-Tables", 1972, section 6): the log-odds that a part that
was not asked for until age `EDGES[b]` is asked for before `EDGES[b + 1]` are `base[b]` plus one weight for each fact. Parts that never come
back count for as long as they were watched, so nothing waits for the end of a part to learn from it. Fitted by AdaGrad, one step an
observation.
"""

from collections.abc import Sequence
from math import exp, sqrt
from typing import Final

EDGES: Final = (0.0, *(2.0**power for power in range(14)))
"""Seconds; ages are told apart by factors of two."""
BINS: Final = len(EDGES) - 1
STEP: Final = 0.1
"""AdaGrad's."""
START: Final = -3.5
"""Log-odds before anything was seen: three in a hundred come back in a bin."""
LOW: Final = -5.0
GRAIN: Final = 4
ROWS: Final = 41
"""Sums of weights from -5 to 5, by quarters."""


def age_bin(age: float) -> int:
    """Which bin an age in seconds falls into."""
    return 0 if age < 1.0 else min(BINS - 1, int(age).bit_length())


class Hazard:
    """What was learned, and what follows from it.

    Attributes:
        base: log-odds by age bin.
        weights: by fact.
        seen: observations so far.
    """

    __slots__ = ("_base_squares", "_squares", "_values", "base", "seen", "weights")

    def __init__(self, facts: int) -> None:
        """`facts`: how many there are; each is a number below that."""
        self.base = [START] * BINS
        self.weights = [0.0] * facts
        self.seen = 0
        self._base_squares = [0.1] * BINS
        self._squares = [0.1] * facts
        self._values: list[list[float] | None] = [None] * ROWS

    def row(self, facts: Sequence[int]) -> int:
        """Which row of values is for these facts."""
        total = 0.0
        weights = self.weights
        for fact in facts:
            total += weights[fact]
        return max(0, min(ROWS - 1, round((total - LOW) * GRAIN)))

    def saw(self, facts: Sequence[int], age: int, came: bool, size: int) -> None:
        """A part of `size` with these facts was asked for in age bin `age`, or was not until that was over."""
        weights, squares = self.weights, self._squares
        odds = self.base[age]
        for fact in facts:
            odds += weights[fact]
        gradient = size * (came - 1.0 / (1.0 + exp(-odds)))
        square = gradient * gradient
        step = STEP * gradient
        total = self._base_squares[age] = self._base_squares[age] + square
        self.base[age] += step / sqrt(total)
        for fact in facts:
            total = squares[fact] = squares[fact] + square
            weights[fact] += step / sqrt(total)
        self.seen += 1

    def rebuild(self) -> None:
        """From now on values are what follows from what was learned until now. A row is worked out when it is asked for."""
        self._values = [None] * ROWS

    def _row(self, row: int) -> list[float]:
        found = self._values[row]
        if found is None:
            hazards = [1.0 / (1.0 + exp(-(base + LOW + row / GRAIN))) for base in self.base]
            found = self._values[row] = values(hazards)
        return found

    def value(self, row: int, age: float) -> float:
        """Of room for a part of this row's at that age: hits per second, see `values`."""
        return self._row(row)[age_bin(age)]

    def lifetime(self, row: int, price: float) -> float:
        """Seconds after which a part is no longer worth `price`, for good; 0: it never is. Between edges as a power of age."""
        worth = self._row(row)
        for age in range(BINS - 1, -1, -1):
            if worth[age] < price:
                continue
            begin, end = EDGES[age], EDGES[age + 1]
            if age == BINS - 1 or worth[age + 1] <= 0.0:
                return end
            share = min(1.0, (worth[age] / price - 1.0) / max(1e-9, worth[age] / worth[age + 1] - 1.0))
            return begin + share * (end - begin)
        return 0.0


def values(hazards: Sequence[float]) -> list[float]:
    """What room is worth at the begin of each age bin, given the chance of being asked for in each.

    Gittins' index of the bet "keep it until age T, or until it is asked for": the most, over T, of the chance of a hit by the expected
    seconds of room it takes. (J. C. Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979; for caches this is LHD's hit
    density with the best time to stop.)
    """
    found = []
    for begin in range(len(hazards)):
        alive, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
        for age in range(begin, len(hazards)):
            come = alive * hazards[age]
            hits += come
            seconds += (alive - come / 2) * (EDGES[age + 1] - EDGES[age])
            alive -= come
            best = max(best, hits / seconds)
        found.append(best)
    return found
