"""The table that `ttft` is held against: policies on public traces and published workloads. Run as ``make study``.

Everything runs in virtual time (`simulator.fleet`), so the figures depend on the code and the seed only. What was computed before is
taken from a scratch folder as long as neither the row nor any code that it runs has changed. Without ``--traces`` only the rows
whose traffic is made up are run. Each expectation is checked and written out as met or missed.
"""

import argparse
import ast
import functools
import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from bench.study_dynamo import VERSION
from bench.study_dynamo import table as dynamo_table
from bench.study_rows import CLAIMS, COMPARISONS, POLICIES, ROWS, SECTIONS, SOURCES, Row, Run, Tables
from gateway.config.load import load as load_config
from policies.registry import Registry
from simulator.fleet import ReplayResult, side_by_side
from simulator.workloads import Workload, generate, load

SEED: Final = 0
ENGINE: Final = ("simulator", "gateway/fleet", "gateway/prefix", "gateway/prompt/blocks.py", "backends/profiles")
"""What every cell runs; a policy's own modules come on top."""
ROOT: Final = Path(__file__).resolve().parents[1]
COMMAND: Final = 'make study ARGS="--traces DIR"'


def main() -> None:
    """Compute what is missing, print and write the document."""
    arguments = _arguments()
    os.nice(arguments.nice)
    if arguments.config is not None:
        SECTIONS.update(load_config(arguments.config).policies)
    rows = [row for row in (*ROWS, *COMPARISONS) if _wanted(row, arguments)]
    started = time.monotonic()
    cells = Cells(arguments.scratch, arguments.traces, arguments.jobs)
    tables: Tables = {}
    for row in rows:
        for run in row.runs:
            names = run.policies if arguments.policies is None else arguments.policies
            tables[row.name, run.name] = cells.run(run, names)
            if len(row.runs) == 1:
                print(_line(row.title, names, tables[row.name, run.name]), flush=True)
    document = _document(rows, tables, cells, time.monotonic() - started)
    out = arguments.out or (None if arguments.only or arguments.policies else ROOT / "docs/study.md")
    if out is None:
        print(document)
    else:
        out.write_text(document, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=Path, help="folder with the public traces, however deep they lie in it")
    parser.add_argument("--out", type=Path, help="the document (default: docs/study.md; with --only none)")
    parser.add_argument("--only", action="append", default=[], help="rows whose names begin like this; repeatable")
    parser.add_argument("--policies", type=lambda text: text.split(","), help="these instead of each row's own")
    parser.add_argument("--config", type=Path, help="a configuration whose policies can be named, too")
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "warmroute-study")
    return parser.parse_args()


def _wanted(row: Row, arguments: argparse.Namespace) -> bool:
    if arguments.only and not row.name.startswith(tuple(arguments.only)):
        return False
    return arguments.traces is not None or not row.recorded


class Cells:
    """Results of runs by policy, computed or remembered.

    Attributes:
        seconds: that computing all of them took, remembered ones as they were.
    """

    def __init__(self, scratch: Path, traces: Path | None, jobs: int | None) -> None:
        self._scratch = scratch
        self._traces = traces
        self._jobs = jobs
        self._engine = _digest(file for part in ENGINE for file in _sources(ROOT / part))
        self.seconds = 0.0
        scratch.mkdir(parents=True, exist_ok=True)

    def run(self, run: Run, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The figures of each policy, in order."""
        files = {policy: self._file(run, policy) for policy in policies}
        missing = [policy for policy, file in files.items() if not file.exists()]
        if missing:
            results = side_by_side(self._workload(run), run.options(SEED), missing, sections=SECTIONS, jobs=self._jobs)
            for policy, result in zip(missing, results, strict=True):
                files[policy].write_bytes(orjson.dumps(_figures(result, run)))
        found: dict[str, dict[str, Any]] = {policy: orjson.loads(file.read_bytes()) for policy, file in files.items()}
        self.seconds += sum(figures["wall_s"] for figures in found.values())
        return found

    def _file(self, run: Run, policy: str) -> Path:
        settings = orjson.dumps([asdict(run.options(SEED)), run.source, run.traffic, run.limit, run.stages, SEED])
        code = _digest(_policy_sources(policy))
        name = hashlib.sha256(settings + self._engine.encode() + code.encode() + repr(_recipe(policy)).encode())
        return self._scratch / f"{run.name}-{policy}-{name.hexdigest()[:20]}.json"

    def _workload(self, run: Run) -> Workload:
        if run.file is None:
            workload = generate(run.source, seed=SEED, **run.traffic)
        else:
            assert self._traces is not None
            workload = load(found(self._traces, run.file), run.source, seed=SEED, **run.traffic)
        return workload.first(run.limit) if run.limit else workload


def found(folder: Path, name: str) -> Path:
    """The file of that name, plain or gzip, anywhere in the folder."""
    for candidate in (name, f"{name}.gz"):
        for path in sorted(folder.rglob(candidate)):
            return path
    raise SystemExit(f"no {name} (or {name}.gz) in {folder}; see docs/study.md for where it comes from")


def _figures(result: ReplayResult, run: Run) -> dict[str, Any]:
    figures = result.summary()
    requests = result.requests
    if run.stages:  # p90 of each stage of arrivals
        figures["stages"] = []
        begin = 0.0
        for rate, seconds in run.stages:
            times = sorted(
                ttft
                for arrival, ttft in zip(requests.arrival, requests.ttft, strict=True)
                if begin <= arrival < begin + seconds and ttft == ttft  # noqa: PLR0124 - not NaN
            )
            begin += seconds
            p90 = times[int(0.9 * len(times))] if times else None
            figures["stages"].append({"rate": rate, "ttft_p90_s": p90})
    return figures


@functools.cache
def _policy_sources(policy: str) -> tuple[Path, ...]:
    """The modules of a policy's steps and what those import of `policies`."""
    built = Registry.default().build(policy, SECTIONS)
    found: set[Path] = {ROOT / "policies/pipeline.py"}
    todo = {type(step).__module__ for step in _steps(built)}
    while todo:
        name = todo.pop()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin) in found:
            continue
        found.add(path := Path(spec.origin))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("policies."):
                todo.add(node.module)
    return tuple(sorted(found))


def _recipe(policy: str) -> object:
    """What a policy is made of: its section, else its preset."""
    return SECTIONS.get(policy) or Registry.default()._presets[policy]()  # noqa: SLF001 - only to tell whether it has changed


def _steps(policy: Any) -> list[object]:
    """Filters, scorers and picker of a pipeline."""
    bound = [*policy._filters, *(scorer for scorer, _ in policy._scorers), policy._picker]  # noqa: SLF001 - only to know their code
    return [each.__self__ for each in bound]


def _sources(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cell(figures: Mapping[str, Any]) -> str:
    mark = "" if not figures["refused"] + figures["failed"] else f" ({figures['refused'] + figures['failed']} refused)"
    return f"{figures['hit_rate']:.3f} {_s(figures['ttft_mean_s'])}/{_s(figures['ttft_p90_s'])}{mark}"


def _s(seconds: float) -> str:
    """Seconds in three digits."""
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"


def _pooled(figures: Mapping[str, Mapping[str, Any]]) -> float:
    """The bound on the arrivals that `ttft` met: in closed loops they depend on the policy."""
    bound: float = figures.get("ttft", next(iter(figures.values())))["pooled_lru_hit_rate"]
    return bound


def _line(title: str, names: Sequence[str], figures: Mapping[str, Mapping[str, Any]]) -> str:
    cells = "\n".join(f"    {name:14} {_cell(figures[name])}" for name in names)
    return f"{title} [pooled LRU {_pooled(figures):.3f}]\n{cells}"


def _document(rows: Sequence[Row], tables: Tables, cells: Cells, took: float) -> str:
    plain = [row for row in rows if len(row.runs) == 1]
    table = [
        "| row | " + " | ".join(f"`{name}`" for name in POLICIES) + " | pooled LRU |",
        "| --- |" + " --- |" * (len(POLICIES) + 1),
    ]
    for row in plain:
        figures = tables[row.name, row.runs[0].name]
        best = {key: min(each[key] for each in figures.values()) for key in ("ttft_mean_s", "ttft_p90_s")}
        shown = []
        for name in POLICIES:
            if name not in figures:
                shown.append("")
                continue
            each = figures[name]
            bold = "**" if all(each[key] <= 1.02 * best[key] for key in best) else ""
            shown.append(f"{bold}{_cell(each)}{bold}")
        bound = _pooled(figures)
        table.append(f"| {row.title} | " + " | ".join(shown) + f" | {bound:.3f} |")
    checked = _checks(rows, tables)
    met = sum(line.startswith("| met") for line in checked)
    return "\n".join(
        [
            "# Study: policies on public traces and published workloads",
            "",
            f"Written by `{COMMAND}` on {datetime.now(UTC):%Y-%m-%d}, seed {SEED}. All figures are in virtual time and do not depend on the",
            f"machine. Computing all of them takes {cells.seconds / 60:.0f} minutes of one core; this run took {took / 60:.0f} with what was computed before.",
            "",
            "Each cell: share of prompt tokens found in caches, mean TTFT / p90 TTFT in seconds. Bold: mean and p90 within 2 % of the row's best.",
            "",
            *table,
            "",
            "## Rows",
            "",
            "Workers of rows without a profile compute one prompt at a time, first come first served, 30 ms and 1/P seconds a token; 20 ms per decode step;",
            "exact LRU caches of 512-token blocks; 256 slots. KV events are 5 ms late.",
            "",
            *(f"- *{row.title}*: {row.note}" for row in rows),
            "",
            f"## Expectations ({met} of {len(checked)} met)",
            "",
            "| | expectation | found |",
            "| --- | --- | --- |",
            *checked,
            "",
            f"## Dynamo {VERSION}'s own replay",
            "",
            "NVIDIA's router and simulated engine (`dynamo.replay`, offline), on the same files and 8 workers: shares of prompt tokens found in caches, as",
            "mean (least to most). Measured by `python -m bench.dynamo_replay --traces DIR --python PATH`, which also says how to install it. Its engine has",
            "its default timing, its ties have no seed; `ttft` ran in our replay with seeds 0 to 4.",
            "",
            *dynamo_table(),
            "",
            "## Traces",
            "",
            "None of them is part of this repository. `--traces` names a folder that holds the files, plain or gzip, under these names:",
            "",
            *SOURCES,
            "",
        ]
    )


def _checks(rows: Sequence[Row], tables: Tables) -> list[str]:
    lines = []
    for claim in CLAIMS:
        for row in rows:
            if not claim.applies(row):
                continue
            try:
                met, found = claim.check(row, {run.name: tables[row.name, run.name] for run in row.runs})
            except (KeyError, ValueError):  # a policy that was not run, or nothing to compare with
                continue
            lines.append(f"| {'met' if met else '**missed**'} | {claim.text.format(row=row.title)} | {found} |")
    return lines


if __name__ == "__main__":
    main()
