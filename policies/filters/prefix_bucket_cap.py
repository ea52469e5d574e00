"""Keep away from workers that could not compute the prompt after what they hold of it."""

from collections.abc import Sequence
from typing import ClassVar

from policies.base import Candidate, RouteRequest


class PrefixBucketCap:
    """Drops candidates for whose match the worker has no compiled shape, unless no other is left.

    Neuron's stacks with prefill x prefix buckets raise an exception when the cached prefix is longer than the largest prefix bucket (1,600
    tokens with 1,280 cached and buckets of 512 and 1,024, say): what a cache-aware router likes best is what fails there. Others
    refuse prompts above the largest prefill bucket. `WorkerView.capabilities` says so (`takes`), with the credit that counts there.

    If every candidate is such, all stay: holding less is not in our hands, and the worker's answer says what is wrong.
    """

    __slots__ = ()
    needs_match: ClassVar[bool] = True

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates that can compute the prompt."""
        prompt = request.prompt_tokens
        if prompt <= 0:
            return candidates
        for candidate in candidates:
            if candidate.worker.capabilities.shaped and not _takes(prompt, candidate):
                return [
                    other for other in candidates if not other.worker.capabilities.shaped or _takes(prompt, other)
                ] or candidates
        return candidates


def _takes(prompt: int, candidate: Candidate) -> bool:
    capabilities = candidate.worker.capabilities
    credit = capabilities.credit(prompt, min(candidate.match.tokens, prompt))
    return capabilities.takes(prompt - credit, credit)
