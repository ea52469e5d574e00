"""Small servers that answer as they are told, hints to say to them, and a gateway with residency before simulated workers."""

import asyncio
import json
from array import array
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from backends.hints.model import Action, Hint, Subject
from backends.vllm import VLLMDriver
from gateway.app import Gateway
from gateway.config.load import loads
from gateway.fleet.asking import open_session
from gateway.fleet.worker import Worker, WorkerState
from simulator.tokenizer import DATA

FIXTURES = Path(__file__).parent / "fixtures"


def subject(tokens=100, *, exact=True, session="", salt=None, lora=None):
    ids = array("I", range(1000, 1000 + tokens))
    return Subject("m", tokens, {16: list(range(tokens // 16))}, (lambda: ids) if exact else None, salt, lora, session)


_numbers = iter(range(1, 1 << 30))


def hint(action=Action.RETAIN, *, about=None, worker="w", stop=None, rule="test", **fields):
    about = about or subject()
    return Hint(
        id=next(_numbers),
        action=Action(action),
        rule=rule,
        worker=worker,
        subject=about,
        stop=about.tokens if stop is None else stop,
        **fields,
    )


@pytest.fixture(scope="session")
def make_subject():
    """`subject(tokens, exact=..., session=...)`."""
    return subject


@pytest.fixture(scope="session")
def make_hint():
    """`hint(action, about=..., start=..., stop=..., ...)`, about 100 tokens unless told otherwise."""
    return hint


@pytest.fixture(scope="session")
def make_worker():
    """`ready_worker(url)`."""
    return ready_worker


@pytest.fixture(scope="session")
def recorded():
    """What a real vLLM 0.32 answered to bodies with and without hints."""
    return json.loads((FIXTURES / "vllm_0_32_hints.json").read_text())


class Server:
    """Answers every request by `answer(request, body)`, and keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.answer = lambda _request, _body: web.json_response({})
        self.arrived = asyncio.Event()
        self.url = ""

    async def handle(self, request):
        body = await request.read()
        self.asked.append((request.method, request.path, json.loads(body) if body else None, request.headers))
        self.arrived.set()
        answer = self.answer(request, body)
        return await answer if asyncio.iscoroutine(answer) else answer


@pytest.fixture
async def server():
    one = Server()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", one.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield one
    await runner.cleanup()


@pytest.fixture
async def session():
    async with open_session() as one:
        yield one


def ready_worker(url="http://127.0.0.1:1", **options):
    worker = Worker(url=url, driver=VLLMDriver(), model="tiny", worker_id="w", **options)
    worker.state = WorkerState.READY
    worker.routable = True
    return worker


class Scene:
    """A running gateway with residency, its workers, and a client."""

    def __init__(self, gateway, http, model):
        self.gateway = gateway
        self.http = http
        self.model = model
        self.url = f"http://127.0.0.1:{gateway.port}"
        self.admin = f"http://127.0.0.1:{gateway.admin_port}"

    async def chat(self, *texts, headers=None, path="/v1/chat/completions", **fields):
        """(status, document, header fields) of a chat that is read to its end."""
        messages = [
            {"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(texts)
        ]
        body = {"model": self.model, "messages": messages, "max_tokens": 2, **fields}
        async with self.http.post(f"{self.url}{path}", json=body, headers=headers or {}) as answer:
            return answer.status, await answer.json(), answer.headers

    async def residency(self):
        async with self.http.get(f"{self.admin}/api/residency") as answer:
            return await answer.json()

    async def degraded(self):
        async with self.http.get(f"{self.admin}/readyz") as answer:
            return (await answer.json())["degraded"]

    async def hints(self):
        """The latest hints, the first one first."""
        (fleet,) = (await self.residency())["fleets"]
        return fleet["hints"][::-1]

    async def until(self, condition):
        """Wait until `condition` of the latest hints holds, and give them."""
        while not condition(hints := await self.hints()):  # noqa: ASYNC110 - the books tell nobody
            await asyncio.sleep(0.01)
        return hints


@pytest.fixture
async def gateway_before(conservation):
    """`gateway_before(urls, ...)`: a `Scene` before the workers at these URLs; at the end the law of conservation must hold."""
    gateways = []
    async with AsyncExitStack() as stack:

        async def gateway_before(
            urls,
            *,
            hints="{driver: kv-hints}",
            residency="{rules: {retain: true}}",
            model="",
            top="",
            driver="vllm",
            capabilities="{}",
        ):
            lines = "\n".join(
                f'      - {{url: "{url}", driver: {driver}, hints: {hints(url) if callable(hints) else hints}, '
                f"capabilities: {capabilities}}}"
                for url in urls
            )
            one = Gateway(
                loads(
                    "listen: {port: 0}\nadmin: {port: 0}\nhealth: {interval: 100ms, slow_start: 0, ejection: {base: 10ms}}\n"
                    f"residency: {residency}\n{top}"
                    f"models:\n  - name: sim\n    policy: ttft\n    tokenizer: {DATA}\n{model}    workers:\n{lines}\n"
                )
            )
            await one.start()
            gateways.append(one)
            stack.push_async_callback(one.stop, 1.0)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            assert await one.wait_ready(20)
            # How long blocks are is known when it is known how a worker's cache is.
            while any(feed.status == "connecting" for feed in one.metrics.readings.feeds()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return Scene(one, http, "sim")

        yield gateway_before
    for one in gateways:
        assert conservation.broken(one) == []
        for live in one.proxy.residencies.values():
            assert live.faults == 0
            assert live.core.ledger.offered == live.core.ledger.ended + len(live.core.ledger.open)
    assert conservation.tasks() == []
