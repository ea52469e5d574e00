"""Azure's LLM inference traces: when requests came and how long they were; nothing on what they shared.

CSV with `TIMESTAMP` (date and time), `ContextTokens` and `GeneratedTokens`.
Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_{conv,code}.csv ("Splitwise", ISCA 2024).
"""

from datetime import UTC, datetime
from pathlib import Path

from simulator.workloads.formats.table import Row, rows
from simulator.workloads.formats.unshared import unshared
from simulator.workloads.workload import Workload


def azure(path: Path, *, seed: int = 0, rate: float = 0.0, block_tokens: int = 16) -> Workload:
    """Read an Azure trace; no prompt shares anything with another.

    Args:
        path: CSV, plain or gzip.
        seed: of arrivals by chance.
        rate: requests per second of a Poisson process in place of the recorded times; 0: as recorded.
        block_tokens: tokens per content id.

    Raises:
        WorkloadError: with the line's number.
    """
    read = [
        (_time(row), row.count("ContextTokens"), row.count("GeneratedTokens"))
        for row in rows(path, ["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
    ]
    return unshared(path, read, seed=seed, rate=rate, block_tokens=block_tokens)


def _time(row: Row) -> float:
    try:
        time = datetime.fromisoformat(row.cells["TIMESTAMP"])
    except ValueError:
        raise row.error("TIMESTAMP", "a time like 2023-11-16 18:15:46.6805900 is accepted") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
