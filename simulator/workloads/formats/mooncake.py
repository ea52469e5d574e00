"""Mooncake's traces (FAST'25): JSON lines with chained ids of blocks of 512 tokens.

``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...]}``; ids are global, and an id
stands for its block and everything before it. Source: github.com/kvcache-ai/Mooncake, FAST25-release.
"""

from array import array
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

import msgspec

from simulator.workloads.formats.reading import records
from simulator.workloads.workload import Workload, WorkloadError, WorkRequest

_ACCEPTED = '{"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [ids]}'
_COARSE = 1.0


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_DECODER = msgspec.json.Decoder(_Line)


def mooncake(path: Path, *, seed: int = 0, block_tokens: int = 512, spread: float = 3.0) -> Workload:
    """Read a Mooncake trace.

    The file has no sessions: each request is its own.

    Args:
        path: JSON lines, plain or gzip.
        seed: of the arrivals' spreading.
        block_tokens: tokens per hash id.
        spread: where arrivals were recorded in steps (half of the gaps between time stamps or more are above one
            second), each is moved by chance into the gap before the next time stamp, at most so many seconds; else TTFT
            tails would be an artefact of the steps. 0 keeps them as they are.

    Raises:
        WorkloadError: with the line's number.
    """
    read: list[tuple[float, _Line, array[int]]] = []
    for number, line in records(path, _DECODER, _ACCEPTED):
        expected = -(-line.input_length // block_tokens)
        if line.input_length < 1 or len(line.hash_ids) != expected:
            raise WorkloadError.at(
                path,
                number,
                f"{len(line.hash_ids)} hash_ids for an input_length of {line.input_length}; "
                f"one for each {block_tokens} tokens begun is accepted (block_tokens says how many)",
            )
        if not 0 <= line.timestamp < float("inf"):
            raise WorkloadError.at(path, number, f"timestamp {line.timestamp}; milliseconds from 0 are accepted")
        try:
            blocks = array("q", line.hash_ids)
        except OverflowError as error:
            raise WorkloadError.at(path, number, "a hash id is above 2**63 - 1") from error
        line.hash_ids = []
        read.append((line.timestamp / 1000, line, blocks))
    read.sort(key=lambda entry: entry[0])
    arrivals, moved = _spread([time for time, _, _ in read], spread, Random(seed))
    order = sorted(range(len(read)), key=arrivals.__getitem__)
    return Workload(
        name=path.name.split(".")[0],
        block_tokens=block_tokens,
        seed=seed,
        requests=[
            WorkRequest(
                id=f"r{index}",
                time=arrivals[index],
                session=f"r{index}",
                prompt_tokens=read[index][1].input_length,
                output_tokens=max(read[index][1].output_length, 1),
                blocks=read[index][2],
            )
            for index in order
        ],
        notes=["Arrivals were recorded in steps and are spread inside them by chance."] if moved else [],
    )


def _spread(times: list[float], spread: float, random: Random) -> tuple[list[float], bool]:
    """Arrival times in the order of `times` (ascending), and whether they were moved."""
    stamps = sorted(set(times))
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    if spread <= 0 or not gaps or median(gaps) < _COARSE:
        return times, False
    room = {stamp: min(gap, spread) for stamp, gap in zip(stamps, gaps, strict=False)}
    return [time + random.random() * room.get(time, min(median(gaps), spread)) for time in times], True
