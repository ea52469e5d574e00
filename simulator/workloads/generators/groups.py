"""Groups of users with a long system prompt each: what llm-d publishes its routing figures for.

150 groups with 6,000 tokens in common, 5 questions of 1,200 tokens in each, 1,000 output tokens, at rates from 3 to 60
requests per second. Source of shape, rates and seconds: inference-perf's `shared_prefix` data set and the load stages in
llm-d-benchmark, workload/profiles/inference-perf/guide_precise-prefix-cache-routing_1.yaml.in.
"""

from random import Random

from simulator.workloads.arrivals import ladder
from simulator.workloads.numbers import bounded
from simulator.workloads.runs import Ids
from simulator.workloads.text import Text
from simulator.workloads.workload import Workload, WorkloadError, WorkRequest

LADDER = "15x50 3x20 10x20 15x20 20x38 22x34 25x30 30x25 35x21 40x38 43x36 46x33 49x30 52x29 55x27 57x26 60x25"
"""llm-d's stages, requests per second x seconds; the first one is its warm-up."""


def groups(
    *,
    seed: int = 0,
    groups: int = 150,
    prompts: int = 5,
    prefix_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 1000,
    rates: str = LADDER,
    block_tokens: int = 16,
) -> Workload:
    """All prompts in an order by chance, over and over (as inference-perf does), until the last stage ends.

    Args:
        seed: of order and arrivals.
        groups: how many system prompts.
        prompts: how many different questions in each group; each is a session.
        prefix_tokens: length of a system prompt.
        question_tokens: length of what follows it.
        output_tokens: length of each answer.
        rates: stages of a Poisson process, "requests-per-second x seconds" with blanks between: ``3x20 10x20``.
        block_tokens: tokens per content id.

    Raises:
        WorkloadError: a number out of bounds.
    """
    steps = _steps(rates)
    bounded(
        "groups",
        sum(rate * seconds for rate, seconds in steps) + groups * prompts,
        groups=groups,
        prompts=prompts,
        prefix_tokens=prefix_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        block_tokens=block_tokens,
    )
    random = Random(seed)
    ids = Ids()
    texts: list[tuple[str, Text]] = []
    for group in range(groups):
        prefix = Text(ids, block_tokens).grown(prefix_tokens)
        texts.extend((f"g{group}-{prompt}", prefix.grown(question_tokens)) for prompt in range(prompts))
    random.shuffle(texts)
    contents = [(session, text.tokens, text.blocks) for session, text in texts]
    requests: list[WorkRequest] = []
    for index, time in enumerate(ladder(random, steps)):
        session, tokens, blocks = contents[index % len(contents)]
        requests.append(WorkRequest(f"r{index}", time, session, tokens, output_tokens, blocks))
    return Workload("groups", block_tokens, requests, seed, [f"Stages of requests per second x seconds: {rates}."])


def _steps(rates: str) -> list[tuple[float, float]]:
    try:
        steps = [(float(rate), float(seconds)) for rate, seconds in (step.split("x") for step in rates.split())]
    except ValueError:
        steps = []
    if not steps:
        raise WorkloadError(f"groups: rates is {rates!r}; stages like '3x20 10x20' are accepted")
    return steps
