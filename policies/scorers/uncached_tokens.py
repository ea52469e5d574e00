"""Fewest tokens to compute first."""

from collections.abc import Sequence
from typing import ClassVar

from policies.base import Candidate, RouteRequest
from policies.uncached import uncached_tokens


class UncachedTokens:
    """Cost: tokens of this prompt that the worker does not hold in any tier, ``prompt_tokens - match``. Unit: tokens.

    Equal for all when the prompt's length is not known.
    """

    __slots__ = ()
    needs_match: ClassVar[bool] = True

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The tokens for each."""
        return uncached_tokens(request, candidates) if request.prompt_tokens > 0 else [0.0] * len(candidates)
