"""A random cost."""

from collections.abc import Sequence
from random import Random

from policies.base import Candidate, RouteRequest


class Uniform:
    """Cost: a random share, uniform in [0, 1).

    Alone it spreads requests at random; with a small weight beside another scorer it blurs near ties.
    """

    __slots__ = ("_random",)

    def __init__(self, *, rng: Random) -> None:
        """`rng`: the policy's own generator."""
        self._random = rng.random

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """A share for each."""
        random = self._random
        return [random() for _ in candidates]
