"""When the next turn of a conversation comes, learned from those that came: of this conversation, and of all.

Gaps between people's or tools' turns spread over orders of magnitude, so they are learned as logarithms: an exponentially weighted
mean and variance, and a quantile as of a log-normal distribution.
"""

from math import exp, log, sqrt
from statistics import NormalDist
from typing import Final

SHARE: Final = 0.3
"""Weight of a conversation's newest gap against all before."""
FLEET_SHARE: Final = 0.02
"""The same for the fleet: some 50 gaps are remembered."""
SPREAD: Final = 1.0
"""Standard deviation of the logarithm where nothing is known: one in three gaps is longer than 2.7 times the median, or shorter."""
SHORTEST: Final = 0.001


class Gaps:
    """What was learned of one conversation, or of all.

    Attributes:
        count: gaps that were seen.
        mean: of their logarithms.
        variance: of these.
    """

    __slots__ = ("count", "mean", "variance")

    def __init__(self, median: float = 60.0, spread: float = SPREAD) -> None:
        """What is assumed before anything was seen: seconds, and the standard deviation of their logarithm."""
        self.count = 0
        self.mean = log(max(SHORTEST, median))
        self.variance = spread * spread

    def saw(self, gap: float, share: float) -> None:
        """A turn came `gap` seconds after the one before; `share` is its weight, more for the first ones."""
        self.learn(log(max(SHORTEST, gap)), share)

    def learn(self, logarithm: float, share: float) -> None:
        """The same of a gap's logarithm."""
        self.count += 1
        weight = 1.0 / (self.count + 1)
        weight = max(weight, share)
        difference = logarithm - self.mean
        step = weight * difference
        self.mean += step
        # West's update of an exponentially weighted variance.
        self.variance = (1.0 - weight) * (self.variance + difference * step)

    @property
    def median(self) -> float:
        """Seconds."""
        return exp(self.mean)

    def quantile(self, score: float) -> float:
        """Seconds within which a share of gaps lies, as the standard normal distribution's `score` for that share (see `score`)."""
        return exp(self.mean + score * sqrt(self.variance))


class Returns:
    """How often a turn is followed by another: for first turns, and for later ones."""

    __slots__ = ("_first", "_later")

    def __init__(self) -> None:
        self._first = self._later = 0.5

    def saw(self, turns: int, came: bool) -> None:
        """A conversation had `turns` turns, and another one came, or it fell silent."""
        if turns <= 1:
            self._first += FLEET_SHARE * (came - self._first)
        else:
            self._later += FLEET_SHARE * (came - self._later)

    def odds(self, turns: int) -> float:
        """The share of conversations with so many turns that have a further one."""
        return self._first if turns <= 1 else self._later


def score(share: float) -> float:
    """The standard normal distribution's quantile, for `Gaps.quantile`."""
    return NormalDist().inv_cdf(share)
