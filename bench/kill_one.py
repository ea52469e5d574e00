"""One of four workers is killed with SIGKILL under 200 requests at once: only what it was serving fails, each with a clean error.

``python -m bench.kill_one``. The gateway and each worker are processes of their own, the clients this one. What the killed worker was serving at that
moment is read from the gateway's own counters just before. Exit status 1 if more than that fails, or anything fails badly.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import orjson
import uvloop

from bench.clients import Client, Result, Tally, free_ports, scrape, until_ready
from bench.processes import Process, running

WORKERS: Final = 4


async def run(port: int, admin: int, victim: Process, worker: str, clients: int, seconds: float) -> tuple[Tally, float]:
    """Load for a while, kill, load on; all that happened, and how many requests the killed worker was serving."""
    await until_ready(admin, WORKERS)
    tally = Tally()
    end = time.monotonic() + 2 * seconds
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            client = Client(port, random.Random(number), tally, leave=0.0)
            group.create_task(client.asks(lambda: time.monotonic() < end))
        await asyncio.sleep(seconds)
        samples = await scrape(admin)
        served = samples[f'warmroute_worker_requests_in_flight{{model="m",worker="{worker}"}}']
        for pid in victim.tree():
            os.kill(pid, signal.SIGKILL)
    return tally, served


def main() -> None:
    """Run, print, and exit with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="requests at once (default: 200)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of load before and after the kill (default: 3)")
    arguments = parser.parse_args()
    port, admin, *ports = free_ports(2 + WORKERS)
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = []
        for number in ports:
            command = [sys.executable, "-m", "bench.worker", "--tokens", "20", "--interval", "0.02", "--delay", "0.1"]
            log = folder / f"worker-{number}.log"
            workers.append(stack.enter_context(running([*command, str(number)], core=cores[-1], port=number, log=log)))
        config = folder / "config.yaml"
        urls = [{"url": f"http://127.0.0.1:{number}", "driver": "vllm"} for number in ports]
        config.write_bytes(
            orjson.dumps(
                {
                    "listen": {"host": "127.0.0.1", "port": port},
                    "admin": {"host": "127.0.0.1", "port": admin},
                    "models": [{"name": "m", "workers": urls}],
                }
            )
        )
        serve = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        stack.enter_context(running(serve, core=cores[0], port=port, log=folder / "gateway.log"))
        tally, served = uvloop.run(
            run(port, admin, workers[0], f"127.0.0.1:{ports[0]}", arguments.clients, arguments.seconds)
        )
    results = tally.results
    failed = results[Result.CLEAN_ERROR] + results[Result.CUT_SHORT]
    print(f"{tally.total} requests, {arguments.clients} at once; the killed worker was serving {served:.0f}")
    for result, count in results.items():
        if count:
            print(f"  {result.value:<12} {count:>6}")
    for error, count in sorted(tally.errors.items()):
        print(f"  of these     {count:>6}  {error}")
    # Requests that began between the look at the counters and the kill may add a few.
    right = results[Result.BROKEN] == 0 and failed <= served * 1.1 + 2 and results[Result.ANSWERED] > 0
    print(
        "only what it was serving failed, cleanly" if right else "WRONG: more failed than the killed worker was serving"
    )
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
