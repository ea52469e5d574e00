"""The cheaper of two random candidates."""

from collections.abc import Sequence
from random import Random

from policies.base import Candidate, RouteRequest


class PowerOfTwo:
    """Draws two different candidates at random and picks the cheaper one, the first drawn if they are equal.

    Several gateways that cannot see each other's requests avoid choosing the same worker at the same moment, at the price
    of a slightly longer queue than the least loaded worker's. After Mitzenmacher, "The Power of Two Choices in Randomized
    Load Balancing", IEEE TPDS 12(10), 2001.
    """

    __slots__ = ("_random",)

    def __init__(self, *, rng: Random) -> None:
        """`rng`: the policy's own generator."""
        self._random = rng.random

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], costs: Sequence[float]) -> int:  # noqa: ARG002
        """The index of the cheaper one."""
        count = len(costs)
        if count == 1:
            return 0
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        if second >= first:  # the second is drawn from the others: skip the first one's place
            second += 1
        return second if costs[second] < costs[first] else first
