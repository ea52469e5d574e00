"""People in conversations: each turn brings all the earlier ones along, and comes when the answer has been read."""

from random import Random

from simulator.workloads.arrivals import poisson
from simulator.workloads.generators.talk import talk
from simulator.workloads.numbers import bounded, length
from simulator.workloads.runs import Ids
from simulator.workloads.text import Text
from simulator.workloads.workload import Workload, WorkRequest


def chat(
    *,
    seed: int = 0,
    users: int = 400,
    rate: float = 1.0,
    turns: int = 8,
    system_prompts: int = 4,
    system_tokens: int = 800,
    message_tokens: int = 250,
    output_tokens: int = 300,
    variation: float = 0.8,
    think: float = 20.0,
    block_tokens: int = 16,
) -> Workload:
    """Conversations that begin by a Poisson process and go on in a closed loop.

    Args:
        seed: of all that is by chance.
        users: how many conversations.
        rate: conversations begun per second.
        turns: mean number of turns of one (log-normal).
        system_prompts: how many applications, each with its own system prompt, one as popular as the other.
        system_tokens: length of a system prompt.
        message_tokens: mean length of a message.
        output_tokens: mean length of an answer.
        variation: standard deviation divided by mean, of turns, messages and answers.
        think: mean seconds (exponential) from the end of an answer to the next message.
        block_tokens: tokens per content id.

    Raises:
        WorkloadError: a number out of bounds.
    """
    bounded(
        "chat",
        users * turns,
        or_zero={"variation": variation, "think": think},
        users=users,
        turns=turns,
        system_prompts=system_prompts,
        system_tokens=system_tokens,
        message_tokens=message_tokens,
        output_tokens=output_tokens,
        block_tokens=block_tokens,
    )
    random = Random(seed)
    ids = Ids()
    systems = [Text(ids, block_tokens).grown(system_tokens) for _ in range(system_prompts)]
    requests: list[WorkRequest] = []
    for user, start in enumerate(poisson(random, rate, users)):
        system = random.choice(systems)
        requests += talk(
            random,
            f"u{user}",
            start,
            system,
            length(random, turns, variation),
            message_tokens=message_tokens,
            output_tokens=output_tokens,
            variation=variation,
            think=think,
        )
    return Workload("chat", block_tokens, requests, seed, ["Closed loop: a turn waits for the answer before it."])
