"""A day like Prime Day, in virtual time: what admission is for, with the same without it. ``make prime-day`` writes docs/prime-day.md.

Two scenarios. *Rufus*: a planner must have answered as a whole before its generator may begin; traffic is at 60 % of what the fleet can
do, at 300 % for five minutes, and at 60 % again. *A flood*: ten tenants, one of which asks 50 times as much as each other.

Nothing here depends on this machine's speed: workers are the simulator's, by profiles with measured numbers, and the gate,
the policy and the workers' books are the gateway's own objects.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from backends.profiles import Profile, profile_named
from gateway.config.schema import Admission, Stage
from simulator.fleet import FleetOptions, ReplayResult, replay
from simulator.fleet.admission import AdmissionOptions
from simulator.fleet.result import Outcome, Requests
from simulator.report.axes import linear
from simulator.report.svg import Frame, axes, drawing, line, text
from simulator.workloads import generate
from simulator.workloads.workload import Workload, WorkRequest

PLANNER_DEADLINE: Final = 0.3
"""Seconds: Rufus' own, for a planner's whole answer."""
GENERATOR_TTFT: Final = 1.0
"""Seconds: the target of a generator's first token."""
WORKERS: Final = 8
PLANNERS: Final = ("w0", "w1")
FULL: Final = 10.0
"""Conversations a second that come to 100 %: what the fleet is planned for (the report says how many of them are in time there)."""
BEFORE: Final = 120.0
SURGE: Final = 300.0
AFTER: Final = 120.0
"""Seconds of each part."""
SETTLED: Final = 10.0
"""Seconds after the surge from which on all must be normal."""
STAGES: Final = {
    "planner": Stage(kind="completion", deadline=PLANNER_DEADLINE, priority=-10, workers=PLANNERS),
    "generator": Stage(kind="ttft", deadline=GENERATOR_TTFT, after="planner", hold=1.0),
}
SETTINGS: Final = Admission(prefill_ahead=0.25)

TENANTS: Final = 10
FLOOD: Final = 50
TENANT_RATE: Final = 0.6
"""Requests a second of each tenant but the flooding one."""
FLOOD_SECONDS: Final = 60.0
FLOOD_SETTINGS: Final = Admission(prefill_ahead=0.05)
"""Hardly more than one prefill at a time: whoever comes next is next, not behind what was sent ahead."""


@dataclass(frozen=True)
class Part:
    """Traffic for `seconds` at `share` of `FULL`."""

    seconds: float
    share: float


DAY: Final = (Part(BEFORE, 0.6), Part(SURGE, 3.0), Part(AFTER, 0.6))
STEADY: Final = (Part(BEFORE + SURGE, 1.0),)


def rufus(parts: Sequence[Part]) -> Workload:
    """Conversations by a Poisson process whose rate follows `parts`: one of rate 1, with its time bent."""
    expected = list(accumulate(part.seconds * part.share * FULL for part in parts))
    starts = [0.0, *accumulate(part.seconds for part in parts)]
    work = generate(
        "rufus",
        shoppers=int(expected[-1]),
        rate=1.0,
        questions=1,
        plan_tokens=30,
        retrieved_tokens=1800,
        answer_tokens=250,
    )

    def bent(time: float) -> float:
        at = min(bisect_right(expected, time), len(parts) - 1)
        before = expected[at - 1] if at else 0.0
        return starts[at] + (time - before) / (parts[at].share * FULL)

    return replace(work, requests=[replace(request, time=bent(request.time)) for request in work.requests])


def crowd(*, flood: bool) -> Workload:
    """Ten tenants' requests, each with a prompt of its own; without `flood` the first one stays away."""
    requests: list[WorkRequest] = []
    block_tokens = 16
    for tenant in range(TENANTS):
        rate = TENANT_RATE * (FLOOD if tenant == 0 else 1)
        if tenant == 0 and not flood:
            continue
        work = generate(
            "unique",
            seed=tenant + 1,
            requests=int(rate * FLOOD_SECONDS),
            rate=rate,
            prompt_tokens=6000,
            output_tokens=120,
            block_tokens=block_tokens,
        )
        for request in work.requests:
            blocks = [tenant << 40 | block for block in request.blocks]
            requests.append(
                replace(
                    request,
                    id=f"t{tenant}-{request.id}",
                    session=f"t{tenant}-{request.session}",
                    tenant=f"t{tenant}",
                    blocks=blocks,
                )
            )
    requests.sort(key=lambda request: request.time)
    return Workload("flood" if flood else "crowd", block_tokens, requests)


def fleet(*, pools: bool, admission: AdmissionOptions | None) -> FleetOptions:
    """Eight Trn1 workers with an 8B model; two of them, with parallel decoding and one request at a time, are the planner's."""
    profile = profile_named("trn1-8b")
    planner = replace(profile, name="trn1-8b-medusa", slots=1, tokens_per_step=3.0)
    others: dict[str, Profile] = dict.fromkeys(PLANNERS, planner) if pools else {}
    return FleetOptions(profile=profile, workers=WORKERS, others=others, admission=admission)


RUNS: Final[dict[str, Callable[[], ReplayResult]]] = {
    "full": lambda: _rufus(STEADY, on=True),
    "on": lambda: _rufus(DAY, on=True),
    "off": lambda: _rufus(DAY, on=False),
    "alone": lambda: _crowd(flood=False, on=True),
    "flood on": lambda: _crowd(flood=True, on=True),
    "flood off": lambda: _crowd(flood=True, on=False),
}


def _rufus(parts: Sequence[Part], *, on: bool) -> ReplayResult:
    options = AdmissionOptions(settings=SETTINGS, stages=STAGES)
    if on:
        return replay(rufus(parts), fleet(pools=True, admission=options), "ttft")
    # The pools stay: without them a planner would wait behind generators, which nobody would run. Everything else is off.
    bare = {name: Stage(kind=stage.kind, workers=stage.workers) for name, stage in STAGES.items()}
    endless = Admission(prefill_ahead=1e9, max_requests=10**9, max_tokens=10**12, max_wait=0)
    return replay(rufus(parts), fleet(pools=True, admission=AdmissionOptions(settings=endless, stages=bare)), "ttft")


def _crowd(*, flood: bool, on: bool) -> ReplayResult:
    return replay(
        crowd(flood=flood),
        fleet(pools=False, admission=AdmissionOptions(settings=FLOOD_SETTINGS) if on else None),
        "ttft",
    )


def _run(name: str) -> ReplayResult:
    return RUNS[name]()


class Day:
    """What became of a Rufus run, question by question."""

    def __init__(self, result: ReplayResult, parts: Sequence[Part]) -> None:
        self.requests: Requests = result.requests
        work = rufus(parts).requests
        self.planners = [index for index, request in enumerate(work) if request.stage == "planner"]
        self.generators = [index for index, request in enumerate(work) if request.stage == "generator"]
        self.pairs = list(zip(self.planners, self.generators, strict=True))

    def between(self, start: float, end: float) -> list[tuple[int, int]]:
        """The questions that came then."""
        arrival = self.requests.arrival
        return [pair for pair in self.pairs if start <= arrival[pair[0]] < end]

    def in_time(self, pair: tuple[int, int]) -> bool:
        """Its plan was there within 300 ms, and the answer began within a second."""
        planner, generator = pair
        out = self.requests
        return out.e2e[planner] <= PLANNER_DEADLINE and out.ttft[generator] <= GENERATOR_TTFT

    def goodput(self, start: float, end: float) -> float:
        """Questions a second that were answered in time."""
        return sum(map(self.in_time, self.between(start, end))) / (end - start)

    def share_in_time(self, start: float, end: float) -> float:
        """Of the questions that came then."""
        pairs = self.between(start, end)
        return sum(map(self.in_time, pairs)) / len(pairs)

    def times(self, indices: Sequence[int], values: Sequence[float]) -> list[float]:
        """Those of requests that came to their end, ascending."""
        done = [values[index] for index in indices if self.requests.outcome[index] == Outcome.COMPLETED]
        return sorted(done) or [math.nan]


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank."""
    return values[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def rows_of_rufus(full: Day, on: Day, off: Day) -> list[tuple[str, str, str, str]]:
    """Figure, with admission, without, what is asked for."""
    rows = []
    figures: dict[str, list[float]] = {}
    for name, day in (("on", on), ("off", off)):
        out = day.requests
        plans, firsts = day.times(day.planners, out.e2e), day.times(day.generators, out.ttft)
        refusals = sorted(each for each in out.refused_after if not math.isnan(each))
        figures[name] = [
            sum(each <= PLANNER_DEADLINE for each in plans) / len(plans),
            percentile(plans, 99),
            firsts[-1],
            percentile(firsts, 99),
            day.goodput(BEFORE + SETTLED, BEFORE + SURGE) / full.goodput(BEFORE, BEFORE + SURGE),
            day.share_in_time(BEFORE + SURGE + SETTLED, BEFORE + SURGE + AFTER),
            day.share_in_time(0.0, BEFORE),
            sum(each < 0.02 for each in refusals) / len(refusals) if refusals else math.nan,
            len(refusals),
        ]
    texts = (
        ("admitted planner calls within 300 ms", "{:.1%}", "≥ 99 %"),
        ("their p99", "{:.3f} s", ""),
        ("admitted generator requests: longest time to first token", "{:.2f} s", f"≤ {2 * GENERATOR_TTFT:.0f} s"),
        ("their p99", "{:.2f} s", f"{GENERATOR_TTFT:.0f} s is the target"),
        ("goodput in the surge, of that at 100 %", "{:.0%}", "≥ 95 %"),
        ("questions in time from 10 s after the surge on", "{:.1%}", "as before it"),
        ("questions in time before the surge", "{:.1%}", ""),
        ("refusals within 20 ms", "{:.1%}", ""),
        ("refusals", "{:,.0f}", ""),
    )
    for place, (title, pattern, wanted) in enumerate(texts):
        cells = [
            "-" if math.isnan(figures[name][place]) else pattern.format(figures[name][place]) for name in ("on", "off")
        ]
        rows.append((title, cells[0], cells[1], wanted))
    return rows


def tenants_ttft(result: ReplayResult, work: Workload) -> dict[str, list[float]]:
    """Times to first token of the flooding tenant and of all others, ascending."""
    groups: dict[str, list[float]] = {"flood": [], "others": []}
    for request, ttft in zip(work.requests, result.requests.ttft, strict=True):
        if not math.isnan(ttft):
            groups["flood" if request.tenant == "t0" else "others"].append(ttft)
    return {name: sorted(values) or [math.nan] for name, values in groups.items()}


def picture(on: Day, off: Day) -> str:
    """Questions a second over time: asked, answered in time with admission and without."""
    frame = Frame(900, 300)
    end = BEFORE + SURGE + AFTER
    step = 5.0
    marks = [step * index for index in range(int(end / step))]
    asked = [len(on.between(mark, mark + step)) / step for mark in marks]
    x, y = linear(end, "seconds"), linear(max(asked) * 1.05, "")
    names = ("asked", "answered in time, with admission", "answered in time, without")
    series = (
        asked,
        [on.goodput(mark, mark + step) for mark in marks],
        [off.goodput(mark, mark + step) for mark in marks],
    )
    colours = ("#999", "#1a7f37", "#cf222e")
    parts = [
        "<style>text{font:12px sans-serif;fill:#57606a}.grid{stroke:#d0d7de}.axis{stroke:#57606a}"
        + "".join(f".c{index}{{fill:none;stroke:{colour};stroke-width:2}}" for index, colour in enumerate(colours))
        + "</style><rect width='900' height='300' fill='white'/>",
        axes(frame, x, y),
    ]
    for index, (name, values) in enumerate(zip(names, series, strict=True)):
        points = [(x.at(mark + step / 2), y.at(value)) for mark, value in zip(marks, values, strict=True)]
        parts.append(line(frame, points, f"c{index}"))
        parts += [
            f'<rect x="{frame.x(0.74):.0f}" y="{16 + 18 * index}" width="14" height="3" fill="{colours[index]}"/>',
            text(frame.x(0.74) + 20, 21 + 18 * index, name),
        ]
    svg = drawing(frame.width, frame.height, "Questions a second", parts)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def report(results: dict[str, ReplayResult]) -> tuple[str, str]:
    """The page and its picture."""
    full, on, off = Day(results["full"], STEADY), Day(results["on"], DAY), Day(results["off"], DAY)
    rows = "\n".join(f"| {' | '.join(row)} |" for row in rows_of_rufus(full, on, off))
    alone = tenants_ttft(results["alone"], crowd(flood=False))
    flooded = {name: tenants_ttft(results[f"flood {name}"], crowd(flood=True)) for name in ("on", "off")}
    base = percentile(alone["others"], 90)
    lines = [
        f"| {title} | {percentile(times['others'], 50):.3f} s | {percentile(times['others'], 90):.3f} s "
        f"| {percentile(times['others'], 90) / base:.2f} | {percentile(times['flood'], 50):.2f} s |"
        for title, times in (
            ("nobody floods", alone | {"flood": [math.nan]}),
            ("one floods, with admission", flooded["on"]),
            ("one floods, without", flooded["off"]),
        )
    ]
    tenants = "\n".join(lines).replace("nan s", "-")
    page = _PAGE.format(
        full=FULL,
        questions=len(full.pairs) / (BEFORE + SURGE),
        full_share=full.share_in_time(BEFORE, BEFORE + SURGE),
        full_goodput=full.goodput(BEFORE, BEFORE + SURGE),
        rows=rows,
        tenants=tenants,
        flood=FLOOD,
        rate=TENANT_RATE,
        ahead=FLOOD_SETTINGS.prefill_ahead,
    )
    return page, picture(on, off)


LIVE: Final = "\n## The same day over HTTP\n"
"""The section of the page that is no replay's, and is kept: see `bench.prime_day_live`."""
_PAGE: Final = """# A day like Prime Day

Written by `make prime-day` (`bench/prime_day.py`); virtual time, so the figures are the same on any machine. What is run are the gateway's
own gate, policy (`ttft`) and books; the workers behind them are the simulator's, with the numbers of `trn1-8b` (docs/admission.md says how
admission works).

## Rufus: a planner before each answer

Eight workers. Two are the planner's: one request at a time, three tokens a step (parallel decoding runs at batch 1 on Neuron). Six are the
generator's, with eight slots each. Planner calls have to be answered as a whole within 300 ms, answers have to begin within a second.
100 % are {full:g} conversations, {questions:.1f} questions a second: there {full_share:.1%} of them are answered in time ({full_goodput:.1f} a second).
Two minutes at 60 %, five at 300 %, two at 60 %. "Without" keeps the two pools, and everything else is off: no deadlines, no pacing, nobody refused (but prompts that are too long for any worker).

| | with admission | without | asked for |
| --- | --- | --- | --- |
{rows}

![Questions a second](prime-day.svg)

## A flood: ten tenants, one asks {flood} times as much as each other

Nine tenants ask {rate:g} times a second each, prompts of about 6,000 tokens that nobody else has, over eight workers of eight slots;
at most {ahead:g} s of prefill are before a prompt at a worker.

| | others' TTFT p50 | p90 | p90, of that without a flood | the flood's p50 |
| --- | --- | --- | --- | --- |
{tenants}
"""


def main() -> None:
    """Run all and write the page where the argument says (default: docs/prime-day.md), and its picture beside it."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/prime-day.md")
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        results = dict(zip(RUNS, pool.map(_run, RUNS), strict=True))
    page, drawn = report(results)
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    page += before[before.find(LIVE) :] if LIVE in before else ""
    target.write_text(page, encoding="utf-8")
    target.with_suffix(".svg").write_text(drawn, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
