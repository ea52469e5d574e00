"""A gateway with an inspector in front of simulated workers, and questions to its admin listener."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import orjson
import pytest

from gateway.app import Gateway
from gateway.config.load import loads
from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import DATA, WorkerTokenizer

MODEL = "sim"


@pytest.fixture(scope="session")
def tokenizer():
    return WorkerTokenizer()


class Scene:
    """A running gateway, its workers and a client of both listeners."""

    def __init__(self, gateway, workers, http, model):
        self.gateway = gateway
        self.workers = workers
        self.http = http
        self.model = model
        self.admin = f"http://127.0.0.1:{gateway.admin_port}"
        self.ids = [worker.url.rpartition("/")[2] for worker in workers]

    async def get(self, path, **options):
        """(status, document) of a GET on the admin listener."""
        async with self.http.get(f"{self.admin}{path}", **options) as answer:
            return answer.status, await answer.json()

    async def post(self, path, document, **options):
        async with self.http.post(f"{self.admin}{path}", json=document, **options) as answer:
            return answer.status, await answer.json()

    async def chat(self, *texts, **fields):
        """(request id, status) of a chat through the gateway, read to its end."""
        messages = [
            {"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(texts)
        ]
        body = {"model": self.model, "messages": messages, "max_tokens": 4, "stream": True, **fields}
        async with self.http.post(f"http://127.0.0.1:{self.gateway.port}/v1/chat/completions", json=body) as answer:
            await answer.read()
            request_id, status = answer.headers["x-request-id"], answer.status
        # The record is written when the gateway has seen the end, which may be a moment after the client has.
        while self.gateway.decisions.running():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return request_id, status


@pytest.fixture
def scene(tokenizer):
    """Opens a `Scene`; `admin` is YAML for that section, `settings` more YAML for the top level."""

    @asynccontextmanager
    async def scene(count=2, *, policy="kvaware", model=MODEL, admin="", settings="", profile="h100-8b", speed=200.0):
        workers = [
            SimulatedWorker(
                WorkerOptions(
                    model=MODEL,
                    speed=speed,
                    seed=number,
                    profile=profile,
                    kv_events="tcp://127.0.0.1:*",
                    kv_events_replay="tcp://127.0.0.1:*",
                ),
                tokenizer=tokenizer,
            )
            for number in range(count)
        ]
        async with AsyncExitStack() as stack:
            for worker in workers:
                await worker.start()
                stack.push_async_callback(worker.stop)
            lines = "\n".join(f'      - {{url: "{worker.url}", driver: vllm, model: {MODEL}}}' for worker in workers)
            gateway = Gateway(
                loads(
                    f"listen: {{port: 0}}\nadmin: {{port: 0{admin}}}\nhealth: {{interval: 200ms, slow_start: 0}}\n{settings}"
                    f"models:\n  - name: {orjson.dumps(model).decode()}\n    policy: {policy}\n    tokenizer: {DATA}\n    workers:\n{lines}\n"
                )
            )
            await gateway.start()
            stack.push_async_callback(gateway.stop, 0.5)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            async with asyncio.timeout(20):
                while not _followed(gateway, count):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            yield Scene(gateway, workers, http, model)

    return scene


def _followed(gateway, count):
    """Every worker is ready, and followed where somebody wants that."""
    feeds = list(gateway.metrics.readings.feeds())
    ready = sum(fleet.ready for fleet in gateway.inspector.fleets())
    return ready == count and all(feed.status == "events" for feed in feeds)
