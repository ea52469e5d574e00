"""Workers on real sockets: simulated ones, and told ones that answer questions about tokens as a test wants them to."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
from aiohttp import web

from backends.registry import driver_named
from gateway.fleet.asking import open_session
from gateway.fleet.worker import Worker, WorkerState
from gateway.prompt.prompter import Prompter
from gateway.prompt.tokenizer import PromptTokenizer
from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import DATA


def member(url, driver="vllm", model="simulated", *, ready=True):
    """A worker as the gateway sees it."""
    worker = Worker(url=url, driver=driver_named(driver), model=model)
    if ready:
        worker.state, worker.routable = WorkerState.READY, True
    return worker


@pytest.fixture
def join():
    return member


@pytest.fixture(scope="session")
def tokenizer():
    return PromptTokenizer.from_directory(DATA)


@pytest.fixture
def local(tokenizer):
    prompter = Prompter(tokenizer)
    yield prompter
    prompter.close()


@pytest.fixture
async def session():
    async with open_session() as session:
        yield session


@pytest.fixture
async def simulate():
    """Start a `SimulatedWorker`; its `/render` routes are missing, as they are without ``--enable-scale-out``."""
    started = []

    async def simulate(**options):
        server = SimulatedWorker(WorkerOptions(speed=1000.0, **options))
        await server.start()
        started.append(server)
        return server, member(server.url)

    yield simulate
    for server in started:
        await server.stop()


@pytest.fixture
def changed_model(tmp_path):
    """The simulated worker's model directory with changes: to its template's text, or fewer merges."""

    def changed(template=None, merges=None):
        directory = tmp_path / "model"
        shutil.copytree(DATA, directory)
        path = directory / "tokenizer.json"
        if template is not None:
            text = (DATA / "chat_template.jinja").read_text()
            assert template[0] in text
            (directory / "chat_template.jinja").write_text(text.replace(*template))
        if merges is not None:
            content = json.loads(path.read_text())
            del content["model"]["merges"][merges:]
            path.write_text(json.dumps(content))
        return directory

    return changed


class ToldWorker:
    """Answers each path as `answers` says: a function of the body that returns JSON, a status, or None to hang."""

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.bodies = []
        self.url = ""
        self.news = asyncio.Event()
        self._stopped = asyncio.Event()
        self._runner = None

    async def start(self):
        self._runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self):
        self._stopped.set()
        await self._runner.cleanup()

    async def _answer(self, request):
        body = json.loads(await request.read())
        self.asked.append(request.path)
        self.bodies.append(body)
        self.news.set()
        answer = self.answers.get(request.path, lambda _body: 404)(body)
        if answer is None:
            await self._stopped.wait()
            answer = 500
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)


@pytest.fixture
async def told():
    """A started `ToldWorker`, and it as the gateway sees it."""
    started = []

    async def told(driver="vllm", **answers):
        server = ToldWorker()
        await server.start()
        started.append(server)
        return server, member(server.url, driver)

    yield told
    for server in started:
        await server.stop()


@pytest.fixture
def truth(local):
    """Functions of a body that give its right ids, as `/tokenize`, `/render` and a request with `return_token_ids` do."""

    def ids(body):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return local.now(path, body).ids.tolist()

    def generated(body):
        assert body["max_tokens"] == 1
        assert body["return_token_ids"] is True
        return {"prompt_token_ids": ids(body), "usage": {"prompt_tokens": len(ids(body))}}

    return SimpleNamespace(
        ids=ids,
        tokenize=lambda body: {"tokens": ids(body), "count": len(ids(body))},
        render=lambda body: {"token_ids": ids(body), "features": None},
        generated=generated,
    )


@pytest.fixture
def until():
    """Wait until a condition holds that no event announces."""

    async def until(condition, seconds=10.0):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - the states are plain attributes, without an event
                await asyncio.sleep(0.005)

    return until
