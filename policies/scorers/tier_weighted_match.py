"""Longest match first, tokens in slower tiers counting less."""

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar

from policies.base import Candidate, RouteRequest


class TierWeightedMatch:
    """Cost: ``1 - (device·device_i + l1·l1_i + l2·l2_i) / P``, 0 for all when P is not known. Unit: a share in [0, 1].

    The default weights are those of NVIDIA Dynamo's router (1.0, 0.75, 0.25); llm-d's precise prefix scorer has 1.0 and 0.8.
    """

    __slots__ = ("_device", "_l1", "_l2")
    needs_match: ClassVar[bool] = True

    def __init__(self, *, device: float = 1.0, l1: float = 0.75, l2: float = 0.25) -> None:
        """What a token in each tier counts.

        Raises:
            ValueError: one is not in [0, 1].
        """
        if not all(isfinite(weight) and 0 <= weight <= 1 for weight in (device, l1, l2)):
            raise ValueError("device, l1 and l2 must be in [0, 1]")
        self._device, self._l1, self._l2 = device, l1, l2

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The share for each."""
        prompt = request.prompt_tokens
        if prompt <= 0:
            return [0.0] * len(candidates)
        device, l1, l2 = self._device, self._l1, self._l2
        return [
            1 - min(1.0, (device * match.device + l1 * match.l1 + l2 * match.l2) / prompt)
            for match in [candidate.match for candidate in candidates]
        ]
