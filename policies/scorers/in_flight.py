"""Fewest requests in flight first."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


class InFlight:
    """Cost: requests in flight divided by the worker's weight. Unit: requests.

    Counted by the gateway at each decision, so it is never older than the last one. The weight is below 1 during slow
    start only: a worker of weight 0.1 with one request costs as much as a warm one with ten.
    """

    __slots__ = ()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """``in_flight / weight`` for each."""
        return [candidate.worker.in_flight / candidate.worker.weight for candidate in candidates]
