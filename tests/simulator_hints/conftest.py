"""Simulated workers with an l2 in common, and what LMCache's real servers answered."""

import json
from pathlib import Path

import aiohttp
import pytest

from simulator.server import SharedMemory, SimulatedWorker, WorkerOptions
from simulator.tokenizer import WorkerTokenizer

FIXTURES = Path(__file__).parent / "fixtures"
BLOCK = 16


@pytest.fixture(scope="session")
def tokenizer():
    return WorkerTokenizer()


@pytest.fixture
async def start(tokenizer):
    """`start(shared=None, **options)`: a running worker with blocks of 16 tokens."""
    workers = []

    async def start(shared=None, **options):
        settings = {
            "model": "sim",
            "profile": "h100-8b",
            "speed": 50.0,
            "block_size": BLOCK,
            "lmcache_chunk": 32,
            "seed": len(workers),
        }
        worker = SimulatedWorker(WorkerOptions(**settings | options), tokenizer=tokenizer, shared=shared)
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
def shared():
    """Storage that workers have in common."""
    return SharedMemory(4096)


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.fixture
def call(http):
    """`call(method, url, body=None)`: status and JSON of an answer."""

    async def call(method, url, body=None):
        async with http.request(method, url, json=body) as answer:
            return answer.status, json.loads(await answer.read() or b"null")

    return call


@pytest.fixture
def complete(call):
    """`complete(worker, ids, **fields)`: cached tokens of a completion of one token."""

    async def complete(worker, ids, **fields):
        status, answer = await call(
            "POST", f"{worker.url}/v1/completions", {"model": "sim", "prompt": ids, "max_tokens": 1, **fields}
        )
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    return complete


@pytest.fixture(scope="session")
def recorded():
    """`recorded(server, label)`: status and body that a real server answered."""
    exchanges = json.loads((FIXTURES / "lmcache.json").read_text())

    def recorded(server, label, **found):
        for each in exchanges[server]:
            if each["label"] == label and found.items() <= (each["response"] or {}).items():
                return each["status"], each["response"]
        raise LookupError(label)

    return recorded
