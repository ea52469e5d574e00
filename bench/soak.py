"""Many requests of which a share is left by their clients at random moments; afterwards nothing of them may be left.

``python -m bench.soak --requests 100000 --leave 0.3``. The gateway is `warmroute serve` in a process of its own, whose memory alone is shown; the four
workers are another process, the clients this one. Exit status 1 if anything is left over or any client got something that is not right.

With ``--schedule all --seconds 1800 --clients 300`` (`make soak`) the workers are simulated ones with caches and events, one process each, and every
few seconds one of the faults of `bench.schedule` happens. Then errors are right that the fault of the moment explains, and no others.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
import uvloop

from bench.clients import Client, Result, Tally, fetch, free_ports, scrape, until_ready
from bench.processes import Process, running
from bench.schedule import CAUSES, SLACK, TIME_LIMIT, TOO_LATE, Schedule, SimulatedWorker, failures_in
from bench.stalls import Watch
from simulator.tokenizer import DATA

WORKERS: Final = 4
MAX_IDLE: Final = 64
SAMPLES: Final = 40
"""Looks at the gateway's memory during the run, at equal numbers of requests."""
ROWS: Final = 10
FLAT: Final = 1.03
"""The second half's last quarter may need this much of its first quarter's memory; what Python's arenas do is within it."""
SETTLE: Final = 20.0
_OTHER_FDS: Final = 40
"""Descriptors of a gateway that is no socket to a worker: its listeners, its loop, inotify, the scrape itself, its checks of the workers."""
_FEED_FDS: Final = 12
"""Descriptors of one worker's event feed."""
_AFTERWARDS: Final = 200
"""Requests that must all be answered when everything is over."""
_EXPECTED_LINES: Final = frozenset(
    {
        "request",
        "the configuration has mistakes; the old one stays",
        "panic: too many workers are out, those that failed requests are used all the same",
    }
)
"""Events of the log's error lines that a schedule may cause."""


@dataclass
class Soak:
    """One run: its parameters and what it finds wrong.

    Attributes:
        port, admin: the gateway's.
        gateway: its process.
        requests, seconds: how long; what is 0 does not count.
        leave: the share of requests that are left.
        clients: so many at once.
        schedule: the faults that happen meanwhile.
        think: seconds between two requests of a client under faults, on average.
        stalls: who did not answer when asked directly; with a schedule only.
        wrong: sentences; none when all is well.
    """

    port: int
    admin: int
    gateway: Process
    requests: int
    seconds: float
    leave: float
    clients: int
    seed: int
    schedule: Schedule | None = None
    think: float = 1.0
    stalls: Watch | None = None
    report_to: Path | None = None
    tally: Tally = field(default_factory=Tally)
    memory: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _began: float = 0.0

    async def run(self) -> None:
        """Load, wait, look."""
        await until_ready(self.admin, WORKERS)
        started = 0
        self._began = time.monotonic()
        end = self._began + self.seconds if self.seconds else float("inf")
        before = self.descriptors()

        def goes_on() -> bool:
            nonlocal started
            started += 1
            return (not self.requests or started <= self.requests) and time.monotonic() < end

        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(self.watch())]
            if self.stalls is not None:
                watches.append(group.create_task(self.stalls.run()))
            async with asyncio.TaskGroup() as load:
                for number in range(self.clients):
                    load.create_task(self.client(number, self.leave, self.think).asks(goes_on))
                if self.schedule is not None:
                    load.create_task(self.schedule.run(end))
            for watch in watches:
                watch.cancel()
        self.row()
        if self.schedule is not None:
            await self.afterwards()
        self.judge(await self.settled())
        if self.report_to is not None and self.schedule is not None:
            await self.report(self.report_to)
        print(f"descriptors of the gateway: {before} before, {self.descriptors()} after")

    def client(self, number: int, leave: float, think: float) -> Client:
        """One client; under faults it has conversations that meet again, and takes its time."""
        rng = random.Random(self.seed + number)
        if self.schedule is None:
            return Client(self.port, rng, self.tally, leave=leave)
        return Client(self.port, rng, self.tally, leave=leave, pause=think, asks=_a_conversation)

    async def afterwards(self) -> None:
        """When the last fault is over, all workers come back, and then nothing fails any more."""
        try:
            await until_ready(self.admin, WORKERS)
        except RuntimeError as error:
            self.wrong.append(str(error))
        await asyncio.sleep(TIME_LIMIT)
        before = dict(self.tally.results)
        left = iter(range(_AFTERWARDS))
        async with asyncio.TaskGroup() as load:
            for number in range(20):
                load.create_task(self.client(number, 0.0, 0.1).asks(lambda: next(left, None) is not None))
        answered = self.tally.results[Result.ANSWERED] - before[Result.ANSWERED]
        self.expect(answered == _AFTERWARDS, f"{_AFTERWARDS - answered} requests failed although all faults were over")

    def progress(self) -> float:
        """How much of the run is over, from 0 to 1."""
        by_time = (time.monotonic() - self._began) / self.seconds if self.seconds else 0.0
        return max(by_time, self.tally.total / self.requests if self.requests else 0.0)

    async def watch(self) -> None:
        """Note the gateway's memory as the run goes on."""
        print(f"{'requests':>9} {'answered':>9} {'left':>8} {'errors':>7} {'broken':>7} {'per s':>7} {'RSS MB':>7}")
        while True:
            await asyncio.sleep(0.05)
            if self.progress() >= (len(self.memory) + 1) / SAMPLES:
                self.memory.append((self.progress(), self.gateway.rss_mb()))
                if len(self.memory) % (SAMPLES // ROWS) == 0 and self.progress() < 1:
                    self.row()

    def row(self) -> None:
        """One row of the table."""
        got = self.tally.results
        rate = self.tally.total / (time.monotonic() - self._began)
        print(
            f"{self.tally.total:>9} {got[Result.ANSWERED]:>9} {got[Result.LEFT]:>8} {got[Result.CLEAN_ERROR]:>7}"
            f" {got[Result.BROKEN] + got[Result.CUT_SHORT]:>7} {rate:>7.0f} {self.gateway.rss_mb():>7.1f}",
            flush=True,
        )

    def descriptors(self) -> int:
        """Open file descriptors of the gateway."""
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.gateway.tree()[-1:])

    async def settled(self) -> dict[str, float]:
        """The metrics once nothing is in flight, or after `SETTLE` seconds."""
        deadline = time.monotonic() + SETTLE
        while True:
            samples = await scrape(self.admin)
            if samples["warmroute_requests_in_flight"] == 0 or time.monotonic() > deadline:
                return samples
            await asyncio.sleep(0.1)

    def judge(self, samples: dict[str, float]) -> None:
        """Compare what must be equal."""

        def sum_of(name: str, *parts: str) -> float:
            return sum(v for k, v in samples.items() if k.startswith(name) and all(part in k for part in parts))

        accepted = samples["warmroute_requests_accepted_total"]
        outcomes = {
            name: sum_of("warmroute_requests_total{", f'outcome="{name}"')
            for name in ("completed", "client_gone", "failed")
        }
        idle = sum_of("warmroute_upstream_connections{", 'state="idle"')
        active = sum_of("warmroute_upstream_connections{", 'state="active"')
        print(f"accepted {accepted:.0f} = {' + '.join(f'{v:.0f} {k}' for k, v in outcomes.items())}")
        print(f"upstream connections: {active:.0f} active, {idle:.0f} idle")
        self.expect(samples["warmroute_requests_in_flight"] == 0, "requests are still in flight")
        self.expect(accepted == sum(outcomes.values()), "accepted is not completed + client_gone + failed")
        if self.schedule is None:
            self.expect(outcomes["failed"] == 0, "requests failed although every worker was well")
        self.expect(sum_of("warmroute_worker_requests_in_flight{") == 0, "a worker still counts requests")
        self.expect(sum_of("warmroute_worker_prompt_tokens_in_flight{") == 0, "a worker still counts tokens")
        self.expect(active == 0, "connections to workers are still in use")
        self.expect(idle <= WORKERS * MAX_IDLE, "more idle connections than the pool may keep")
        others = _OTHER_FDS if self.schedule is None else _OTHER_FDS + WORKERS * _FEED_FDS
        self.expect(self.descriptors() <= idle + others, "descriptors are left open")
        self.judge_errors(outcomes)
        half = [rss for progress, rss in self.memory if progress > 1 / 2]
        quarter = len(half) // 2
        if quarter:
            before, after = statistics.median(half[:quarter]), statistics.median(half[quarter:])
            print(f"RSS of the gateway in the second half: {before:.1f} MB, then {after:.1f} MB")
            self.expect(after <= before * FLAT, "memory grows in the second half")

    def judge_errors(self, outcomes: dict[str, float]) -> None:
        """What clients saw: nothing wrong without faults, and with them nothing that they do not explain."""
        results = self.tally.results
        if self.schedule is None:
            for result in (Result.BROKEN, Result.CLEAN_ERROR, Result.CUT_SHORT):
                self.expect(results[result] == 0, f"{result.value}: {self.tally.errors}")
            return
        kinds = collections.Counter(happening.kind for happening in self.schedule.happened)
        print(f"faults: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
        seen = collections.Counter(error for _, error in self.tally.seen)
        print(
            f"errors that clients saw: {', '.join(f'{count} {error}' for error, count in sorted(seen.items())) or 'none'}"
        )
        self.expect(results[Result.BROKEN] == 0, f"answers were broken: {self.tally.errors}")
        self.expect(kinds.keys() == set(self.schedule.kinds), "the run is too short for every kind of fault")
        # What a client left in the last moment may have ended in any way.
        errors = results[Result.CLEAN_ERROR] + results[Result.CUT_SHORT]
        self.expect(outcomes["completed"] >= results[Result.ANSWERED], "clients got more answers than were counted")
        self.expect(outcomes["failed"] >= errors, "clients got more errors than were counted")
        self.expect(outcomes["failed"] <= errors + results[Result.LEFT], "more requests failed than clients know of")

    def judge_failures(self, log: str) -> None:
        """Each request that failed must have been at a worker that a fault hit then, and have failed in a way that the fault explains.

        One exception is counted apart, and said: a time limit that passed at a worker that did not answer this process either, when it was
        asked directly at that time. That is a machine that is too busy, and nothing that a gateway could know or mend.
        """
        if self.schedule is None or self.stalls is None:
            return
        failures = failures_in(log, time.time() - time.monotonic())
        unexplained, starved = [], 0
        for failure in self.schedule.unexplained(failures):
            if failure.error in TOO_LATE and self.stalls.explains(
                failure.worker, failure.when, failure.seconds + SLACK
            ):
                starved += 1
            else:
                unexplained.append(self.schedule.said_of(failure))
        print(
            f"requests that failed: {len(failures)}, of which a fault of their worker explains {len(failures) - starved - len(unexplained)}"
        )
        if starved:
            print(
                f"{starved} passed a time limit at workers that did not answer when asked directly either:"
                f" this machine was too busy ({self.stalls.seconds():.0f} s of silence in all, hangs included)"
            )
        self.expect(not unexplained, f"{len(unexplained)} errors that nothing explains: {unexplained[:5]}")

    def judge_log(self, log: str) -> None:
        """Lines of level error, and exceptions that nobody caught."""
        said = set()
        for line in log.splitlines():
            with contextlib.suppress(orjson.JSONDecodeError):
                entry = orjson.loads(line)
                if entry.get("level") in {"error", "critical"} and (
                    self.schedule is None or entry.get("event") not in _EXPECTED_LINES or "exception" in entry
                ):
                    said.add(line)
        self.expect(not said and "Traceback" not in log, f"the gateway's log: {sorted(said)[:5] or log[-2000:]}")

    async def report(self, path: Path) -> None:
        """Write all errors, faults, stalls and the gateway's own records of errors to a file."""
        assert self.schedule is not None
        assert self.stalls is not None
        records = await fetch(self.admin, "/api/requests?error=true&limit=1000")
        document = {
            "began": self._began,
            "seen": self.tally.seen,
            "happened": [dataclasses.asdict(each) for each in self.schedule.happened],
            "stalls": [dataclasses.asdict(each) for each in [*self.stalls.stalls, *self.stalls.own]],
            "records": orjson.loads(records),
        }
        await asyncio.to_thread(path.write_bytes, orjson.dumps(document, option=orjson.OPT_INDENT_2))

    def expect(self, holds: bool, sentence: str) -> None:
        """Note what is wrong."""
        if not holds:
            self.wrong.append(sentence)


def _a_conversation(rng: random.Random) -> bytes:
    """One of 400 conversations, of which forty at a time begin alike; short answers."""
    topic, turn = rng.randrange(10), rng.randrange(40)
    system = f"You are assistant number {topic}. " + f"Rule {topic} is to be brief and right. " * 60
    turns = "".join(
        f',{{"role":"user","content":"question {number} about topic {topic}"}},{{"role":"assistant","content":"answer {number}"}}'
        for number in range(turn % 8)
    )
    return (
        f'"max_tokens":12,"messages":[{{"role":"system","content":"{system}"}}{turns},'
        f'{{"role":"user","content":"and number {turn}?"}}]'
    ).encode()


def _config(port: int, admin: int, urls: list[str], **sections: object) -> bytes:
    workers = [{"url": url, "driver": "vllm"} for url in urls]
    document = {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"host": "127.0.0.1", "port": admin},
        "models": [{"name": "m", "workers": workers, **({"tokenizer": str(DATA)} if sections else {})}],
        "pool": {"max_idle": MAX_IDLE},
    }
    return orjson.dumps(document | sections)


def _versions(port: int, admin: int, urls: list[str]) -> list[bytes]:
    """Configurations that differ in what a reload may change. What is kept of requests is little, so that its memory is soon full."""
    common = {
        "timeouts": {"first_byte": TIME_LIMIT, "between_chunks": TIME_LIMIT},
        "health": {"interval": 1.0, "timeout": 1.0, "slow_start": 1.0, "ejection": {"base": 1.0, "max": 5.0}},
        "telemetry": {"decisions": {"count": 500}},
    }
    return [
        _config(port, admin, urls, **common),
        _config(port, admin, urls, **common, headers={"worker": False}),
        _config(port, admin, urls, **common, retries={"attempts": 3}),
    ]


def _watch(admin: int, workers: list[SimulatedWorker]) -> Watch:
    """Asks each worker directly, and the gateway by its admin listener."""
    return Watch({worker.url: (worker.port, "/health") for worker in workers} | {"gateway": (admin, "/healthz")})


def main() -> None:
    """Run, print, and exit with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=0, help="so many (default: 100,000, without --seconds)")
    parser.add_argument("--seconds", type=float, default=0.0, help="so long")
    parser.add_argument("--leave", type=float, default=0.3, help="share of clients that leave (default: 0.3)")
    parser.add_argument("--clients", type=int, default=64, help="at once (default: 64)")
    parser.add_argument("--schedule", metavar="KINDS", help=f"faults: all, or some of {','.join(CAUSES)}")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two faults (default: 3)")
    parser.add_argument(
        "--think",
        type=float,
        default=3.0,
        help="seconds between two requests of a client, with --schedule (default: 3; simulated workers take a core for 200 requests a second)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all errors, faults and stalls there as JSON")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    kinds = list(CAUSES) if arguments.schedule == "all" else (arguments.schedule or "").split(",")
    if arguments.schedule and not set(kinds) <= CAUSES.keys():
        parser.error(f"--schedule: all, or some of {','.join(CAUSES)}")
    if arguments.schedule and not arguments.seconds:
        parser.error("--schedule needs --seconds")
    requests = arguments.requests or (0 if arguments.seconds else 100_000)
    port, admin, *ports = free_ports(2 + 3 * WORKERS)
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "config.yaml"
        schedule = None
        workers: list[SimulatedWorker] = []
        if arguments.schedule:
            for number in range(WORKERS):
                trio = (ports[number], ports[WORKERS + number], ports[2 * WORKERS + number])
                worker = SimulatedWorker(trio, folder / f"worker-{number}.log", cores[-1])
                stack.callback(worker.kill)
                worker.start()
                workers.append(worker)
            for worker in workers:
                asyncio.run(worker.ready())
            versions = _versions(port, admin, [worker.url for worker in workers])
            config.write_bytes(versions[0])
            rng = random.Random(arguments.seed)
            schedule = Schedule(kinds, workers, (config, versions), rng, pause=arguments.pause)
        else:
            ports = ports[:WORKERS]
            config.write_bytes(_config(port, admin, [f"http://127.0.0.1:{p}" for p in ports]))
            command = [sys.executable, "-m", "bench.worker", "--tokens", "4", "--interval", "0.004", "--delay", "0.004"]
            stack.enter_context(
                running([*command, *map(str, ports)], core=cores[-1], port=ports[-1], log=folder / "workers.log")
            )
        serve = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        gateway = stack.enter_context(running(serve, core=cores[0], port=port, log=folder / "gateway.log"))
        soak = Soak(
            port,
            admin,
            gateway,
            requests,
            arguments.seconds,
            arguments.leave,
            arguments.clients,
            arguments.seed,
            schedule,
            arguments.think,
            _watch(admin, workers) if schedule is not None else None,
            arguments.report,
        )
        uvloop.run(soak.run())
        log = (folder / "gateway.log").read_text(errors="replace")
        soak.judge_failures(log)
        soak.judge_log(log)
    for sentence in soak.wrong:
        print(f"WRONG: {sentence}")
    print("nothing is left over" if not soak.wrong else f"{len(soak.wrong)} things are wrong")
    sys.exit(1 if soak.wrong else 0)


if __name__ == "__main__":
    main()
