"""Soonest first token, whatever it costs the others."""

from collections.abc import Sequence
from typing import ClassVar

from policies.base import Candidate, RouteRequest
from policies.scorers.running_requests import shares
from policies.scorers.ttft import predicted_ttft


class PredictedLatency:
    """Cost: predicted seconds to the first token, as a share in [0, 1] between the best and the worst candidate.

    The greedy part of `ttft`, on a scale that adds up with the other shares; 0 for all when the prompt's length is not known. The
    Inference Gateway's `predictedLatency` trains a model for it; here it is the learned prefill rate and overhead.
    """

    __slots__ = ()
    needs_match: ClassVar[bool] = True

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The share for each."""
        return shares([predicted_ttft(request, candidate) or 0.0 for candidate in candidates])
