"""Vidur's processed traces: lengths of prompts and answers, and in some files when they came.

CSV with `num_prefill_tokens`, `num_decode_tokens` and, if known, `arrived_at` (seconds).
Source: github.com/microsoft/vidur, data/processed_traces.
"""

from pathlib import Path

from simulator.workloads.formats.table import rows
from simulator.workloads.formats.unshared import unshared
from simulator.workloads.workload import Workload, WorkloadError


def vidur(path: Path, *, seed: int = 0, rate: float = 0.0, block_tokens: int = 16) -> Workload:
    """Read a Vidur trace; no prompt shares anything with another.

    Args:
        path: CSV, plain or gzip.
        seed: of arrivals by chance.
        rate: requests per second of a Poisson process; 0: as recorded, which the file must have.
        block_tokens: tokens per content id.

    Raises:
        WorkloadError: with the line's number, or that a rate is needed.
    """
    read: list[tuple[float, int, int]] = []
    for row in rows(path, ["num_prefill_tokens", "num_decode_tokens"], ["arrived_at"]):
        if "arrived_at" in row.cells:
            time = row.number("arrived_at")
        elif rate > 0:
            time = 0.0
        else:
            raise WorkloadError.at(path, row.line, "the file has no arrived_at: give a rate in requests per second")
        read.append((time, row.count("num_prefill_tokens"), row.count("num_decode_tokens")))
    return unshared(path, read, seed=seed, rate=rate, block_tokens=block_tokens)
