"""The directory asked over real sockets: found out, asked in the background, believed only while it answers."""

import asyncio
from array import array

import msgspec
import pytest
from aiohttp import web

from backends.hints import chunks
from backends.vllm import VLLMDriver
from gateway.config.directory import L2
from gateway.config.residency import WorkerHints
from gateway.fleet.asking import open_session
from gateway.fleet.worker import Worker, WorkerState
from gateway.prefix.index import PrefixIndex
from gateway.prompt.blocks import Hasher
from gateway.prompt.prompt import exact
from gateway.prompt.segments import Segment
from gateway.residency import directory_feed
from gateway.residency.directory_feed import DirectoryFeed
from gateway.tasks import TaskGroup

PROMPT = list(range(700, 700 + 64 * 5 + 3))


class LMCache:
    """A coordinator and the server beside a worker, in one, and that worker's list of models."""

    def __init__(self):
        self.held = set()  # (name, salt, tier)
        self.asked = []
        self.algorithm = "blake3"
        self.mode = "well"
        self.changed = asyncio.Event()
        self.port = 0

    async def start(self):
        app = web.Application()
        app.router.add_get("/instances", self.instances)
        app.router.add_get("/status", self.status)
        app.router.add_post("/directory/lookup", self.lookup)
        app.router.add_get("/v1/models", self.models)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def instances(self, _request):
        if self.mode == "away":
            return web.Response(status=503)
        return web.json_response({"instances": [{"instance_id": "mp-a", "ip": "127.0.0.1", "http_port": self.port}]})

    async def status(self, _request):
        return web.json_response({"chunk_size": 64, "hash_algorithm": self.algorithm})

    async def models(self, _request):
        return web.json_response({"data": [{"id": "served", "root": "/models/real"}]})

    async def lookup(self, request):
        keys = (await request.json())["keys"]
        self.asked.append((request.headers.get("authorization"), keys))
        self.changed.set()
        if self.mode == "hangs":
            await asyncio.Event().wait()
        if self.mode == "away":
            return web.Response(status=503)
        if self.mode == "garbage":
            return web.Response(body=b"{")
        return web.json_response(
            {
                "chunks": len(keys),
                "results": [
                    {
                        "key": key,
                        "placements": [
                            {"instance_id": "mp-a", "incarnation": 1, "tier": tier, "backend": "x", "shared": False}
                            for tier in ("l1", "l2")
                            if (key["chunk_hash_hex"], key["cache_salt"], tier) in self.held
                        ],
                        "token_ids": [],
                        "access_count": 0,
                    }
                    for key in keys
                ],
            }
        )

    def put(self, tokens, *tiers, salt=""):
        for name in chunks.names(tokens, 64):
            self.held.update((name.hex(), salt, tier) for tier in tiers)


class Scene:
    def __init__(self, lmcache, session, **section):
        self.lmcache = lmcache
        self.index = PrefixIndex(Hasher(5))
        self.worker = Worker(url=lmcache.url, driver=VLLMDriver(), model="served")
        self.worker.state = WorkerState.READY
        self.worker.routable = True
        self.index.follow("w", "fleet", block_size=16)
        self.feed = DirectoryFeed(
            "fleet",
            msgspec.convert({"url": lmcache.url, **section}, L2),
            self.index,
            session,
            asyncio.get_running_loop().time,
            lambda: {self.worker.id: ["w"]},
        )
        self.feed.workers = [(self.worker, WorkerHints(url=f"http://localhost:{lmcache.port}"))]
        self.tasks = TaskGroup("test")

    async def start(self):
        self.tasks.spawn("feed", self.feed.run())
        async with asyncio.timeout(10):
            while True:
                if self.feed.status().status != "connecting":
                    return
                await asyncio.sleep(0.01)

    def come(self, tokens, salt=None):
        """A prompt comes, and this is what is known of it at once."""
        chains = self.index.hasher.chains(self.index.hasher.root("fleet", None, salt), array("I", tokens), [16])
        self.feed.saw(exact([Segment(array("I", tokens))]), chains, salt)
        return self.index.match(chains)

    async def known(self, tokens, wanted, salt=None):
        """Until this is known of a prompt: tokens in l1 and l2."""
        chains = self.index.hasher.chains(self.index.hasher.root("fleet", None, salt), array("I", tokens), [16])
        async with asyncio.timeout(10):
            while True:
                match = self.index.match(chains).get("w")
                if ((match.l1, match.l2) if match else (0, 0)) == wanted:
                    return
                await asyncio.sleep(0.01)


@pytest.fixture
async def lmcache():
    server = LMCache()
    await server.start()
    yield server
    await server.runner.cleanup()


@pytest.fixture
async def scene(lmcache):
    scenes = []
    session = open_session()

    def make(**section):
        scenes.append(Scene(lmcache, session, **section))
        return scenes[-1]

    yield make
    for each in scenes:
        await each.tasks.cancel()
    await session.close()


async def test_a_prompt_is_asked_about_in_the_background_and_known_from_then_on(lmcache, scene):
    lmcache.put(PROMPT, "l2")
    lmcache.put(PROMPT[:128], "l1")
    here = scene(api_key="secret-of-the-coordinator")
    await here.start()
    assert here.come(PROMPT) == {}  # nobody waits
    await here.known(PROMPT, (128, 192))
    authorization, keys = lmcache.asked[0]
    assert authorization == "Bearer secret-of-the-coordinator"
    assert [key["chunk_hash_hex"] for key in keys] == [name.hex() for name in chunks.names(PROMPT, 64)]
    assert {(key["model_name"], key["kv_rank"], key["cache_salt"]) for key in keys} == {("/models/real", 0x1000100, "")}
    status = here.feed.status()
    assert (status.status, status.chunk, status.chunks, status.workers) == ("asking", 64, 5, {here.worker.id: "mp-a"})


async def test_salts_go_along(lmcache, scene):
    lmcache.put(PROMPT, "l2", salt="tenant")
    here = scene()
    await here.start()
    here.come(PROMPT, "tenant")
    await here.known(PROMPT, (0, 320), "tenant")


async def test_what_is_configured_is_not_asked(lmcache, scene):
    lmcache.algorithm = "sha256"
    here = scene(chunk=32, model="mine")
    await here.start()
    here.come(PROMPT)
    await asyncio.wait_for(lmcache.changed.wait(), 10)
    assert lmcache.asked[0][1][0]["model_name"] == "mine"
    assert len(lmcache.asked[0][1]) == len(PROMPT) // 32


async def test_names_of_another_kind_are_not_guessed_at(lmcache, scene):
    lmcache.algorithm = "sha256"
    here = scene()
    await here.start()
    here.come(PROMPT)
    assert here.feed.status().status == "unfit"
    assert "sha256" in here.feed.degraded()[0]
    assert lmcache.asked == []


@pytest.mark.parametrize("mode", ["away", "hangs", "garbage"])
async def test_without_answers_nothing_is_believed_after_a_while_and_all_is_again_with_them(
    lmcache, scene, monkeypatch, mode
):
    for name, value in {"DOUBT": 0.3, "TIMEOUT": 0.2, "PAUSE": (0.05, 0.1), "WHO": 0.1}.items():
        monkeypatch.setattr(directory_feed, name, value)
    monkeypatch.setattr("gateway.residency.directory.AGAIN", 0.05)
    lmcache.put(PROMPT, "l2")
    here = scene()
    await here.start()
    here.come(PROMPT)
    await here.known(PROMPT, (0, 320))
    lmcache.mode = mode
    if mode != "away":
        # The list of servers is still to be had: what counts is that questions are answered.
        monkeypatch.setattr(directory_feed, "WHO", 1000.0)
    await here.known(PROMPT, (0, 0))
    assert here.feed.status().status == "away"
    assert here.feed.degraded()
    lmcache.mode = "well"
    await here.known(PROMPT, (0, 320))
    assert here.feed.degraded() == []


async def test_no_more_keys_are_asked_about_than_is_allowed(lmcache, scene, monkeypatch):
    monkeypatch.setattr(directory_feed, "MOST", 64)
    here = scene(keys_per_second=40)
    await here.start()
    loop = asyncio.get_running_loop()
    started = loop.time()
    for number in range(10):
        here.come(list(range(number * 10_000, number * 10_000 + 64 * 16)))
    async with asyncio.timeout(20):
        while sum(len(keys) for _, keys in lmcache.asked) < 100:
            await lmcache.changed.wait()
            lmcache.changed.clear()
    seconds = loop.time() - started
    assert all(len(keys) <= 64 for _, keys in lmcache.asked)
    assert sum(len(keys) for _, keys in lmcache.asked) <= 64 + 40 * (seconds + 0.5)


async def test_when_it_ends_the_map_forgets_what_it_said(lmcache, scene):
    lmcache.put(PROMPT, "l1", "l2")
    here = scene()
    await here.start()
    here.come(PROMPT)
    await here.known(PROMPT, (320, 0))
    await here.tasks.cancel()
    assert here.come(PROMPT) == {}
    assert here.index.watchers == {}
