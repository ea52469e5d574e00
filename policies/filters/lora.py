"""Keep the workers that have loaded the LoRA adapter that a request names."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest
from policies.keys import adapter_of


class Lora:
    """Drops workers that have not loaded the adapter that the body's `model` names; all stay when none has.

    An adapter is a name that at least one candidate lists in its `lora_adapters`; a request for the fleet's own model is not touched.
    A worker that loads adapters on demand serves one that it does not list as well, only later: hence the fallback to all.
    """

    __slots__ = ()

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates that have it."""
        adapter = adapter_of(request)
        if not adapter:
            return candidates
        having = [candidate for candidate in candidates if adapter in candidate.worker.capabilities.lora_adapters]
        return having if having and len(having) < len(candidates) else candidates
