"""Emptiest KV cache first."""

from collections.abc import Sequence
from typing import ClassVar

from policies.base import Candidate, RouteRequest


class KvPressure:
    """Cost: share of the KV cache that running requests and this one take. Unit: a share, above 1 where it does not suffice.

        (in_flight_tokens_i + max(0, P - match_i)) / capacity_i

    As vLLM's ``kv_cache_usage_perc`` counts it, blocks that are only cached are free. llm-d's `kv-cache-utilization-scorer` takes ``1 -
    usage`` from a scrape; here it is the prompts in flight as counted by the gateway, answers left out. Where a worker's capacity is
    not known, the mean of the others' stands for it; 0 for all if none is.
    """

    __slots__ = ()
    needs_match: ClassVar[bool] = True

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The share for each."""
        capacities = [candidate.worker.capabilities.kv_capacity_tokens for candidate in candidates]
        known = [capacity for capacity in capacities if capacity is not None]
        if not known:
            return [0.0] * len(candidates)
        mean = sum(known) / len(known)
        prompt = request.prompt_tokens
        return [
            (candidate.worker.in_flight_tokens + max(0, prompt - candidate.match.tokens)) / (capacity or mean)
            for candidate, capacity in zip(candidates, capacities, strict=True)
        ]
