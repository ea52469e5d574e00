"""Simulated workers on real sockets, the feeds that follow them, and the comparison of what both believe."""

import asyncio
import itertools
import random
import socket
import time
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
import zmq

from gateway.config.schema import Capabilities, Config, EventSocket, Model, TierTimes
from gateway.config.schema import Worker as WorkerConfig
from gateway.fleet.asking import open_session
from gateway.fleet.fleet import Fleets
from gateway.prefix.feed import Feeds
from gateway.prefix.index import PrefixIndex
from gateway.prompt.blocks import Hasher
from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import WorkerTokenizer

MODEL = "m"
BLOCK = 16


class NoPolicy:
    """These tests choose the worker themselves."""

    name = "none"
    knowledge = "events"

    def decide(self, request, candidates):
        raise NotImplementedError


def config_of(*sections, name=MODEL):
    return Config(models=(Model(name=name, workers=tuple(sections)),))


def fleets_of(config):
    return Fleets.from_config(config, lambda _: NoPolicy())


def section_of(url, **fields):
    return WorkerConfig(url=url, **{"driver": "vllm", **fields})


async def until(condition, seconds=5.0):
    """Wait until `condition()` is true; returns how long that took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            pytest.fail(f"not within {seconds} s: {condition.__name__}")
        await asyncio.sleep(0.01)
    return time.monotonic() - started


class Scene:
    """Feeds over some workers, and questions to both sides."""

    def __init__(self, feeds, fleets, http):
        self.feeds = feeds
        self.fleets = fleets
        self.http = http
        self.index = feeds.index
        self.rng = random.Random(7)

    def status(self, worker_id=None):
        rows = self.feeds.snapshot()
        return next(row for row in rows if worker_id in (None, row.worker))

    async def complete(self, url, ids, **fields):
        """Let a worker compute a prompt; how many of its tokens came from its cache."""
        body = {"model": MODEL, "prompt": list(ids), "max_tokens": 1, **fields}
        async with self.http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            usage = (await response.json())["usage"]
            return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def chains(self, ids, salt=None, model=MODEL):
        return self.index.hasher.chains(self.index.hasher.root(model, None, salt), list(ids), self.feeds.block_sizes)

    def predicted(self, worker_id, ids, salt=None):
        match = self.feeds.match(self.chains(ids, salt)).get(worker_id)
        return match.tokens if match else 0

    def prompts(self, count, length=100):
        return [[self.rng.randrange(5, 250) for _ in range(length)] for _ in range(count)]


def held(worker, ids, salt=None):
    """How many tokens of a prompt a simulated worker would take from its device cache now."""
    size = worker.profile.block_size
    digests = worker.hasher.chain(ids, salt=salt, lora=None)
    return worker.engine.memory.device.held(digests, (len(ids) - 1) // size) * size


@pytest.fixture(scope="session")
def tokenizer():
    return WorkerTokenizer()


@pytest.fixture
async def start(tokenizer):
    """Starts simulated workers; all are stopped at the end."""
    workers = []

    async def start(**options):
        worker = SimulatedWorker(
            WorkerOptions(
                **{
                    "speed": 500.0,
                    "model": MODEL,
                    "profile": "h100-8b",
                    "block_size": BLOCK,
                    "kv_blocks": 64,
                    "max_model_len": 512,
                    "kv_events": "tcp://127.0.0.1:*",
                    "kv_events_replay": "tcp://127.0.0.1:*",
                    **options,
                }
            ),
            tokenizer=tokenizer,
        )
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
def scene():
    """Opens a `Scene` over workers of the configuration."""

    @asynccontextmanager
    async def scene(*sections, started=True, budget=64 * 1024 * 1024):
        session = open_session()
        feeds = Feeds(
            PrefixIndex(Hasher(seed=1), budget=budget),
            fleets := fleets_of(config_of(*sections)),
            session,
            rng=random.Random(3),
        )
        if started:
            feeds.start()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
                yield Scene(feeds, fleets, http)
        finally:
            await feeds.stop()
            await session.close()

    return scene


@pytest.fixture
def tools():
    """The plain helpers of this file: a test folder is no package, so they can't be imported."""

    class Tools:
        Capabilities = Capabilities
        EventSocket = EventSocket
        TierTimes = TierTimes

    for helper in (section_of, config_of, fleets_of, until, held):
        setattr(Tools, helper.__name__, staticmethod(helper))
    return Tools


@pytest.fixture
def free_ports():
    """Ports that were free a moment ago."""

    def free_ports(count):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        return ports

    return free_ports


class Publisher:
    """A PUB socket that says what a test wants it to say, right or wrong; it repeats nothing."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.publisher = self.context.socket(zmq.PUB)
        self.publisher.setsockopt(zmq.SNDHWM, 0)
        self.publisher.setsockopt(zmq.IPV6, int("[" in address))
        self.port = self.publisher.bind_to_random_port(f"tcp://{address}")
        self.seq = itertools.count()

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self.port}"

    def send(self, *frames):
        self.publisher.send_multipart(list(frames))

    def batch(self, events, topic=b"", rank=0):
        payload = msgspec.msgpack.encode([time.time(), events, rank])
        self.send(topic, next(self.seq).to_bytes(8, "big"), payload)

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def publishers():
    """Makes publishers; all are closed at the end."""
    made = []

    def publisher(address="127.0.0.1"):
        made.append(Publisher(address))
        return made[-1]

    yield publisher
    for each in made:
        each.close()
