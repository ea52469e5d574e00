"""Fewest requests in flight first."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest
from policies.uncached import requests_by_weight


class InFlight:
    """Cost: requests that the worker would have with this one, divided by its weight, less one. Unit: requests.

    Counted by the gateway at each decision, so it is never older than the last one. The weight is below 1 in slow start and while
    requests fail there: an idle worker of weight 0.1 costs as much as a good one with nine.
    """

    __slots__ = ()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """``(in_flight + 1) / weight - 1`` for each."""
        return requests_by_weight(candidates)
