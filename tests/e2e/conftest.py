"""A whole gateway in front of simulated workers, as `warmroute demo` runs it."""

import asyncio

import pytest

from gateway.app import Gateway
from gateway.config.load import loads
from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import WorkerTokenizer

MODEL = "sim"
SPEED = 200.0


@pytest.fixture(scope="session")
def tokenizer():
    return WorkerTokenizer()


@pytest.fixture
async def fleet(tokenizer):
    """(gateway, workers): three simulated workers, 200 times as fast as real ones."""
    workers = [
        SimulatedWorker(WorkerOptions(model=MODEL, speed=SPEED, seed=number, profile="h100-8b"), tokenizer=tokenizer)
        for number in range(3)
    ]
    for worker in workers:
        await worker.start()
    lines = "\n".join(f'      - {{url: "{worker.url}", driver: vllm}}' for worker in workers)
    gateway = Gateway(
        loads(
            "listen: {port: 0}\nadmin: {port: 0}\n"
            f"models:\n  - name: {MODEL}\n    aliases: [gpt-4o-mini, claude]\n    workers:\n{lines}\n"
        )
    )
    await gateway.start()
    assert await gateway.wait_ready(5)
    yield gateway, workers
    await gateway.stop(1)
    for worker in workers:
        await worker.stop()
    metrics = gateway.metrics
    assert metrics.in_flight == 0
    assert metrics.accepted == sum(series.count for series in metrics.requests.values())
    await asyncio.sleep(0)
