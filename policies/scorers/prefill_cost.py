"""What a prefill costs: its request, and all that come behind it."""

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar, Final, Literal

from policies.base import Candidate, Match, RouteRequest
from policies.uncached import requests_by_weight

CONGESTION_PRICE: Final = 4.0
"""From 2 to 8 hits and times differ by a few percent on Mooncake's traces; at 0, thrashing caches lose a third of their hits."""

OCCUPANCY: Final = 1.0
"""Of 0, 0.5, 1, 1.5 and 2, the one that is near the best for four slots at 60 to 120 % load, and for one hot prefix."""

ASSUMED_SLOTS: Final = 12
"""Small, for too few slots cost next to nothing and too many let requests wait: four taken for 32 doubled the mean wait."""


_ROOMY: Final = 0.5
"""Share of its slots up to which a worker counts as one that has room; at 0 and 0.5 Mooncake's traces show no difference beyond noise."""


class PrefillCost:
    """Cost: prompt tokens to be computed before and for this request, and what its own do to others. Unit: tokens.

    For worker i, with u = tokens of this prompt that it does not hold and P = those of the whole prompt::

        cost_i = pending_tokens_i / weight_i + u_i · (1 + congestion)
               + P · (occupancy · in_flight_i / (slots_i · weight_i) + full_i)

        congestion = congestion_price · share of the workers that have a prefill pending
        full_i = 0 if i has fewer requests than slots, or all workers have as many
                 1 + congestion if another worker has at most half as many requests as slots, else 1

    The first two terms are the predicted time to first token in units of 1 / (prefill rate), which cancels when workers are
    alike, with the request's own share of it priced above its duration: whoever comes behind it on that worker waits for it
    as well. On an idle fleet nobody does, and the rule is greedy; on a busy one, what is cached somewhere is worth a
    longer wait. In our study of 2026-12-01 the price followed the mean queue in seconds; a share of busy workers
    needs no rate, is bounded, and did as well on the same traces (docs/policies.md).

    The last line is the decode load: with as many requests as slots a worker costs `occupancy` whole prompts more than an
    empty one, and one more when a request would wait there for a slot that it finds elsewhere; where it finds it without waiting long for
    others, that costs as much as computing the prompt there. It keeps one hot prefix from burying its worker: there every request adds
    few tokens and fills a slot. Once all workers are full the caches count again.

    The unit cancels: twice the tokens everywhere means the same order. More of the prompt held never makes a candidate
    worse, more pending tokens never better. When the length of the prompt is not known there is no cost to tell.
    """

    __slots__ = ("_assumed_slots", "_by_load", "_occupancy", "_price")
    needs_match: ClassVar[bool] = True

    def __init__(
        self,
        *,
        congestion_price: float = CONGESTION_PRICE,
        occupancy: float = OCCUPANCY,
        assumed_slots: int = ASSUMED_SLOTS,
        without_prompt: Literal["nothing", "load"] = "nothing",
    ) -> None:
        """`assumed_slots` stand for those of a worker whose capabilities do not say; it is never taken for full.

        A prompt of unknown length costs the same everywhere, or, with `without_prompt` ``load``, as `in-flight` says.

        Raises:
            ValueError: `congestion_price` or `occupancy` is negative or not finite, or `assumed_slots` is below 1.
        """
        if not (isfinite(congestion_price) and congestion_price >= 0):
            raise ValueError("congestion_price must be a finite number, at least 0")
        if not (isfinite(occupancy) and occupancy >= 0):
            raise ValueError("occupancy must be a finite number, at least 0")
        if assumed_slots < 1:
            raise ValueError("assumed_slots must be at least 1")
        self._price = congestion_price
        self._occupancy = occupancy
        self._assumed_slots = assumed_slots
        self._by_load = without_prompt == "load"

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The tokens for each."""
        prompt = request.prompt_tokens
        if prompt <= 0:
            return requests_by_weight(candidates) if self._by_load else [0.0] * len(candidates)
        # One pass and few names: a policy that is asked for every request is worth spelling out.
        per_request = self._occupancy * prompt
        assumed = self._assumed_slots
        busy = 0
        roomy = False
        full: list[int] | None = None
        loads: list[float] = []
        rests: list[int] = []
        last: Match | None = None
        rest = prompt
        for candidate in candidates:
            match = candidate.match
            if match is not last:  # workers that hold the same share one
                last = match
                rest = max(0, prompt - match.device - match.l1 - match.l2)
            rests.append(rest)
            worker = candidate.worker
            in_flight = worker.in_flight
            if not in_flight:
                roomy = True
                loads.append(worker.pending_tokens)
                continue
            if worker.pending:
                busy += 1
            slots = worker.capabilities.slots
            if slots is None:
                taken = in_flight / assumed
            else:
                taken = in_flight / slots
                if taken >= 1:
                    full = [] if full is None else full
                    full.append(len(loads))
            if taken <= _ROOMY:
                roomy = True
            load = worker.pending_tokens + per_request * taken
            loads.append(load if worker.weight == 1 else load / worker.weight)
        price = 1 + self._price * busy / len(loads)
        if full is not None and len(full) < len(loads):
            elsewhere = prompt * price if roomy else prompt
            for index in full:
                loads[index] += elsewhere
        return [load + rest * price for load, rest in zip(loads, rests, strict=True)]
