"""NVIDIA Dynamo's own offline replay beside ours, on the same Mooncake files: ``python -m bench.dynamo_replay --traces DIR --python PATH``.

Dynamo's KV router and its simulated engine are theirs (`ai-dynamo`, `dynamo.replay.run_trace_replay`): nothing of this project runs there.
It lives in an environment of its own, whose interpreter is `--python`::

    python3.11 -m venv DIR
    DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 aisimulate==0.13.0.dev202610270000000085
    DIR/bin/pip install typing_extensions pydantic numpy

(`aisimulate` 0.13.0 itself is a stub that fetches its wheel from another index; the release before it on PyPI is whole.)

Both see 8 workers with so many blocks of 512 tokens and the same requests, once at the times that the file records (steps of three seconds) and
once spread inside the steps, as in the study. Dynamo's engine has its default timing, which is that of a fast GPU; ours runs with the study's and,
to be near theirs, with `FAST`. Reuse is the share of prompt tokens found in caches. Dynamo draws ties at random without a seed: several runs, of
which mean, least and most are shown. Ours has seeds.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

import orjson

from bench.study import found
from bench.study_rows import LARGE, SMALL
from simulator.fleet import FleetOptions, WorkerOptions, side_by_side
from simulator.workloads import Workload, load

TRACES: Final = ("synthetic", "conversation")
BLOCK: Final = 512
FAST: Final = WorkerOptions(prefill_rate=50_000, overhead=0.015, itl=0.006)
"""About Dynamo's default timing: the median of its times to the first token, and between tokens, of `synthetic`."""

THEIRS: Final = """
import json, sys
from importlib.metadata import version
from dynamo.replay import run_trace_replay
file, mode, blocks, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
engine = {"engine": {"backend": "vllm", "block_size": 512, "num_gpu_blocks": blocks}}
for _ in range(runs):
    report = run_trace_replay(file, num_workers=8, router_mode=mode, trace_block_size=512, extra_engine_args=engine)
    print("RESULT " + json.dumps({**report.summary, "version": version("ai-dynamo")}, default=str))
"""
"""What Dynamo's interpreter runs."""


def main() -> None:
    """Run both on each file, and print a table in Markdown."""
    arguments = _arguments()
    print("| trace, blocks, arrivals | " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " --- |" * len(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for trace in TRACES:
            for tokens in (LARGE, SMALL):
                for spread in (0.0, 3.0):
                    print(_line(arguments, Path(folder), trace, tokens, spread), flush=True)
    print(
        f"\nai-dynamo {_version(arguments.python)}, {arguments.runs} runs each; ours: seeds 0 to {arguments.runs - 1}"
    )


COLUMNS: Final = (
    "`round_robin` 's reuse",
    "`kv_router` 's reuse",
    "its mean TTFT",
    "`ttft` 's reuse, P 8k",
    "P 50k",
    "its mean TTFT, P 50k",
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--traces", type=Path, required=True, help="folder with Mooncake's files, however deep they lie"
    )
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of Dynamo's environment")
    parser.add_argument("--runs", type=int, default=5, help="of each (default: 5)")
    return parser.parse_args()


def _line(arguments: argparse.Namespace, folder: Path, trace: str, tokens: int, spread: float) -> str:
    """One row of the table."""
    workloads = [
        load(found(arguments.traces, f"{trace}_trace.jsonl"), "mooncake", seed=seed, spread=spread)
        for seed in range(arguments.runs)
    ]
    file = folder / f"{trace}.jsonl"
    _write(workloads[0], file)
    blocks = tokens // BLOCK
    robin = theirs(arguments.python, file, "round_robin", blocks, 1)
    router = theirs(arguments.python, file, "kv_router", blocks, arguments.runs)
    slow = ours(workloads, WorkerOptions(kv_tokens=tokens))
    fast = ours(
        workloads,
        WorkerOptions(kv_tokens=tokens, prefill_rate=FAST.prefill_rate, overhead=FAST.overhead, itl=FAST.itl),
    )
    cells = (
        _range([run["prefix_cache_reused_ratio"] for run in robin]),
        _range([run["prefix_cache_reused_ratio"] for run in router]),
        f"{mean(run['mean_ttft_ms'] for run in router) / 1000:.3f} s",
        _range([run["hit_rate"] for run in slow]),
        _range([run["hit_rate"] for run in fast]),
        f"{mean(run['ttft_mean_s'] for run in fast):.3f} s",
    )
    return f"| {trace}, {blocks}, {'spread' if spread else 'as recorded'} | " + " | ".join(cells) + " |"


def theirs(python: Path, file: Path, mode: str, blocks: int, runs: int) -> list[dict[str, Any]]:
    """The summaries of Dynamo's replay."""
    command = [str(python), "-c", THEIRS, str(file), mode, str(blocks), str(runs)]
    done = subprocess.run(command, env={"DYN_LOG": "error"}, capture_output=True, check=True)
    marked = [line for line in done.stdout.splitlines() if line.startswith(b"RESULT ")]
    return [orjson.loads(line.removeprefix(b"RESULT ")) for line in marked]


def ours(workloads: Sequence[Workload], worker: WorkerOptions) -> list[dict[str, Any]]:
    """The summaries of our replay with `ttft`, one a seed."""
    results = []
    for seed, workload in enumerate(workloads):
        options = FleetOptions(profile=worker.apply(None), workers=8, seed=seed)
        (result,) = side_by_side(workload, options, ["ttft"], jobs=1)
        results.append(result.summary())
    return results


def _write(workload: Workload, file: Path) -> None:
    """The requests as a Mooncake file, with the times that they have now."""
    with file.open("wb") as out:
        for request in workload.requests:
            line = {
                "timestamp": round(request.time * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.blocks[: -(-request.prompt_tokens // BLOCK)]),
            }
            out.write(orjson.dumps(line) + b"\n")


def _range(values: Sequence[float]) -> str:
    return (
        f"{values[0]:.3f}" if len(values) == 1 else f"**{mean(values):.3f}** ({min(values):.3f} to {max(values):.3f})"
    )


def _version(python: Path) -> str:
    command = [str(python), "-c", "from importlib.metadata import version; print(version('ai-dynamo'))"]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode().strip()


if __name__ == "__main__":
    main()
