"""Fewest tokens waiting for their prefill first."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


class InFlightTokens:
    """Cost: prompt tokens that the worker has still to compute for others, divided by its weight. Unit: tokens.

    Those of requests that were sent there and whose answer has not begun, without what it held of them (`pending_tokens` of
    a worker): the queue that a new prompt joins where prefills run first come, first served. llm-d's
    `inflight-load-producer` counts the same: uncached tokens, until the first chunk of the answer.
    """

    __slots__ = ()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """``pending_tokens / weight`` for each."""
        return [candidate.worker.pending_tokens / candidate.worker.weight for candidate in candidates]
