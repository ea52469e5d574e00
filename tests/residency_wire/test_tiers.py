"""Slower memories that workers share: what waits in the line is fetched meanwhile, what a worker leaves behind is found elsewhere."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from simulator.server import SharedMemory, SimulatedWorker, WorkerOptions
from simulator.server.lmcache_coordinator import LMCacheCoordinator
from simulator.tokenizer import WorkerTokenizer

LONG = "the sea is wide and the ship is small " * 150
OTHER = "mountains are high and rivers are cold " * 150


@pytest.fixture(scope="session")
def tokenizer():
    return WorkerTokenizer()


@pytest.fixture
async def pair(tokenizer):
    """`pair(**options)`: two workers with an l2 in common and an LMCache server each, and a coordinator of both."""
    async with AsyncExitStack() as stack:

        async def pair(**options):
            shared = SharedMemory(8192)
            workers = []
            for number in range(2):
                settings = {
                    "model": "sim",
                    "speed": 10.0,
                    "seed": number,
                    "profile": "h100-8b",
                    "block_size": 16,
                    "l1_blocks": 2048,
                    "lmcache_port": 0,
                    "lmcache_chunk": 32,
                    "kv_hints": True,
                    "kv_events": "tcp://127.0.0.1:*",
                    "kv_events_replay": "tcp://127.0.0.1:*",
                } | options
                worker = SimulatedWorker(WorkerOptions(**settings), tokenizer=tokenizer, shared=shared)
                await worker.start()
                stack.push_async_callback(worker.stop)
                workers.append(worker)
            coordinator = LMCacheCoordinator([worker.lmcache for worker in workers], "127.0.0.1", 0)
            await coordinator.start()
            stack.push_async_callback(coordinator.stop)
            return workers, coordinator

        yield pair


@pytest.fixture
async def scene_of(gateway_before):
    """`scene_of(workers, coordinator, residency=...)`: a gateway that knows their l2 by the coordinator and speaks to their servers."""

    async def scene_of(workers, coordinator, *, residency="{}", model=""):
        by_url = {worker.url: worker.lmcache.url for worker in workers}
        scene = await gateway_before(
            list(by_url),
            hints=lambda url: f'{{driver: [kv-hints, lmcache], url: "{by_url[url]}", chunk: 32}}',
            residency=residency,
            model=f'    l2: {{url: "{coordinator.url}", chunk: 32}}\n{model}',
            capabilities="{slots: 1}",
        )
        while any(feed.status != "events" for feed in scene.gateway.metrics.readings.feeds()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return scene

    return scene_of


async def held(scene, text, tier, worker_id):
    """Wait until `worker_id` is known to hold most of the prompt in `tier`; how many tokens of it."""
    body = {"model": "sim", "messages": [{"role": "user", "content": text}]}
    while True:
        async with scene.http.post(f"{scene.admin}/api/explain", json={"body": body}) as answer:
            table = (await answer.json())["policies"][0]["candidates"]
        for row in table:
            if row["worker"] == worker_id and row["match"][tier] > 500:
                return row["match"][tier]
        await asyncio.sleep(0.02)


async def second_turn_in_line(pair, scene_of, residency):
    """A conversation is computed at one worker, which is lost; its next turn has to wait for the other one. That turn's record, and the first's prompt."""
    workers, coordinator = await pair()
    scene = await scene_of(workers, coordinator, residency=residency, model="    admission: {}\n")
    ids = {worker.url.partition("://")[2]: worker for worker in workers}
    _, one, headers = await scene.chat(LONG, headers={"x-session-id": "talk"})
    home = headers["x-warmroute-worker"]
    (other,) = set(ids) - {home}
    await held(scene, LONG, "l2", other)
    await ids[home].stop()
    scene.gateway.inspector.drain(home)
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.chat(OTHER, max_tokens=2000))
        while not ids[other].engine.stats.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        _, two, headers = await scene.chat(LONG, "yes", "and then?", headers={"x-session-id": "talk"})
    assert headers["x-warmroute-worker"] == other
    async with scene.http.get(f"{scene.admin}/api/requests/{headers['x-request-id']}") as answer:
        record = await answer.json()
    assert record["timings"]["queue"] > 0
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * one["usage"]["prompt_tokens"]
    (chosen,) = [row for row in record["candidates"] if row["chosen"]]
    return record["hints"], chosen["match"], one["usage"]["prompt_tokens"]


async def test_a_request_that_waits_finds_its_prompt_nearer_when_its_turn_comes(pair, scene_of):
    hints, match, prompt = await second_turn_in_line(pair, scene_of, "{rules: {drain: false}}")
    assert match["l1"] > 0.8 * prompt, "it was brought from l2 to l1 while it waited"
    (queued,) = [hint for hint in hints if hint["rule"] == "queued-next"]
    assert (queued["source"], queued["target"], queued["way"]) == ("l2", "l1", "beside")
    assert queued["fate"] == "useful"


async def test_without_the_rule_it_is_still_in_storage(pair, scene_of):
    hints, match, prompt = await second_turn_in_line(pair, scene_of, "{rules: {drain: false, queued-next: false}}")
    assert match["l1"] == 0
    assert match["l2"] > 0.8 * prompt
    assert all(hint["action"] != "prefetch" for hint in hints)


async def test_what_a_drained_worker_has_stored_is_in_anothers_memory_before_it_is_asked_for(pair, scene_of):
    workers, coordinator = await pair()
    scene = await scene_of(workers, coordinator)
    _, one, headers = await scene.chat(LONG, headers={"x-session-id": "talk"})
    home = headers["x-warmroute-worker"]
    (other,) = {worker.url.partition("://")[2] for worker in workers} - {home}
    await held(scene, LONG, "l2", other)
    async with scene.http.post(f"{scene.admin}/api/workers/{home}/drain", json={}) as answer:
        assert answer.status == 200
    await held(scene, LONG, "l1", other)
    _, two, headers = await scene.chat(LONG, "yes", "and then?", headers={"x-session-id": "talk"})
    assert headers["x-warmroute-worker"] == other
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * one["usage"]["prompt_tokens"]
    hints = await scene.until(lambda hints: any(h["rule"] == "drain" and h["fate"] == "useful" for h in hints))
    (moved,) = [hint for hint in hints if hint["rule"] == "drain"]
    assert (moved["worker"], moved["source"], moved["target"]) == (other, "l2", "l1")


async def test_auto_finds_what_simulated_workers_and_their_servers_speak(pair, gateway_before):
    workers, _ = await pair()
    by_url = {worker.url: worker.lmcache.url for worker in workers}
    scene = await gateway_before(list(by_url), hints=lambda url: f'{{driver: auto, url: "{by_url[url]}"}}')
    while True:
        (fleet,) = (await scene.residency())["fleets"]
        spoken = [[each["driver"] for each in row["drivers"] if each["speaks"]] for row in fleet["workers"]]
        if spoken == [["kv-hints", "lmcache"]] * 2:
            break
        await asyncio.sleep(0.02)
