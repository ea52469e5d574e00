"""The Rufus day of `bench.prime_day` over real HTTP: ``python -m bench.prime_day_live --speed 1``.

A gateway process, eight simulated Neuron workers behind it, and shoppers that ask their planner, then their generator, at the same moments as in the
replay. All times are divided by `--speed` on the way in and multiplied on the way out, so figures are in the workers' seconds; what the
gateway, HTTP and this machine take is multiplied, too: the higher the speed, the harder it is. Refusals are measured in real milliseconds.
"""

import argparse
import asyncio
import contextlib
import gc
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import orjson
import uvloop

from bench.clients import free_ports, until_ready
from bench.prime_day import (
    FULL,
    GENERATOR_TTFT,
    PLANNER_DEADLINE,
    PLANNERS,
    SETTINGS,
    SETTLED,
    STAGES,
    WORKERS,
    Day,
    Part,
    percentile,
    rufus,
)
from bench.prime_day_workers import MODEL, profiles
from bench.processes import running
from simulator.fleet.result import Outcome
from simulator.tokenizer import DATA
from simulator.workloads.workload import WorkRequest

PATIENCE: Final = 60.0
"""Of the workers' seconds, after which a shopper leaves. Without admission that bounds what waits; with it nobody waits so long."""
_PRIME: Final = 0x9E3779B97F4A7C15
_IDS: Final = 4000
"""Token ids below this one are words in the simulator's tokenizer."""
_HEAD: Final = (
    "POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    "x-warmroute-stage: {stage}\r\nx-warmroute-session: {session}\r\nContent-Length: {length}\r\n\r\n"
)


@dataclass
class Seen:
    """What became of each request, by its place in the workload; in the workers' seconds."""

    arrival: list[float]
    ttft: list[float] = field(init=False)
    e2e: list[float] = field(init=False)
    outcome: list[Outcome | None] = field(init=False)
    refused_after: list[float] = field(init=False)
    refusals: Counter[str] = field(default_factory=Counter)
    without_retry_after: int = 0
    late: float = 0.0

    def __post_init__(self) -> None:
        """Nothing has been asked yet."""
        count = len(self.arrival)
        self.ttft, self.e2e, self.refused_after = ([math.nan] * count for _ in range(3))
        self.outcome = [None] * count


def ids_of(request: WorkRequest, block_tokens: int) -> list[int]:
    """The prompt's token ids: each block always the same ones, different from all others'."""
    ids: list[int] = []
    for block in request.blocks:
        seed = (block + 1) * _PRIME
        ids += [(seed >> shift) % _IDS + 100 for shift in range(0, 3 * block_tokens, 3)]
    return ids[: request.prompt_tokens]


class Shoppers:
    """Asks what a workload says, when it says so."""

    def __init__(self, port: int, parts: Sequence[Part], speed: float) -> None:
        self._port = port
        self._speed = speed
        work = rufus(parts)
        self._work = work.requests
        self._block_tokens = work.block_tokens
        self._began = 0.0
        self.seen = Seen([request.time for request in self._work])

    async def ask(self) -> Seen:
        """All of them; returns when the last one has been answered or has left."""
        self._began = time.monotonic() + 1.0
        async with asyncio.TaskGroup() as group:
            for place in range(0, len(self._work), 2):  # a plan and its answer
                due = self._began + self._work[place].time / self._speed
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.seen.late = max(self.seen.late, time.monotonic() - due)
                group.create_task(self._question(place))
        return self.seen

    async def _question(self, place: int) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(2 * PATIENCE / self._speed):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
                try:
                    if await self._answered(place, reader, writer):
                        await asyncio.sleep(self._work[place + 1].delay / self._speed)
                        await self._answered(place + 1, reader, writer)
                finally:
                    writer.transport.abort()

    async def _answered(self, place: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Ask for one answer; whether it came."""
        request, seen = self._work[place], self.seen
        streams = request.stage == "generator"
        body = orjson.dumps(
            {
                "model": MODEL,
                "prompt": ids_of(request, self._block_tokens),
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": streams,
            }
        )
        head = _HEAD.format(stage=request.stage, session=request.session, length=len(body))
        sent = time.monotonic()
        seen.arrival[place] = (sent - self._began) * self._speed
        async with asyncio.timeout(PATIENCE / self._speed):
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if answer[9:12] != b"200":
                length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                error = orjson.loads(await reader.readexactly(length))["error"]
                seen.refused_after[place] = time.monotonic() - sent
                seen.refusals[f"{answer[9:12].decode()} {error['code']}"] += 1
                seen.without_retry_after += b"\r\nretry-after: " not in answer.lower()
                return False
            if streams:
                data = await reader.read(1 << 16)
                seen.ttft[place] = (time.monotonic() - sent) * self._speed
                while not data.endswith(b"0\r\n\r\n"):
                    more = await reader.read(1 << 16)
                    if not more:
                        return False
                    data = data[-8:] + more
            else:
                length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
        seen.e2e[place] = (time.monotonic() - sent) * self._speed
        seen.outcome[place] = Outcome.COMPLETED
        return True


def config(port: int, admin: int, ports: list[int], speed: float, *, on: bool) -> dict[str, Any]:
    """The gateway's configuration. Without admission the two pools stay, and everything else is off."""
    urls = [f"http://127.0.0.1:{number}" for number in ports[::3]]
    workers = [
        {
            "url": url,
            "driver": "vllm",
            "capabilities": {
                "profile": "trn1-8b",
                "slots": profile.slots,
                "tokens_per_step": profile.tokens_per_step,
                "prefill_rate": profile.prefill_rate * speed,
                "overhead": profile.overhead / speed,
            },
        }
        for url, profile in zip(urls, profiles(), strict=True)
    ]
    ids = [url.removeprefix("http://") for url in urls]
    pools = {"planner": ids[: len(PLANNERS)]}
    stages: dict[str, dict[str, Any]] = {name: {"kind": stage.kind} for name, stage in STAGES.items()}
    for name, workers_of in pools.items():
        stages[name]["workers"] = workers_of
    if on:
        for name, stage in STAGES.items():
            assert stage.deadline is not None
            stages[name] |= {"deadline": stage.deadline / speed, "priority": stage.priority}
        stages["generator"] |= {"after": "planner", "hold": STAGES["generator"].hold / speed}
        admission: dict[str, Any] = {"prefill_ahead": SETTINGS.prefill_ahead / speed}
    else:
        admission = {"prefill_ahead": 86_400, "max_requests": 10**9, "max_tokens": 10**12, "max_wait": 0}
    return {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"host": "127.0.0.1", "port": admin},
        "models": [{"name": MODEL, "tokenizer": str(DATA), "admission": admission, "workers": workers}],
        "stages": stages,
    }


def run(parts: Sequence[Part], speed: float, *, on: bool) -> Seen:
    """One day, with processes of its own."""
    port, admin, *ports = free_ports(2 + 3 * WORKERS)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        path = folder / "config.yaml"
        path.write_bytes(orjson.dumps(config(port, admin, ports, speed, on=on)))
        fleet = [sys.executable, "-m", "bench.prime_day_workers", str(speed), *map(str, ports)]
        stack.enter_context(running(fleet, core=cores[-1], port=ports[-3], log=folder / "workers.log"))
        serve = [sys.executable, "-m", "gateway", "serve", "--config", str(path)]
        gateway = stack.enter_context(running(serve, core=cores[0], port=port, log=folder / "gateway.log"))

        async def day() -> Seen:
            await until_ready(admin, WORKERS)
            await Shoppers(port, (Part(20 * speed, 0.3),), speed).ask()  # learns what answers take
            before = gateway.cpu_seconds()
            shoppers = Shoppers(port, parts, speed)
            gc.freeze()
            seen = await shoppers.ask()
            print(f"  gateway: {gateway.cpu_seconds() - before:.1f} s of CPU, {gateway.rss_mb():.0f} MB", flush=True)
            return seen

        return uvloop.run(day())


@dataclass(frozen=True)
class Plan:
    """Seconds (the workers') of a day's parts."""

    before: float
    surge: float
    after: float

    @property
    def parts(self) -> tuple[Part, ...]:
        """Base load, surge, base load."""
        return Part(self.before, 0.6), Part(self.surge, 3.0), Part(self.after, 0.6)


def figures(seen: Seen, parts: Sequence[Part], plan: Plan, full: float) -> dict[str, str]:
    """Title and value."""
    day = Day(SimpleNamespace(requests=seen), parts)  # type: ignore[arg-type]  # it reads these lists only
    plans, firsts = day.times(day.planners, seen.e2e), day.times(day.generators, seen.ttft)
    refused = sorted(each for each in seen.refused_after if not math.isnan(each))
    surged = plan.before + plan.surge
    end = surged + plan.after

    def of(value: float, pattern: str) -> str:
        return "-" if math.isnan(value) else pattern.format(value)

    at_once = sum(each < 0.02 for each in refused) / len(refused) if refused else math.nan
    return {
        "admitted planner calls within 300 ms": of(
            sum(each <= PLANNER_DEADLINE for each in plans) / len(plans), "{:.1%}"
        ),
        "their p50 and p99": f"{percentile(plans, 50):.3f} s, {percentile(plans, 99):.3f} s",
        "admitted generator requests: longest time to first token": f"{firsts[-1]:.2f} s",
        "their share above twice the target": f"{sum(each > 2 * GENERATOR_TTFT for each in firsts) / len(firsts):.2%}",
        "their p99": f"{percentile(firsts, 99):.2f} s",
        "goodput in the surge, of that at 100 %": of(day.goodput(plan.before + SETTLED, surged) / full, "{:.0%}"),
        "questions in time from 10 s after the surge on": of(day.share_in_time(surged + SETTLED, end), "{:.1%}"),
        "questions in time before the surge": of(day.share_in_time(0.0, plan.before), "{:.1%}"),
        "refusals": f"{len(refused):,}",
        "refusals within 20 ms (real)": of(at_once, "{:.1%}"),
        "refusals: p50 and p99 (real)": f"{percentile(refused, 50) * 1e3:.1f} ms, {percentile(refused, 99) * 1e3:.0f} ms"
        if refused
        else "-",
        "refusals without Retry-After": str(seen.without_retry_after),
        "by code": ", ".join(f"{count:,} {code}" for code, count in seen.refusals.most_common()) or "-",
        "shoppers' process was late by at most": f"{seen.late * 1e3:.0f} ms (real)",
    }


def main() -> None:
    """Run the days and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.prime_day_live", description=__doc__)
    parser.add_argument("--speed", type=float, default=1.0, help="the workers' seconds in one real second (default: 1)")
    parser.add_argument(
        "--before", type=float, default=60.0, help="seconds of base load before the surge (default: 60)"
    )
    parser.add_argument("--surge", type=float, default=300.0, help="seconds of surge (default: 300)")
    parser.add_argument("--after", type=float, default=60.0, help="seconds of base load after it (default: 60)")
    parser.add_argument("--full", type=float, default=120.0, help="seconds at 100 %%, to compare with (default: 120)")
    parser.add_argument("--write", type=Path, help="also write the figures there, as JSON")
    arguments = parser.parse_args()
    plan, speed = Plan(arguments.before, arguments.surge, arguments.after), arguments.speed
    steady = (Part(arguments.full, 1.0),)
    print("100 %", flush=True)
    seen = run(steady, speed, on=True)
    day = Day(SimpleNamespace(requests=seen), steady)  # type: ignore[arg-type]
    full = day.goodput(0.0, arguments.full) or math.nan
    print(
        f"  {day.share_in_time(0.0, arguments.full):.1%} in time, {full:.2f} questions a second; planner p50 {percentile(day.times(day.planners, seen.e2e), 50):.3f} s;"
        f" refused: {dict(seen.refusals)}; late by {seen.late * 1e3:.0f} ms",
        flush=True,
    )
    columns: dict[str, dict[str, str]] = {}
    for name, on in (("with admission", True), ("without", False)):
        print(name, flush=True)
        columns[name] = figures(run(plan.parts, speed, on=on), plan.parts, plan, full)
        for title, value in columns[name].items():
            print(f"  {title}: {value}", flush=True)
    if arguments.write:
        facts = {
            "speed": speed,
            "full": full,
            "share": day.share_in_time(0.0, arguments.full),
            "columns": columns,
            "conversations": FULL,
        }
        arguments.write.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
