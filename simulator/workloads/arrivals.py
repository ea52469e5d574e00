"""When requests arrive."""

from collections.abc import Sequence
from random import Random

from simulator.workloads.workload import WorkloadError


def poisson(random: Random, rate: float, count: int) -> list[float]:
    """`count` arrival times in seconds of a Poisson process of `rate` requests per second, ascending from 0."""
    if not 0 < rate < float("inf"):
        raise WorkloadError(f"rate is {rate}, not a positive number of requests per second")
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += random.expovariate(rate)
        times.append(now)
    return times


def ladder(random: Random, steps: Sequence[tuple[float, float]]) -> list[float]:
    """Arrival times of a Poisson process whose rate changes in steps.

    Args:
        random: where chance comes from.
        steps: (requests per second, seconds), one after another.
    """
    times: list[float] = []
    start = 0.0
    for rate, seconds in steps:
        if not (0 < rate < float("inf") and 0 < seconds < float("inf")):
            raise WorkloadError(f"{rate} requests per second for {seconds} s: both must be positive numbers")
        now = start + random.expovariate(rate)
        while now < start + seconds:
            times.append(now)
            now += random.expovariate(rate)
        start += seconds
    return times
