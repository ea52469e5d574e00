"""What one decision costs: CPU time of `decide()` with the candidates given. Run as ``python -m bench.decide``.

Each cell is the least of `ROUNDS` rounds of `DECISIONS` decisions, in microseconds of `time.process_time`: other programs on the
machine make a round slower, never faster. Workers are the gateway's own class, with loads that change between
decisions as they would: the chosen one gets a request, the one that got a request n decisions ago gives it back.
Policies that read matches find that every fourth worker holds a part of the prompt, each another one; finding
matches is not measured here (`bench.prefix`). What is pending stays as it was, one prompt a worker, at whose prefill the worker is.
"""

import argparse
import gc
import itertools
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.fleet.worker import Worker
from policies.base import Candidate, Match, Policy, RouteRequest
from policies.registry import Registry

if TYPE_CHECKING:
    from backends.base import Driver

SIZES: Final = (2, 8, 64, 256)
ROUNDS: Final = 15
DECISIONS: Final = 1500
PROMPT_TOKENS: Final = 8192
TARGETS_US: Final = {
    "leastload": {2: 2.0, 8: 3.0, 64: 12.0},
    "kvaware": {8: 6.0, 64: 30.0, 256: 110.0},
    "ttft": {8: 15.0, 64: 60.0, 256: 200.0},
}
"""What the project set itself, in microseconds by number of workers."""


def fleet(size: int) -> list[Candidate]:
    """The candidates of a fleet of routable workers, of which every fourth holds a part of the prompt."""
    driver: Driver = None  # type: ignore[assignment] # a decision never asks it
    workers = [Worker(url=f"http://10.0.0.{n}:8000", driver=driver, model="m") for n in range(size)]
    for worker in workers:
        worker.routable = True
    rng = random.Random(1)
    held = [Match(device=512 * rng.randrange(1, 16), source="event") for _ in range(size // 4)]
    return [Candidate(worker, held[n // 4]) if n % 4 == 3 else worker.candidate for n, worker in enumerate(workers)]


def sessions(count: int = 512) -> list[RouteRequest]:
    """Chat requests of different sessions with a system prompt in common."""
    return [
        RouteRequest(
            model="m",
            prompt_tokens=PROMPT_TOKENS,
            now=1.01,
            headers={"x-session-id": f"session-{n}"},
            body={
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant. " * 40},
                    {"role": "user", "content": f"Question {n}: " + "how does it work? " * 20},
                ]
            },
        )
        for n in range(count)
    ]


def cost_us(policy: Policy, candidates: Sequence[Candidate], requests: Sequence[RouteRequest]) -> float:
    """Microseconds of CPU per decision, the least of several rounds, what the loop itself costs taken off."""
    best = empty = float("inf")
    running: deque[Worker] = deque()
    for _ in range(ROUNDS):
        turns = list(itertools.islice(itertools.cycle(requests), DECISIONS))
        loads = _round(policy, candidates, turns, running)
        best = min(best, loads)
        started = time.process_time()
        for _request in turns:
            worker = candidates[0].worker
            running.append(worker)  # type: ignore[arg-type]
            running.popleft()
        empty = min(empty, time.process_time() - started)
    return (best - empty) / DECISIONS * 1e6


def _round(
    policy: Policy, candidates: Sequence[Candidate], turns: Sequence[RouteRequest], running: "deque[Worker]"
) -> float:
    """Seconds of CPU for one decision per turn."""
    decide = policy.decide
    while len(running) < len(candidates):
        worker = candidates[len(running)].worker
        worker.acquire(PROMPT_TOKENS, now=1.0)  # type: ignore[attr-defined]
        running.append(worker)  # type: ignore[arg-type]
    started = time.process_time()
    for request in turns:
        decision = decide(request, candidates)
        worker = decision.chosen.worker  # type: ignore[union-attr]
        worker.in_flight += 1  # type: ignore[misc]
        running.append(worker)  # type: ignore[arg-type]
        running.popleft().in_flight -= 1
    return time.process_time() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="CPU microseconds per policy decision")
    parser.add_argument("policies", nargs="*", help="presets; all of them when left out")
    names = parser.parse_args().policies or Registry.default().presets()
    requests = sessions()
    gc.disable()
    print("CPU us per decision".ljust(22) + "".join(f"{size} workers".rjust(14) for size in SIZES))
    for name in names:
        row = name.ljust(22)
        for size in SIZES:
            row += f"{cost_us(Registry.default().build(name, {}, seed=1), fleet(size), requests):.2f}".rjust(14)
        print(row)
    for name, targets in TARGETS_US.items():
        print(
            f"target {name}".ljust(22) + "".join(f"{targets[n]:.2f}".rjust(14) if n in targets else "" for n in SIZES)
        )


if __name__ == "__main__":
    main()
