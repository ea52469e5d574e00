"""Workers on real sockets, and what the tests read from them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import WorkerTokenizer

FIXTURES = Path(__file__).parent / "fixtures"
Starter = Callable[..., Awaitable[SimulatedWorker]]


@pytest.fixture(scope="session")
def tokenizer() -> WorkerTokenizer:
    return WorkerTokenizer()


@pytest.fixture(scope="session")
def recorded() -> list[dict[str, Any]]:
    with (FIXTURES / "exchanges.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture
async def start(tokenizer: WorkerTokenizer) -> AsyncIterator[Starter]:
    workers: list[SimulatedWorker] = []

    async def start(**options: Any) -> SimulatedWorker:
        options.setdefault("speed", 50.0)
        worker = SimulatedWorker(WorkerOptions(**options), tokenizer=tokenizer)
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.fixture
def events_of() -> Callable[[str], list[Any]]:
    """The JSON objects of a stream's `data:` lines, ``[DONE]`` as a string."""

    def events_of(text: str) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    return events_of


@pytest.fixture
def chat() -> Callable[..., dict[str, Any]]:
    """A chat request's body."""

    def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
        return {"model": "simulated", "messages": [{"role": "user", "content": content}], **fields}

    return chat


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of recordings."""
    return FIXTURES


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Wait until a condition holds that no event announces; fail after five seconds."""

    async def eventually(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.001)

    return eventually
