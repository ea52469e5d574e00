"""The cheapest candidate."""

from collections.abc import Sequence
from random import Random

from policies.base import Candidate, RouteRequest


class LowestCost:
    """Picks the candidate of the lowest cost; among equals one at random, each as likely.

    Without the randomness every idle fleet would begin with its first worker, and all gateways with the same one.
    """

    __slots__ = ("_random",)

    def __init__(self, *, rng: Random) -> None:
        """`rng`: the policy's own generator."""
        self._random = rng.random

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], costs: Sequence[float]) -> int:  # noqa: ARG002
        """The index of the cheapest."""
        least = min(costs)
        ties = costs.count(least)
        if ties == 1:
            return costs.index(least)
        nth = int(self._random() * ties)
        if ties == len(costs):
            return nth
        return [index for index, cost in enumerate(costs) if cost == least][nth]
