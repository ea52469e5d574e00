"""Does the running gateway hit what `warmroute replay` predicts? ``python -m bench.agreement``.

Agents' requests (real text, one session after the other's turns) go through a gateway in front of workers that serve HTTP and publish KV
events. The gateway writes its request log; the log is then replayed in virtual time with the same policy on a fleet of the same shape, and
the hit rates are compared: what the answers' usage called cached, and what the replay says. Exit status 1 if they differ by more than
three points.

The replay is run with several seeds, and their mean is compared. Where caches thrash it differs more between seeds than the three points: which of
several idle workers gets a prompt that nobody holds is by chance, and whom it evicts there decides what is found later. With `--kv-tokens 14000` seeds found
0.44 to 0.59 where the gateway found 0.80, at 4 times the speed, the same with events up to 0.2 s late: it is not the events' lag. Figures
of such fleets cannot be held to three points.

Without ``--worker`` the workers are simulated ones in this process, `--speed` times as fast as real ones. The faster they are, the more the
milliseconds of gateway and network weigh, of which the replay knows nothing. With ``--worker URL``, once per
worker, they are real: say with ``--profile``, ``--block-tokens`` and ``--kv-tokens`` what the replay should take them for, and with
``--tokenizer`` and ``--model`` what they serve. Their caches should be empty. The trace has one JSON object a line with ``session_id`` and
``input``, such as github.com/LMCache/lmcache-agent-trace.
"""

import argparse
import asyncio
import contextlib
import gzip
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import mean
from typing import Any, Final

import aiohttp
import orjson
import uvloop

from backends.profiles import Profile, profile_named
from bench.hits import Hits
from gateway.app import Gateway
from gateway.config.load import loads
from simulator.fleet import FleetOptions, WorkerOptions, side_by_side
from simulator.server import SimulatedWorker
from simulator.server import WorkerOptions as Served
from simulator.tokenizer import DATA, WorkerTokenizer
from simulator.workloads import load

POINTS: Final = 0.03
SEEDS: Final = 5
"""Of the replay's ties."""
FIXTURE: Final = Path(__file__).resolve().parents[1] / "tests/e2e/fixtures/miniswe.jsonl.gz"


def sessions(path: Path, limit: int, characters: int) -> list[list[str]]:
    """The inputs of each session in order, of the trace's first `limit` requests that are not longer than `characters`."""
    found: dict[str, list[str]] = {}
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for line in lines:
            request = orjson.loads(line)
            if len(request["input"]) <= characters and limit:
                found.setdefault(str(request["session_id"]), []).append(request["input"])
                limit -= 1
    return list(found.values())


@contextlib.asynccontextmanager
async def workers(arguments: argparse.Namespace, profile: Profile) -> AsyncIterator[list[str]]:
    """URLs of the workers, simulated ones for as long as the block lasts."""
    if arguments.worker:
        yield arguments.worker
        return
    tokenizer = WorkerTokenizer()
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for number in range(arguments.workers):
            worker = SimulatedWorker(
                Served(
                    model=arguments.model,
                    speed=arguments.speed,
                    seed=number,
                    profile=profile,
                    kv_events="tcp://127.0.0.1:*",
                    kv_events_replay="tcp://127.0.0.1:*",
                ),
                tokenizer=tokenizer,
            )
            await worker.start()
            stack.push_async_callback(worker.stop)
            urls.append(worker.url)
        yield urls


async def ask(url: str, model: str, talks: list[list[str]], at_once: int, output: int, pause: float) -> Hits:
    """All sessions, so many at once; within one a turn comes `pause` seconds after the answer before it."""
    heard = Hits()
    slots = asyncio.Semaphore(at_once)

    async def talk(http: aiohttp.ClientSession, number: int, inputs: list[str]) -> None:
        async with slots:
            for text in inputs:
                body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": output}
                headers = {"x-session-id": f"s{number}"}
                async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                    answer: dict[str, Any] = await response.json()
                if heard.add(response.status, answer):
                    await asyncio.sleep(pause)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http, asyncio.TaskGroup() as tasks:
        for number, inputs in enumerate(talks):
            tasks.create_task(talk(http, number, inputs))
    return heard


async def through_the_gateway(arguments: argparse.Namespace, profile: Profile, log: Path) -> Hits:
    """Send the sessions; the gateway leaves its request log in `log`."""
    async with workers(arguments, profile) as urls:
        config = {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "health": {"slow_start": 0},
            "telemetry": {"request_log": {"file": str(log)}},
            "models": [
                {
                    "name": arguments.model,
                    "policy": arguments.policy,
                    "tokenizer": str(arguments.tokenizer),
                    "workers": [{"url": url, "driver": "vllm"} for url in urls],
                }
            ],
        }
        gateway = Gateway(loads(orjson.dumps(config).decode()))
        await gateway.start()
        try:
            if not await gateway.wait_ready(60):
                raise SystemExit("the workers do not get ready")
            async with asyncio.timeout(30):
                while {row.status for row in gateway.metrics.readings.feeds()} != {"events"}:  # noqa: ASYNC110 - no event of its own
                    await asyncio.sleep(0.05)
            talks = sessions(arguments.trace, arguments.requests, arguments.characters)
            url = f"http://127.0.0.1:{gateway.port}"
            return await ask(url, arguments.model, talks, arguments.sessions, arguments.output, arguments.pause)
        finally:
            await gateway.stop(1)


def main() -> None:
    """Run both, print, and exit with 1 if they do not agree."""
    arguments = parser().parse_args()
    shape = WorkerOptions(block_tokens=arguments.block_tokens, kv_tokens=arguments.kv_tokens)
    profile = shape.apply(profile_named(arguments.profile))
    count = len(arguments.worker) or arguments.workers
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        heard = uvloop.run(through_the_gateway(arguments, profile, log))
        workload = load(log, "warmroute")
    # A second on the log's clock is `speed` seconds of the workers'.
    speed = 1.0 if arguments.worker else 1 / arguments.speed
    found = []
    for seed in range(SEEDS):
        options = FleetOptions(profile=profile, workers=count, speed=speed, seed=seed)
        (result,) = side_by_side(workload, options, [arguments.policy], jobs=1)
        found.append(result.summary()["hit_rate"])
    predicted = mean(found)
    rate = heard.rate
    print(
        f"{heard.requests} requests, {heard.failed} failed, {heard.prompt:,} prompt tokens over {count} workers of "
        f"{profile.kv_blocks * profile.block_size:,} tokens, {arguments.policy}\n"
        f"hit rate through the gateway {rate:.4f}, replay of its log {predicted:.4f} ({min(found):.4f} to {max(found):.4f} over {SEEDS} seeds): "
        f"{abs(rate - predicted) * 100:.2f} points apart"
    )
    sys.exit(0 if heard.failed == 0 and abs(rate - predicted) <= POINTS else 1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--trace", type=Path, default=FIXTURE, help="of the agents (default: a small one of the tests)")
    made.add_argument("--requests", type=int, default=200, help="at most (default: 200)")
    made.add_argument("--characters", type=int, default=40_000, help="of a request at most (default: 40000)")
    made.add_argument("--sessions", type=int, default=8, help="at once (default: 8)")
    made.add_argument("--output", type=int, default=32, help="tokens of an answer (default: 32)")
    made.add_argument("--pause", type=float, default=0.05, help="seconds between two turns (default: 0.05)")
    made.add_argument("--policy", default="ttft")
    made.add_argument("--workers", type=int, default=4, help="simulated ones (default: 4)")
    made.add_argument("--speed", type=float, default=4.0, help="of the simulated ones (default: 4)")
    made.add_argument("--worker", action="append", default=[], metavar="URL", help="a real one; repeatable")
    made.add_argument("--model", default="sim")
    made.add_argument("--tokenizer", type=Path, default=DATA, help="folder of the model's")
    made.add_argument("--profile", default="h100-8b", help="of the workers (default: h100-8b)")
    made.add_argument("--block-tokens", type=int, default=16)
    made.add_argument("--kv-tokens", type=int, default=48_000, help="of each worker's cache (default: 48000)")
    return made


if __name__ == "__main__":
    main()
