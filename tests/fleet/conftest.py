"""Workers that behave as told, on real sockets, and what a monitor needs around them."""

import asyncio
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from aiohttp import web

from gateway.config.schema import Config, Ejection, Health, Model
from gateway.config.schema import Worker as WorkerConfig
from gateway.fleet.asking import open_session
from gateway.fleet.fleet import Fleets
from gateway.fleet.health import HealthMonitor

QUICK = Health(
    interval=0.05,
    timeout=0.5,
    unhealthy_after=2,
    slow_start=0.0,
    ejection=Ejection(consecutive_failures=3, base=0.2, max=1.0),
)


class FirstPolicy:
    """A policy object with an identity; it is never asked here."""

    def __init__(self, name):
        self.name = name

    def decide(self, request, candidates):
        raise NotImplementedError


class ToldWorker:
    """An HTTP server whose `/health` answers `status`, or hangs while `status` is None; it counts what it was asked."""

    def __init__(self):
        self.status = 200
        self.headers = {}
        self.cards = {"object": "list", "data": [{"id": "m", "object": "model", "created": 7, "owned_by": "vllm"}]}
        self.pages = {}
        self.asked = []
        self.authorizations = []
        self.port = 0
        self._runner = None
        self._news = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        self._stopped.clear()
        self._runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self):
        self._stopped.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def checks(self, count):
        """Wait until `count` more health checks came."""
        wanted = self.asked.count("/health") + count
        while self.asked.count("/health") < wanted:
            self._news.clear()
            await self._news.wait()

    async def _answer(self, request):
        self.asked.append(request.path)
        self.authorizations.append(request.headers.get("authorization"))
        self._news.set()
        if request.path == "/v1/models":
            return web.json_response(self.cards)
        if request.path in self.pages:
            return web.Response(text=self.pages[request.path])
        if self.status is None:
            await self._stopped.wait()
            return web.Response(status=500)
        return web.Response(status=self.status, headers=self.headers)


@pytest.fixture
async def told():
    """A started `ToldWorker` per call."""
    servers = []

    async def make():
        server = ToldWorker()
        await server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        await server.stop()


@pytest.fixture
def free_port():
    """A port on which nobody listens (bound, not listening, for the length of the test)."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def build():
    """Small builders: `config`, `fleets` of one model per list of URLs, `policy`."""

    def config(urls, *, name="m", driver="vllm", health=QUICK, **more):
        workers = tuple(WorkerConfig(url=url, driver=driver) for url in urls)
        return Config(models=(Model(name=name, workers=workers, **more),), health=health)

    def fleets(urls, **more):
        return Fleets.from_config(config(urls, **more), FirstPolicy)

    return SimpleNamespace(config=config, fleets=fleets, policy=FirstPolicy, quick=QUICK)


@pytest.fixture
def monitored():
    """``async with monitored(fleets) as monitor``: started, and stopped at the end."""

    @asynccontextmanager
    async def run(fleets, **more):
        async with open_session() as session:
            monitor = HealthMonitor(session, fleets, **more)
            monitor.start()
            try:
                yield monitor
            finally:
                await monitor.stop()

    return run


@pytest.fixture
def until():
    """Wait until a condition holds that no event announces."""

    async def wait(condition, seconds=5.0):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - the states are plain attributes, without an event
                await asyncio.sleep(0.01)

    return wait
