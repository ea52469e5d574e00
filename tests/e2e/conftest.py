"""A whole gateway in front of simulated workers, as `warmroute demo` runs it."""

import asyncio
import random
import shutil
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from gateway.config.load import loads
from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import DATA, WorkerTokenizer

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


class Scene:
    """A gateway whose policy reads matches, its workers, and questions to both."""

    def __init__(self, gateway, workers, http):
        self.gateway = gateway
        self.workers = workers
        self.http = http
        self.url = f"http://127.0.0.1:{gateway.port}"

    @property
    def matcher(self):
        return self.gateway.proxy.matchers[MODEL]

    def worker(self, worker_id):
        return next(worker for worker in self.workers if worker.url.endswith(worker_id))

    async def post(self, path, body, url=None):
        """(worker's id, answer) of a request through the gateway, or straight to `url`."""
        async with self.http.post(f"{url or self.url}{path}", json={"model": MODEL, **body}) as response:
            answer = await (response.json() if not body.get("stream") else response.text())
            assert response.status == 200, answer
            return response.headers.get("x-warmroute-worker"), answer

    async def chat(self, messages, url=None, **fields):
        """(worker's id, message, prompt tokens, cached tokens)."""
        body = {"messages": messages, "max_tokens": 8, **fields}
        worker_id, answer = await self.post("/v1/chat/completions", body, url)
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return worker_id, answer["choices"][0]["message"], usage["prompt_tokens"], cached

    def predicted(self, messages, **fields):
        """Tokens of a chat that each worker is believed to hold, by id; none: left out."""
        body = {"model": MODEL, "messages": messages, **fields}
        lookup = self.matcher.now("/v1/chat/completions", body, len(orjson.dumps(body)))
        assert lookup is not None
        return {worker_id: match.tokens for worker_id, match in lookup.matches.items()}

    def held(self, messages, salt=None):
        """Tokens of a chat that each worker would take from its cache now, by id; none: left out."""
        body = {"model": MODEL, "messages": messages}
        ids = self.matcher.prompter.now("/v1/chat/completions", body, len(orjson.dumps(body))).ids.tolist()
        found = {}
        for worker in self.workers:
            size = worker.profile.block_size
            digests = worker.hasher.chain(ids, salt=salt, lora=None)
            if blocks := worker.engine.memory.device.held(digests, (len(ids) - 1) // size):
                found[worker.url.rpartition("/")[2]] = blocks * size
        return found

    async def metric(self, name, **labels):
        """The sum of a metric's samples with these labels."""
        async with self.http.get(f"http://127.0.0.1:{self.gateway.admin_port}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        (found,) = [family for family in families if family.name == f"warmroute_{name}"]
        return sum(each.value for each in found.samples if labels.items() <= each.labels.items())

    async def degraded(self):
        async with self.http.get(f"http://127.0.0.1:{self.gateway.admin_port}/readyz") as response:
            return (await response.json())["degraded"]

    async def reload(self, policy):
        """Give the gateway another policy, as a changed file does."""
        model = msgspec.structs.replace(self.gateway.config.models[0], policy=policy)
        await self.gateway._reconfigure(msgspec.structs.replace(self.gateway.config, models=(model,)))

    async def until(self, condition, seconds=2.0):
        """Wait until `condition()` is true: a state without an event of its own."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"not within {seconds} s; feeds: {self.gateway.metrics.readings.feeds()}")

    def statuses(self):
        return {row.worker: row.status for row in self.gateway.metrics.readings.feeds()}


def written(rng, words):
    """A text like no other."""
    return " ".join(f"{rng.choice(WORDS)}{rng.randrange(1000)}" for _ in range(words))


WORDS = ("river", "stone", "letter", "engine", "garden", "window", "bridge", "market", "signal", "island")


@pytest.fixture
def rng():
    return random.Random(11)


@pytest.fixture
def text(rng):
    return lambda words: written(rng, words)


@pytest.fixture
async def start(tokenizer):
    """Starts simulated workers with KV events; all are stopped at the end."""
    workers = []

    async def start(**options):
        worker = SimulatedWorker(
            WorkerOptions(
                **{
                    "model": MODEL,
                    "speed": SPEED,
                    "seed": len(workers),
                    "profile": "h100-8b",
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
def restarted(start):
    """Stops a worker and starts another one on its ports, as after a kill."""

    async def restarted(worker, **options):
        ports = {
            "port": worker.port,
            "kv_events": worker.publisher.endpoint.replace("127.0.0.1", "*"),
            "kv_events_replay": worker.publisher.replay_endpoint,
        }
        await worker.stop()
        return await start(**{**ports, **options})

    return restarted


@pytest.fixture
def changed_model(tmp_path):
    """The simulated worker's model directory with another text in its chat template."""

    def changed(before, after):
        directory = tmp_path / "model"
        shutil.copytree(DATA, directory)
        template = (DATA / "chat_template.jinja").read_text()
        assert before in template
        (directory / "chat_template.jinja").write_text(template.replace(before, after))
        return directory

    return changed


@pytest.fixture
def scene():
    """Opens a `Scene` over workers; `model` and `fields` are YAML for the model's section and for each worker's."""

    @asynccontextmanager
    async def scene(*workers, policy="kvaware", model=f"tokenizer: {DATA}", ready=True, fields="", settings=""):
        lines = "\n".join(f'      - {{url: "{worker.url}", driver: vllm{fields}}}' for worker in workers)
        gateway = Gateway(
            loads(
                "listen: {port: 0}\nadmin: {port: 0}\nhealth: {interval: 200ms, slow_start: 0}\n"
                f"{settings}models:\n  - name: {MODEL}\n    policy: {policy}\n    {model}\n    workers:\n{lines}\n"
            )
        )
        await gateway.start()
        try:
            assert await gateway.wait_ready(5)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
                it = Scene(gateway, list(workers), http)
                if ready:
                    await it.until(lambda: set(it.statuses().values()) == {"events"}, 10.0)
                yield it
        finally:
            await gateway.stop(1)

    return scene
