"""Many requests of which a share is left by their clients at random moments; afterwards nothing of them may be left.

``python -m bench.soak --requests 100000 --leave 0.3``. The gateway is `warmroute serve` in a process of its own, whose memory alone is shown; the four
workers are another process, the clients this one. Exit status 1 if anything is left over or any client got something that is not right.
"""

import argparse
import asyncio
import contextlib
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

from bench.clients import Client, Result, Tally, free_ports, scrape, until_ready
from bench.processes import Process, running

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


@dataclass
class Soak:
    """One run: its parameters and what it finds wrong.

    Attributes:
        wrong: sentences; none when all is well.
    """

    port: int
    admin: int
    gateway: Process
    requests: int
    leave: float
    clients: int
    seed: int
    tally: Tally = field(default_factory=Tally)
    memory: list[tuple[int, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Load, wait, look."""
        await until_ready(self.admin, WORKERS)
        started = 0
        began = time.monotonic()
        tasks_before = self.descriptors()

        def goes_on() -> bool:
            nonlocal started
            started += 1
            return started <= self.requests

        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self.watch())
            async with asyncio.TaskGroup() as load:
                for number in range(self.clients):
                    client = Client(self.port, random.Random(self.seed + number), self.tally, leave=self.leave)
                    load.create_task(client.asks(goes_on))
            watch.cancel()
        self.row(began)
        samples = await self.settled()
        self.judge(samples)
        print(f"descriptors of the gateway: {tasks_before} before, {self.descriptors()} after")

    async def watch(self) -> None:
        """Note the gateway's memory as the run goes on."""
        began = time.monotonic()
        print(f"{'requests':>9} {'answered':>9} {'left':>8} {'errors':>7} {'broken':>7} {'per s':>7} {'RSS MB':>7}")
        while True:
            await asyncio.sleep(0.05)
            if self.tally.total >= (len(self.memory) + 1) * self.requests / SAMPLES:
                self.memory.append((self.tally.total, self.gateway.rss_mb()))
                if len(self.memory) % (SAMPLES // ROWS) == 0 and self.tally.total < self.requests:
                    self.row(began)

    def row(self, began: float) -> None:
        """One row of the table."""
        got = self.tally.results
        rate = self.tally.total / (time.monotonic() - began)
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
        self.expect(outcomes["failed"] == 0, "requests failed although every worker was well")
        self.expect(sum_of("warmroute_worker_requests_in_flight{") == 0, "a worker still counts requests")
        self.expect(sum_of("warmroute_worker_prompt_tokens_in_flight{") == 0, "a worker still counts tokens")
        self.expect(active == 0, "connections to workers are still in use")
        self.expect(idle <= WORKERS * MAX_IDLE, "more idle connections than the pool may keep")
        self.expect(self.descriptors() <= idle + _OTHER_FDS, "descriptors are left open")
        for result in (Result.BROKEN, Result.CLEAN_ERROR, Result.CUT_SHORT):
            self.expect(self.tally.results[result] == 0, f"{result.value}: {self.tally.errors}")
        half = [rss for count, rss in self.memory if count > self.requests / 2]
        quarter = len(half) // 2
        if quarter:
            before, after = statistics.median(half[:quarter]), statistics.median(half[quarter:])
            print(f"RSS of the gateway in the second half: {before:.1f} MB, then {after:.1f} MB")
            self.expect(after <= before * FLAT, "memory grows in the second half")

    def expect(self, holds: bool, sentence: str) -> None:
        """Note what is wrong."""
        if not holds:
            self.wrong.append(sentence)


def main() -> None:
    """Run, print, and exit with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--leave", type=float, default=0.3, help="share of clients that leave (default: 0.3)")
    parser.add_argument("--clients", type=int, default=64, help="at once (default: 64)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    port, admin, *ports = free_ports(2 + WORKERS)
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "config.yaml"
        config.write_bytes(
            orjson.dumps(
                {
                    "listen": {"host": "127.0.0.1", "port": port},
                    "admin": {"host": "127.0.0.1", "port": admin},
                    "models": [
                        {"name": "m", "workers": [{"url": f"http://127.0.0.1:{p}", "driver": "vllm"} for p in ports]}
                    ],
                    "pool": {"max_idle": MAX_IDLE},
                }
            )
        )
        workers = [sys.executable, "-m", "bench.worker", "--tokens", "4", "--interval", "0.004", "--delay", "0.004"]
        stack.enter_context(
            running([*workers, *map(str, ports)], core=cores[-1], port=ports[-1], log=folder / "workers.log")
        )
        serve = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        gateway = stack.enter_context(running(serve, core=cores[0], port=port, log=folder / "gateway.log"))
        soak = Soak(port, admin, gateway, arguments.requests, arguments.leave, arguments.clients, arguments.seed)
        uvloop.run(soak.run())
        log = (folder / "gateway.log").read_text(errors="replace")
        soak.expect("Traceback" not in log and '"level":"error"' not in log, f"the gateway's log: {log[-2000:]}")
    for sentence in soak.wrong:
        print(f"WRONG: {sentence}")
    print("nothing is left over" if not soak.wrong else f"{len(soak.wrong)} things are wrong")
    sys.exit(1 if soak.wrong else 0)


if __name__ == "__main__":
    main()
