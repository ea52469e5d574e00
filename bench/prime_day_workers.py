"""The Rufus fleet of `bench.prime_day` as HTTP workers in one process: ``python -m bench.prime_day_workers SPEED PORT...``.

Three ports a worker: HTTP, KV events, replay of events. Time passes SPEED times as fast in them.
"""

import asyncio
import sys
from dataclasses import replace

import uvloop

from backends.profiles import Profile, profile_named
from bench.prime_day import PLANNERS, WORKERS
from simulator.server import WorkerOptions
from simulator.server.worker import SimulatedWorker
from simulator.tokenizer import DATA, WorkerTokenizer

MODEL = "rufus"


def profiles() -> list[Profile]:
    """One for each worker, the planner's first."""
    profile = profile_named("trn1-8b")
    planner = replace(profile, name="trn1-8b-medusa", slots=1, tokens_per_step=3.0)
    return [planner] * len(PLANNERS) + [profile] * (WORKERS - len(PLANNERS))


async def serve(speed: float, ports: list[int]) -> None:
    """Run until killed."""
    tokenizer = WorkerTokenizer(DATA)
    trios = zip(*[iter(ports)] * 3, strict=True)
    for number, (profile, (port, events, replays)) in enumerate(zip(profiles(), trios, strict=True)):
        worker = SimulatedWorker(
            WorkerOptions(
                port=port,
                profile=profile,
                model=MODEL,
                kv_events=f"tcp://127.0.0.1:{events}",
                kv_events_replay=f"tcp://127.0.0.1:{replays}",
                speed=speed,
                seed=number,
            ),
            tokenizer=tokenizer,
        )
        await worker.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(float(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
