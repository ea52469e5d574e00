"""Requests for a LoRA adapter to the workers that have loaded it."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest
from policies.keys import adapter_of


class LoraAffinity:
    """Cost: 0 for workers that list the adapter, 1 for the others; 0 for all when the request names none. Unit: a share.

    The filter `lora` drops the others; this one lets a busy holder be left for a worker that must load the adapter first. llm-d's
    `lora-affinity-scorer` has steps between for free adapter places, which workers do not tell us.
    """

    __slots__ = ()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The share for each."""
        adapter = adapter_of(request)
        if not adapter:
            return [0.0] * len(candidates)
        return [float(adapter not in candidate.worker.capabilities.lora_adapters) for candidate in candidates]
