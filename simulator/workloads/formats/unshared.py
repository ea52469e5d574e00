"""Requests of which only the lengths are known."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from simulator.workloads.arrivals import poisson
from simulator.workloads.runs import Ids
from simulator.workloads.workload import Workload, WorkloadError, WorkRequest


def unshared(
    path: Path, read: Sequence[tuple[float, int, int]], *, seed: int, rate: float, block_tokens: int
) -> Workload:
    """A workload in which every prompt is like no other, and a session of its own.

    Args:
        path: for the name.
        read: (time in seconds from any zero, prompt tokens, output tokens).
        seed: of arrivals by chance.
        rate: requests per second of a Poisson process in place of the times, in the order of `read`; 0: as they are.
        block_tokens: tokens per content id.
    """
    if block_tokens < 1:
        raise WorkloadError(f"block_tokens is {block_tokens}; a positive number is accepted")
    if rate:
        arrivals = poisson(Random(seed), rate, len(read))
        entries = [(time, prompt, output) for time, (_, prompt, output) in zip(arrivals, read, strict=True)]
    else:
        start = min((time for time, _, _ in read), default=0.0)
        entries = sorted(((time - start, prompt, output) for time, prompt, output in read), key=lambda entry: entry[0])
    ids = Ids()
    return Workload(
        name=path.name.split(".")[0],
        block_tokens=block_tokens,
        seed=seed,
        requests=[
            WorkRequest(
                id=f"r{index}",
                time=time,
                session=f"r{index}",
                prompt_tokens=prompt,
                output_tokens=output,
                blocks=ids.fresh(-(-prompt // block_tokens)),
            )
            for index, (time, prompt, output) in enumerate(entries)
        ],
        notes=[
            "The recording has lengths only: no prompt shares anything with another.",
            *([f"Arrivals by chance, {rate:g} requests per second."] if rate else []),
        ],
    )
