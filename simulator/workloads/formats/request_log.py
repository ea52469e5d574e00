"""warmroute's own request log: yesterday's traffic.

JSON lines, one document for each request (`gateway.telemetry.decisions`), of which are read: `time`, `prompt.tokens`,
`actual`, `prefix` (the chain of the prompt's block hashes, hex), `block_size`, `session`, `stage`, `model`; hashes and
sessions compare within one `process` only.
"""

from pathlib import Path

import msgspec

from simulator.workloads.formats.reading import records
from simulator.workloads.runs import Ids, Runs
from simulator.workloads.workload import MOST_TOKENS, Workload, WorkloadError, WorkRequest

_ACCEPTED = (
    '{"id", "time": seconds, "model", "stage", "session", "prompt": {"tokens"}, "actual": {"prompt_tokens", '
    '"output_tokens"}, "prefix": [hex], "block_size", "process"}'
)
_UNKNOWN_OUTPUT = 256
"""Tokens of an answer whose length the worker did not tell, where no other answer's is known either."""


class _Prompt(msgspec.Struct):
    tokens: int | None = None


class _Actual(msgspec.Struct):
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class _Line(msgspec.Struct):
    time: float
    id: str = ""
    model: str | None = None
    stage: str | None = None
    session: str | None = None
    process: str = ""
    prompt: _Prompt | None = None
    actual: _Actual | None = None
    prefix: list[str] | None = None
    block_size: int | None = None


_DECODER = msgspec.json.Decoder(_Line)


def request_log(
    path: Path, *, seed: int = 0, model: str = "", one_model: bool = True, begin: float = 0.0, end: float = 0.0
) -> Workload:
    """Read a request log. Requests come when they came then, whatever became of earlier ones.

    Args:
        path: JSON lines, plain or gzip.
        seed: nothing is by chance; kept for the report.
        model: only requests for this one; empty: for all.
        one_model: all requests ask for one model (``m``), for a fleet that serves one; else as recorded.
        begin: seconds from the first request on; earlier ones are left out.
        end: seconds from the first request on; later ones are left out; 0: none.

    Raises:
        WorkloadError: with the line's number.
    """
    read, skipped = _read(path, model)
    known = [line.actual.output_tokens for line in read if line.actual and line.actual.output_tokens]
    usual = sorted(known)[len(known) // 2] if known else _UNKNOWN_OUTPUT
    origin = read[0].time if read else 0.0
    block_size = read[0].block_size or 16 if read else 16
    numbers: dict[tuple[str, str], int] = {}
    ids = Ids()
    requests: list[WorkRequest] = []
    names: set[str] = set()
    assumed = 0
    for index, line in enumerate(read):
        time = line.time - origin
        if time < begin or (end and time > end):
            continue
        tokens = _tokens(line)
        shared: list[range] = []
        for block in (line.prefix or ())[: tokens // block_size]:
            number = numbers.get((line.process, block))
            if number is None:
                number = numbers[line.process, block] = ids.fresh(1).start
            shared.append(range(number, number + 1))
        rest = -(-tokens // block_size) - len(shared)
        output = line.actual.output_tokens if line.actual else None
        assumed += not output
        name = line.id or f"r{index}"
        if name in names:
            name = f"{name}/{index}"
        names.add(name)
        requests.append(
            WorkRequest(
                id=name,
                time=time - begin,
                session=f"{line.process}/{line.session}" if line.session else name,
                prompt_tokens=tokens,
                output_tokens=output or usual,
                blocks=Runs([*shared, ids.fresh(rest)]),
                stage=line.stage,
                model="m" if one_model else line.model or "m",
            )
        )
    return Workload(
        name=path.name.split(".")[0],
        block_tokens=block_size,
        requests=requests,
        seed=seed,
        notes=[
            f"{skipped} requests had no known prompt length and are left out.",
            f"{assumed} answers of unknown length were taken to have {usual} tokens.",
        ],
    )


def _tokens(line: _Line) -> int:
    """The prompt's length as far as it is known; 0: not at all."""
    counted = line.prompt.tokens if line.prompt else None
    return counted or (line.actual.prompt_tokens if line.actual else None) or 0


def _read(path: Path, model: str) -> tuple[list[_Line], int]:
    """The lines that can be replayed, by time (a log has them in the order in which they ended), and how many not."""
    read: list[_Line] = []
    skipped = 0
    block_size = 0
    for number, line in records(path, _DECODER, _ACCEPTED):
        if model and line.model != model:
            continue
        if _tokens(line) < 1:
            skipped += 1
            continue
        if _tokens(line) > MOST_TOKENS:
            raise WorkloadError.at(
                path, number, f"a prompt of {_tokens(line)} tokens; up to {MOST_TOKENS} are accepted"
            )
        if line.prefix:
            if not line.block_size or line.block_size < 1:
                raise WorkloadError.at(path, number, f"a prefix and block_size {line.block_size}; tokens are accepted")
            block_size = block_size or line.block_size
            if line.block_size != block_size:
                raise WorkloadError.at(
                    path,
                    number,
                    f"block_size {line.block_size} after {block_size}; choose one model, or replay logs of one block size",
                )
        read.append(line)
    read.sort(key=lambda line: line.time)
    for line in read[:1]:
        line.block_size = block_size or None
    return read, skipped
