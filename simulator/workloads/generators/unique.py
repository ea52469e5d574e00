"""Traffic without any reuse: what cache-aware routing must not make worse."""

from random import Random

from simulator.workloads.arrivals import poisson
from simulator.workloads.numbers import bounded, length
from simulator.workloads.runs import Ids
from simulator.workloads.workload import Workload, WorkRequest


def unique(
    *,
    seed: int = 0,
    requests: int = 5000,
    rate: float = 10.0,
    prompt_tokens: int = 2000,
    output_tokens: int = 200,
    variation: float = 1.0,
    block_tokens: int = 16,
) -> Workload:
    """Requests by a Poisson process, each prompt like no other.

    Args:
        seed: of lengths and arrivals.
        requests: how many.
        rate: requests per second.
        prompt_tokens: mean length of a prompt (log-normal).
        output_tokens: mean length of an answer (log-normal).
        variation: standard deviation divided by mean, of both.
        block_tokens: tokens per content id.

    Raises:
        WorkloadError: a number out of bounds.
    """
    bounded(
        "unique",
        requests,
        or_zero={"variation": variation},
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_tokens=block_tokens,
    )
    random = Random(seed)
    ids = Ids()
    made: list[WorkRequest] = []
    for index, time in enumerate(poisson(random, rate, requests)):
        prompt = length(random, prompt_tokens, variation)
        output = length(random, output_tokens, variation)
        made.append(WorkRequest(f"r{index}", time, f"r{index}", prompt, output, ids.fresh(-(-prompt // block_tokens))))
    return Workload("unique", block_tokens, made, seed, ["No prompt shares anything with another."])
