"""The predicted time to the first token, and what it costs the others: the default policy."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import ClassVar, Final

from policies.base import NO_MATCH, Candidate, CapabilitiesView, Match, RouteRequest, WorkerView
from policies.uncached import requests_by_weight

CONGESTION_PRICE: Final = 4.0
"""As in `policies.scorers.prefill_cost`: from 2 to 8 the public traces differ by noise only."""

OCCUPANCY: Final = 1.0
"""Whole prompts that a full batch costs; see there."""

ASSUMED_SLOTS: Final = 12
"""Of a worker that does not tell; too few cost next to nothing, too many let requests wait."""

SLOT_SHARE: Final = 0.3
"""Share of the wait for a slot that counts. Where all slots are taken, whoever goes elsewhere waits there for somebody too, and computes
more, which holds slots longer: in full, this wait scatters conversations. On `trn2-70b` at nine tenths of its slots, three seeds: mean
TTFT 0.87 s in full, 0.82 at a half, 0.76 at 0.3, 0.77 at 0.2, 0.86 at 0.1.
"""

SLOT_PROMPTS: Final = 2.0
"""Times its own whole prefill that the wait for a slot counts at most: where all workers are full, caches decide again."""

ALIKE: Final = 0.85
"""Workers whose predictions for a prompt lie within this ratio of the median (or its inverse) count as equally fast.

Learned speeds of equal workers differ by a percent or two of noise. Taken at their word, the one that seems fastest gets every
new prompt that finds several workers idle: on the Claude Code trace twice its share, and a fifth more seconds to the first token.
"""


class Ttft:
    """Cost: predicted seconds to the first token, and the seconds that others lose by it. Unit: seconds.

    For worker i and a prompt of P tokens::

        cost_i = (wait_i + slot_i + load_i + prefill_i · (1 + congestion) + hold_back_i) / weight_i

        wait_i       prefill work sent there before and not over yet (`WorkerView.backlog`), less what has passed since it began where
                     one prompt is computed at a time, unless its requests may not all fit the KV cache: then the first may
                     not have begun, for want of blocks
        slot_i       where all slots are taken: (in_flight_i - slots_i + 1) · hold_i / slots_i, as far as that exceeds wait_i;
                     of that `SLOT_SHARE`, at most `SLOT_PROMPTS` whole prefills; 0 where prompts share steps and do not all fit
                     the KV cache: what is short there is blocks
        load_i       time to bring what it holds in l1 and l2 into the device, if computing it would take longer; else it is computed
        prefill_i    overhead_i + padded tokens_i / rate_i
        congestion   congestion_price · share of the candidates that have a prefill to do
        hold_back_i  occupancy · (overhead_i + P / rate_i) · in_flight_i / slots_i

    Padded tokens are what the device computes: buckets, and credit in whole segments, as its capabilities say. Rate, overhead and hold
    are learned; workers that differ by noise only count as equally fast (`ALIKE`).

    `congestion` prices the delay that a prefill imposes on all that come behind it. On an idle fleet nobody does and the rule is
    greedy; on a busy one, what is cached somewhere is worth a longer wait. `hold_back` is what its own streams lose while this prompt is
    computed and decoded among them: it keeps one hot prefix from burying its worker.

    Where the prompt's length is not known the cost is requests in flight by weight: a number, but not of seconds.
    """

    __slots__ = ("_assumed_slots", "_occupancy", "_price")
    needs_match: ClassVar[bool] = True

    def __init__(
        self,
        *,
        congestion_price: float = CONGESTION_PRICE,
        occupancy: float = OCCUPANCY,
        assumed_slots: int = ASSUMED_SLOTS,
    ) -> None:
        """None of them needs tuning; `assumed_slots` stand for those of a worker whose capabilities do not say.

        Raises:
            ValueError: `congestion_price` or `occupancy` is negative or not finite, or `assumed_slots` is below 1.
        """
        for name, value in (("congestion_price", congestion_price), ("occupancy", occupancy)):
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number, at least 0")
        if assumed_slots < 1:
            raise ValueError("assumed_slots must be at least 1")
        self._price = congestion_price
        self._occupancy = occupancy
        self._assumed_slots = assumed_slots

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The seconds for each."""
        prompt = request.prompt_tokens
        if prompt <= 0:
            return requests_by_weight(candidates)
        # One loop for the many, written for speed (`bench.decide`); `_parts` is the same in words, and has the few that are unlike the rest.
        now = request.now
        workers = [candidate.worker for candidate in candidates]
        (whole, rate, overhead), unlike = _speeds(workers, prompt)
        stalled = self._occupancy * whole
        stalled_assumed = stalled / self._assumed_slots
        costs: list[float] = []
        held: list[tuple[int, float]] = []  # index and prefill of those that have not the whole prompt to compute
        weighted: list[int] = []
        busy = 0
        for candidate, worker in zip(candidates, workers, strict=False):
            capabilities = worker.capabilities
            match = candidate.match
            cost = 0.0
            if match is not NO_MATCH or capabilities.shaped:
                if capabilities.shaped or match.l1 or match.l2:
                    cost, padded = tokens_to_compute(prompt, match, capabilities, rate)
                else:
                    padded = prompt - match.device
                held.append((len(costs), overhead + padded / rate if padded > 0 else overhead))
            if in_flight := worker.in_flight:
                slots = capabilities.slots
                cost += stalled_assumed * in_flight if slots is None else stalled * in_flight / slots
                wait = worker.backlog
                if wait > 0:
                    busy += 1
                    if (since := worker.prefill_since) and capabilities.prefill == "exclusive":
                        room = capabilities.kv_capacity_tokens
                        if room is None or worker.in_flight_tokens <= room:
                            passed = now - since
                            head = worker.head
                            wait -= passed if passed < head else head  # noqa: FURB136 - min() costs 60 ns more
                    cost += wait
                if slots is not None and in_flight >= slots:
                    cost += _slot_share(worker, slots, whole, wait)
            if worker.weight != 1:
                weighted.append(len(costs))
            costs.append(cost)
        price = 1 + self._price * busy / len(workers)
        own = whole * price
        priced = [cost + own for cost in costs]
        for index, prefill in held:
            priced[index] = costs[index] + prefill * price
        for index, speeds in unlike.items():
            wait, slot, load, prefill, hold_back = self._parts(request, candidates[index], *speeds)
            priced[index] = wait + slot + load + hold_back + prefill * price
        for index in weighted:
            priced[index] /= workers[index].weight
        return priced

    def terms(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        """``wait``, ``slot``, ``load``, ``prefill``, ``congestion`` and ``hold_back`` of each; ``in_flight`` without a known prompt."""
        if request.prompt_tokens <= 0:
            return [{"in_flight": load} for load in requests_by_weight(candidates)]
        common, unlike = _speeds([candidate.worker for candidate in candidates], request.prompt_tokens)
        price = self._price * sum(candidate.worker.backlog > 0 for candidate in candidates) / len(candidates)
        names = ("wait", "slot", "load", "hold_back", "prefill", "congestion")
        found = []
        for index, candidate in enumerate(candidates):
            wait, slot, load, prefill, hold_back = self._parts(request, candidate, *unlike.get(index, common))
            seconds = (wait, slot, load, hold_back, prefill, prefill * price)
            weight = candidate.worker.weight
            found.append({name: value / weight for name, value in zip(names, seconds, strict=True)})
        return found

    def _parts(
        self, request: RouteRequest, candidate: Candidate, whole: float, rate: float, overhead: float
    ) -> tuple[float, float, float, float, float]:
        """Wait, slot, load, prefill and hold-back of one candidate at the speed given, before weight and congestion."""
        worker = candidate.worker
        capabilities = worker.capabilities
        load, padded = tokens_to_compute(request.prompt_tokens, candidate.match, capabilities, rate)
        wait = wait_seconds(worker, request.now)
        in_flight, slots = worker.in_flight, capabilities.slots
        slot = _slot_share(worker, slots, whole, wait) if slots is not None and in_flight >= slots else 0.0
        hold_back = self._occupancy * whole * in_flight / (slots or self._assumed_slots)
        return wait, slot, load, overhead + padded / rate, hold_back


def _speeds(
    workers: Sequence[WorkerView], prompt: int
) -> tuple[tuple[float, float, float], Mapping[int, tuple[float, float, float]]]:
    """Seconds for the whole prompt, rate and overhead: those of the median, and by index those of workers that really differ from it."""
    wholes = [worker.overhead + prompt / worker.rate for worker in workers]
    least, most = min(wholes), max(wholes)
    middle = least if least == most else sorted(wholes)[len(wholes) // 2]
    typical = workers[wholes.index(middle)]
    common = (middle, typical.rate, typical.overhead)
    slowest, fastest = middle / ALIKE, middle * ALIKE
    if fastest <= least and most <= slowest:
        return common, _NOBODY
    return common, {
        index: (whole, workers[index].rate, workers[index].overhead)
        for index, whole in enumerate(wholes)
        if not fastest <= whole <= slowest
    }


_NOBODY: Final[Mapping[int, tuple[float, float, float]]] = {}


def wait_seconds(worker: WorkerView, now: float) -> float:
    """Seconds of prefill sent there before that are not over by `now`, as far as that can be believed."""
    wait = worker.backlog
    if (
        wait > 0
        and worker.prefill_since
        and worker.capabilities.prefill == "exclusive"
        and _fits(worker, worker.capabilities)
    ):
        wait -= min(now - worker.prefill_since, worker.head)
    return wait


def _fits(worker: WorkerView, capabilities: CapabilitiesView) -> bool:
    """Whether the prompts that are there fit the KV cache side by side: else some may wait for blocks, and none is known to have begun."""
    room = capabilities.kv_capacity_tokens
    return room is None or worker.in_flight_tokens <= room


def _slot_share(worker: WorkerView, slots: int, whole: float, wait: float) -> float:
    """What counts of the wait for a slot, where all are taken; `whole` is the seconds that the whole prompt takes there."""
    capabilities = worker.capabilities
    if capabilities.prefill == "chunked" and not _fits(worker, capabilities):
        return 0.0  # it is blocks that are short there, not slots
    return min(SLOT_SHARE * max(0.0, slot_seconds(worker, slots, whole) - wait), SLOT_PROMPTS * whole)


def tokens_to_compute(prompt: int, match: Match, capabilities: CapabilitiesView, rate: float) -> tuple[float, int]:
    """Seconds of loading, and padded tokens of prefill, for the quicker of loading what l1 and l2 hold and computing it."""
    device, lower = match.device, match.l1 + match.l2
    padded = _to_compute(prompt, device + lower, capabilities)
    if not lower:
        return 0.0, padded
    load = capabilities.load_seconds(match.l1, match.l2)
    alone = _to_compute(prompt, device, capabilities)
    return (load, padded) if load < (alone - padded) / rate else (0.0, alone)


def _to_compute(prompt: int, held: int, capabilities: CapabilitiesView) -> int:
    """Tokens that the device computes of the prompt, with credit and padding. More held than there is counts as all of it."""
    held = min(held, prompt)
    if capabilities.shaped:
        return capabilities.padded(prompt - capabilities.credit(prompt, held))
    return prompt - held


def slot_seconds(worker: WorkerView, slots: int, unknown: float) -> float:
    """Seconds until a slot is free: those before us and we leave one by one, each after `hold`; `unknown` as long as that is not known."""
    before = worker.in_flight - slots + 1
    return before * (worker.hold or unknown) / slots if before > 0 else 0.0


def predicted_ttft(request: RouteRequest, candidate: Candidate) -> float | None:
    """Seconds to the first token at this candidate: wait, slot, load and prefill. None where the prompt's length is not known."""
    prompt = request.prompt_tokens
    if prompt <= 0:
        return None
    worker = candidate.worker
    load, padded = tokens_to_compute(prompt, candidate.match, worker.capabilities, worker.rate)
    wait = wait_seconds(worker, request.now)
    slots = worker.capabilities.slots
    if slots is not None:
        wait = max(wait, slot_seconds(worker, slots, worker.overhead + prompt / worker.rate))
    return wait + load + worker.overhead + padded / worker.rate
