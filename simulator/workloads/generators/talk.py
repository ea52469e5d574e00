"""One conversation: each turn brings all the earlier ones along, and comes when the answer before it has been read."""

from collections.abc import Iterator
from random import Random

from simulator.workloads.numbers import length, pause
from simulator.workloads.text import Text
from simulator.workloads.workload import WorkRequest


def talk(
    random: Random,
    session: str,
    start: float,
    text: Text,
    turns: int,
    *,
    message_tokens: int,
    output_tokens: int,
    variation: float,
    think: float,
) -> Iterator[WorkRequest]:
    """The requests of one conversation, in their order.

    Args:
        random: draws lengths and pauses.
        session: its name; the requests' ids are ``{session}-0``, ``{session}-1``, ...
        start: seconds at which the first one comes.
        text: what stands before the first message.
        turns: how many.
        message_tokens: mean length of a message.
        output_tokens: mean length of an answer.
        variation: standard deviation divided by mean, of both.
        think: mean seconds (exponential) from the end of an answer to the next message.
    """
    after: str | None = None
    for turn in range(turns):
        prompt = text.grown(length(random, message_tokens, variation))
        output = length(random, output_tokens, variation)
        text = prompt.grown(output)
        identity = f"{session}-{turn}"
        yield WorkRequest(
            id=identity,
            time=start,
            session=session,
            prompt_tokens=prompt.tokens,
            output_tokens=output,
            blocks=prompt.blocks,
            after=after,
            delay=pause(random, think) if after else 0.0,
            output_blocks=text.blocks_after(prompt),
        )
        after = identity
