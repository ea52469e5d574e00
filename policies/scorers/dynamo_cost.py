"""NVIDIA Dynamo's KV router cost."""

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar

from policies.base import Candidate, RouteRequest


class DynamoCost:
    """Cost: ``prefill_load_scale · max(0, pending_i + P - credit_i) / B + decode blocks_i``. Unit: blocks.

    After `lib/kv-router` of ai-dynamo 1.6: credit = device + 0.75 · l1 + 0.25 · l2 tokens of the match, pending = prompt tokens that
    the worker has still to compute, decode blocks = KV blocks of its requests in flight (here: of their prompts, for the gateway does
    not count answers). Defaults as there: scale 1, temperature 0, no decay. For comparison; a prompt of unknown length counts as 0.
    """

    __slots__ = ("_block", "_scale")
    needs_match: ClassVar[bool] = True

    def __init__(self, *, prefill_load_scale: float = 1.0, block_size: int = 16) -> None:
        """`block_size`: in tokens, of workers that do not tell theirs.

        Raises:
            ValueError: the scale is negative or not finite, or the block size below 1.
        """
        if not (isfinite(prefill_load_scale) and prefill_load_scale >= 0):
            raise ValueError("prefill_load_scale must be a finite number, at least 0")
        if block_size < 1:
            raise ValueError("block_size must be at least 1")
        self._scale = prefill_load_scale
        self._block = block_size

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The blocks for each."""
        costs: list[float] = []
        for candidate in candidates:
            worker, match = candidate.worker, candidate.match
            block = worker.capabilities.block_size or self._block
            credit = match.device + 0.75 * match.l1 + 0.25 * match.l2
            prefill = max(0.0, worker.pending_tokens + request.prompt_tokens - credit)
            costs.append((self._scale * prefill + worker.in_flight_tokens) / block)
        return costs
