"""What came out of a replay: per request in arrays, over time in samples, in all as a summary."""

import enum
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.fleet.series import Series


class Outcome(enum.IntEnum):
    """How a request ended."""

    COMPLETED = 0
    REFUSED = 1
    """No worker could take it, or the policy let none through."""
    FAILED = 2
    """Its worker gave up on it: no compiled shape takes it."""
    UNENDED = 3
    """Not ended yet; never in a finished replay."""
    NEVER_CAME = 4
    """What it would have followed was refused: only with admission."""


NOT_A_TIME = math.nan


@dataclass(slots=True)
class Requests:
    """One entry per request in every array, in the workload's order. Times and durations in seconds, lengths in tokens.

    Attributes:
        arrival: seconds from the start.
        worker: index of the worker that it was sent to; -1: none.
        outcome: an `Outcome`.
        ttft, e2e: from its arrival to its first token and to its end; NaN where there was none.
        refused_after: from its arrival to its refusal; NaN where there was none.
        prompt, output: lengths; `output` as asked for.
        predicted: leading tokens that the chosen worker was believed to hold, in any tier.
        device, l1, l2: tokens that the worker did not have to compute, by where they came from.
    """

    arrival: "array[float]"
    worker: "array[int]"
    outcome: "array[int]"
    ttft: "array[float]"
    e2e: "array[float]"
    refused_after: "array[float]"
    prompt: "array[int]"
    output: "array[int]"
    predicted: "array[int]"
    device: "array[int]"
    l1: "array[int]"
    l2: "array[int]"

    @classmethod
    def blank(cls, prompt: Iterable[int], output: Iterable[int]) -> "Requests":
        """Entries for requests of these lengths of which nothing is known yet."""
        prompts, outputs = array("l", prompt), array("l", output)
        count = len(prompts)

        def numbers() -> "array[int]":
            return array("l", bytes(array("l").itemsize * count))

        def times() -> "array[float]":
            return array("d", [NOT_A_TIME]) * count

        return cls(
            arrival=times(),
            worker=array("h", [-1]) * count,
            outcome=array("b", [Outcome.UNENDED]) * count,
            ttft=times(),
            e2e=times(),
            refused_after=times(),
            prompt=prompts,
            output=outputs,
            predicted=numbers(),
            device=numbers(),
            l1=numbers(),
            l2=numbers(),
        )

    def __len__(self) -> int:
        return len(self.prompt)

    def count(self, outcome: Outcome) -> int:
        """How many ended like that."""
        return self.outcome.count(outcome)


@dataclass(slots=True, kw_only=True)
class ReplayResult:
    """One policy's run.

    Attributes:
        policy: its name.
        workload: the workload's name.
        workers: ids, by the index that `requests.worker` has.
        profile: name of the workers' profile.
        seed: of the run.
        knowledge: what the policy wanted to know of the caches.
        requests: one by one.
        series: over time.
        duration: seconds from the first arrival to the last end.
        pooled_lru_hit_rate, infinite_hit_rate: of prompt tokens, what one cache could have spared; see `simulator.fleet.bounds`.
        faults: how often a step of the policy misbehaved; `last_fault` says how.
        wall: seconds that the replay took; 0 if nobody measured.
        hints: what became of the hints, by rule, as the gateway's admin API has it; None: there were none to be.
    """

    policy: str
    workload: str
    workers: Sequence[str]
    profile: str
    seed: int
    knowledge: str
    requests: Requests
    series: Series
    duration: float
    pooled_lru_hit_rate: float
    infinite_hit_rate: float
    faults: int = 0
    last_fault: str = ""
    wall: float = 0.0
    hints: "Mapping[str, Mapping[str, Any]] | None" = None
    _sorted: "list[float]" = field(default_factory=list, repr=False)

    @property
    def ttfts(self) -> Sequence[float]:
        """Times to first token of the requests that had one, in seconds, ascending."""
        if not self._sorted:
            self._sorted = sorted(ttft for ttft in self.requests.ttft if not math.isnan(ttft))
        return self._sorted

    def ttft_percentile(self, percent: float) -> float | None:
        """The time to first token that `percent` of the requests did not exceed (nearest rank); None without requests."""
        ttfts = self.ttfts
        if not ttfts:
            return None
        return ttfts[max(0, math.ceil(percent / 100 * len(ttfts)) - 1)]

    def computed_by_worker(self) -> list[int]:
        """Prompt tokens that each worker computed."""
        requests = self.requests
        computed = [0] * len(self.workers)
        for index, worker in enumerate(requests.worker):
            if not math.isnan(requests.ttft[index]):
                computed[worker] += (
                    requests.prompt[index] - requests.device[index] - requests.l1[index] - requests.l2[index]
                )
        return computed

    def summary(self) -> dict[str, Any]:
        """The figures of the whole run, JSON-ready; None where there is nothing to tell.

        Hit rates are shares of the prompt tokens of all requests that were answered. `load_max_over_mean` compares the prompt
        tokens that the workers computed. `output_tokens_per_s` is over the whole duration. `hints` is there only if any could be given.
        """
        requests = self.requests
        answered = [index for index, ttft in enumerate(requests.ttft) if not math.isnan(ttft)]
        ended = [e2e for index, e2e in enumerate(requests.e2e) if requests.outcome[index] == Outcome.COMPLETED]
        prompt = sum(requests.prompt[index] for index in answered)
        device, l1, l2, predicted = (
            sum(held[index] for index in answered)
            for held in (requests.device, requests.l1, requests.l2, requests.predicted)
        )
        output = sum(
            tokens for index, tokens in enumerate(requests.output) if requests.outcome[index] == Outcome.COMPLETED
        )
        computed = self.computed_by_worker()
        hints = {} if self.hints is None else {"hints": self.hints}
        return {
            "requests": len(requests),
            "refused": requests.count(Outcome.REFUSED),
            "failed": requests.count(Outcome.FAILED),
            "hit_rate": _ratio(device + l1 + l2, prompt),
            "hit_rate_device": _ratio(device, prompt),
            "hit_rate_l1": _ratio(l1, prompt),
            "hit_rate_l2": _ratio(l2, prompt),
            "predicted_hit_rate": None if self.knowledge == "none" else _ratio(predicted, prompt),
            "pooled_lru_hit_rate": self.pooled_lru_hit_rate,
            "infinite_hit_rate": self.infinite_hit_rate,
            "ttft_mean_s": _ratio(sum(self.ttfts), len(answered)),
            "ttft_p50_s": self.ttft_percentile(50),
            "ttft_p90_s": self.ttft_percentile(90),
            "ttft_p99_s": self.ttft_percentile(99),
            "e2e_mean_s": _ratio(sum(ended), len(ended)),
            "output_tokens_per_s": _ratio(output, self.duration),
            "load_max_over_mean": _ratio(max(computed) * len(computed), sum(computed)),
            "duration_s": self.duration,
            "policy_faults": self.faults,
            "wall_s": self.wall,
            **hints,
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
