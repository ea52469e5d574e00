"""The longest prefix first, as a share of the prompt."""

from collections.abc import Sequence
from typing import ClassVar

from policies.base import Candidate, RouteRequest
from policies.uncached import uncached_tokens


class PrefixMatch:
    """Cost: the share of the whole prompt that the worker does not hold, ``1 - match / prompt_tokens``, in [0, 1].

    One minus the score of llm-d's `prefix-cache-scorer` at its default weights. It cannot tell a short prompt's share from a
    long one's, for which `uncached-tokens` is there; equal for all when the prompt's length is not known.
    """

    __slots__ = ()
    needs_match: ClassVar[bool] = True

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The share for each."""
        prompt = request.prompt_tokens
        if prompt <= 0:
            return [0.0] * len(candidates)
        return [tokens / prompt for tokens in uncached_tokens(request, candidates)]
