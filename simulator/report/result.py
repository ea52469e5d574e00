"""What of a replay's result the report reads; `simulator.fleet.ReplayResult` is one."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, Protocol


class Arrivals(Protocol):
    """Requests, one entry each."""

    @property
    def arrival(self) -> Sequence[float]:
        """Seconds from the start; NaN if it never came."""


class Samples(Protocol):
    """A fleet's load at `times`, ascending; the other sequences have an entry for each."""

    @property
    def times(self) -> Sequence[float]:
        """Seconds from the start."""

    @property
    def in_flight(self) -> Sequence[Sequence[int]]:
        """Requests at each worker."""

    @property
    def pending(self) -> Sequence[Sequence[int]]:
        """Those of them whose prefill has not ended."""

    @property
    def refused(self) -> Sequence[int]:
        """Requests refused so far."""


class Result(Protocol):
    """One policy's run over a workload."""

    @property
    def policy(self) -> str:
        """Its name."""

    @property
    def workload(self) -> str:
        """The workload's name."""

    @property
    def workers(self) -> Sequence[str]:
        """Ids, in the order of `Samples.in_flight`."""

    @property
    def profile(self) -> str:
        """What kind of worker."""

    @property
    def seed(self) -> int:
        """Of all that was by chance."""

    @property
    def duration(self) -> float:
        """Seconds from the start to the last end."""

    @property
    def requests(self) -> Arrivals:
        """One by one."""

    @property
    def series(self) -> Samples:
        """Over time."""

    @property
    def ttfts(self) -> Sequence[float]:
        """Times to first token in seconds, ascending."""

    def summary(self) -> Mapping[str, Any]:
        """The figures of the whole run (the replay's JSON)."""


def last_arrival(results: Sequence[Result]) -> float:
    """When the last request came, in seconds; of several runs the earliest such moment, at least 0."""
    lasts = [[time for time in run.requests.arrival if not isnan(time)] for run in results]
    return min((max(times, default=0.0) for times in lasts), default=0.0)
