"""LMetric: tokens to compute times requests in the batch."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from policies.base import Candidate, RouteRequest
from policies.uncached import requests_by_weight, uncached_tokens


class LMetric:
    """Cost: ``max(1, pending_tokens + uncached) · (in_flight + 1) / weight²``. Unit: tokens times requests.

    After Zhang et al., "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling",
    arXiv 2603.15202: new prefill tokens if the request is sent there, times the batch size. A factor of either would cancel
    in the comparison, so there is nothing to tune. The product fails where a factor is 0; so the request itself counts in the
    batch, and at least one token is computed of every prompt, which holds for the workers, too.

    Both factors are loads, so both are divided by the weight (below 1 in slow start only).
    """

    __slots__ = ("_by_load",)
    needs_match: ClassVar[bool] = True

    def __init__(self, *, without_prompt: Literal["nothing", "load"] = "nothing") -> None:
        """A prompt of unknown length costs the same everywhere, or, with `without_prompt` ``load``, as `in-flight` says."""
        self._by_load = without_prompt == "load"

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The product for each."""
        if request.prompt_tokens <= 0:
            return requests_by_weight(candidates) if self._by_load else [0.0] * len(candidates)
        costs: list[float] = []
        for candidate, uncached in zip(candidates, uncached_tokens(request, candidates), strict=True):
            worker = candidate.worker
            cost = (worker.pending_tokens + uncached or 1) * (worker.in_flight + 1)
            costs.append(cost if worker.weight == 1 else cost / worker.weight**2)
        return costs
