"""A whole gateway with `l2`: what storage has is a match on workers that never saw the prompt, and a coordinator that hangs delays nobody."""

import asyncio
import time
from array import array

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.load import loads
from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import DATA, WorkerTokenizer
from tests.lmcache.test_directory_feed import LMCache

PROMPT = list(range(2000, 2000 + 64 * 20 + 9))


@pytest.fixture
async def running():
    """(gateway, workers, LMCache's servers)."""
    tokenizer = WorkerTokenizer()
    workers = [
        SimulatedWorker(WorkerOptions(model="sim", speed=200.0, seed=n, profile="h100-8b"), tokenizer=tokenizer)
        for n in range(2)
    ]
    lmcache = LMCache()
    await lmcache.start()
    for worker in workers:
        await worker.start()
    lines = "\n".join(f'      - {{url: "{worker.url}", driver: vllm}}' for worker in workers)
    gateway = Gateway(
        loads(
            "listen: {port: 0}\nadmin: {port: 0}\n"
            f"models:\n  - name: sim\n    tokenizer: {DATA}\n"
            f"    l2: {{url: '{lmcache.url}', chunk: 64, model: /m}}\n    workers:\n{lines}\n"
        )
    )
    await gateway.start()
    assert await gateway.wait_ready(10)
    yield gateway, workers, lmcache
    await gateway.stop(1)
    for worker in workers:
        await worker.stop()
    await lmcache.runner.cleanup()


async def ask(gateway, prompt):
    body = {"model": "sim", "prompt": prompt, "max_tokens": 2}
    async with aiohttp.ClientSession() as http:
        started = time.monotonic()
        async with http.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()
        return time.monotonic() - started


async def until(condition):
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


def matches(gateway, prompt):
    index = gateway._matching.feeds.index
    chains = index.hasher.chains(index.hasher.root("sim"), array("I", prompt), index.block_sizes)
    return index.match(chains)


async def test_what_storage_has_is_a_match_on_a_worker_that_never_saw_the_prompt(running):
    gateway, workers, lmcache = running
    lmcache.put(PROMPT, "l2")
    await until(lambda: gateway._directories.snapshot()[0].chunk)
    await ask(gateway, PROMPT)
    await until(lambda: len(matches(gateway, PROMPT)) == len(workers))
    found = matches(gateway, PROMPT)
    assert max(match.l2 for match in found.values()) == 64 * 20
    assert all(match.tokens >= 64 * 20 for match in found.values())


async def test_a_coordinator_that_hangs_delays_no_request(running):
    gateway, _, lmcache = running
    await until(lambda: gateway._directories.snapshot()[0].chunk)
    well = sorted([await ask(gateway, [n, *PROMPT]) for n in range(15)])
    lmcache.mode = "hangs"
    lmcache.changed.clear()
    first = await ask(gateway, [100, *PROMPT])
    await asyncio.wait_for(lmcache.changed.wait(), 10)  # and now it is asked, and does not answer
    hanging = sorted([first] + [await ask(gateway, [100 + n, *PROMPT]) for n in range(1, 15)])
    # The medians: what the machine does besides is not what is tested.
    assert hanging[7] < well[7] + 0.05
