"""Whoever waited longest for a request is next."""

from collections.abc import Sequence

from policies.base import Candidate, Decision, RouteRequest
from policies.turns import Turns


class RoundRobin:
    """Cost: place in the line, as a share in [0, 1]: 0 for the worker served least recently, 1 for the one served last.

    Instead of a position that wanders through a list, each worker has the number of the decision that served it last. So
    workers that come, go, fail or are left out of some requests do not move the others' turns, and a retry takes the turn
    of the worker it went to. Workers not served yet come first, in random order (if the picker breaks ties at random).

    A worker of weight w (slow start) has its turn every 1/w rounds: with n candidates it is placed (n - 1) ·
    (1/w - 1) decisions further back: as many as the others need for the rounds that it sits out.
    """

    __slots__ = ("_served",)

    def __init__(self) -> None:
        self._served = Turns()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """The share for each."""
        served = self._served.get
        others = len(candidates) - 1
        turns = [
            served(candidate.worker.id, 0)
            if candidate.worker.weight == 1
            else served(candidate.worker.id, 0) + others * (1 / candidate.worker.weight - 1)
            for candidate in candidates
        ]
        first = min(turns)
        span = max(turns) - first
        return [(turn - first) / span for turn in turns] if span else [0.0] * len(turns)

    def observe(self, request: RouteRequest, decision: Decision) -> None:  # noqa: ARG002
        """Send the chosen worker to the end of the line."""
        self._served.serve(decision)
