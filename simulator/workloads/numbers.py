"""Numbers of generators: lengths by chance, and bounds."""

from collections.abc import Mapping
from math import exp, log, sqrt
from random import Random
from types import MappingProxyType

from simulator.workloads.workload import WorkloadError

MOST_REQUESTS = 1_000_000
"""Some 400 bytes each."""


def length(random: Random, mean: int, variation: float) -> int:
    """A number of tokens, log-normal, at least 1 and at most 20 times the mean.

    Args:
        random: where chance comes from.
        mean: of the distribution.
        variation: its standard deviation divided by its mean; 0: always the mean.
    """
    if not variation:
        return mean
    sigma = sqrt(log(1 + variation * variation))
    return max(1, min(round(random.lognormvariate(log(mean) - sigma * sigma / 2, sigma)), 20 * mean))


def pause(random: Random, mean: float) -> float:
    """Seconds, exponential."""
    return random.expovariate(1 / mean) if mean > 0 else 0.0


def zipf(count: int, skew: float) -> list[float]:
    """Cumulative weights of `count` things, the n-th of them wanted 1/n**skew times as often as the first."""
    weights: list[float] = []
    total = 0.0
    for rank in range(1, count + 1):
        total += exp(-skew * log(rank))
        weights.append(total)
    return weights


def bounded(
    generator: str, expected: float, /, *, or_zero: Mapping[str, float] = MappingProxyType({}), **numbers: float
) -> None:
    """Refuse what cannot be made.

    Args:
        generator: for the error.
        expected: how many requests there would be, about.
        or_zero: parameters, by name, that must be 0 or more.
        numbers: parameters, by name, that must be above 0.

    Raises:
        WorkloadError: naming the parameter.
    """
    for name, value in or_zero.items():
        if not 0 <= value < float("inf"):
            raise WorkloadError(f"{generator}: {name} is {value}; a number from 0 is accepted")
    for name, value in numbers.items():
        if not 0 < value < float("inf"):
            raise WorkloadError(f"{generator}: {name} is {value}; a number above 0 is accepted")
    if not expected <= MOST_REQUESTS:
        raise WorkloadError(f"{generator}: some {expected:.0f} requests; at most {MOST_REQUESTS} are accepted")
