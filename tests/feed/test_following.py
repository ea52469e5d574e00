"""What the index believes is what the workers hold, whatever happens to them and to the sockets."""

import socket

import pytest


def agrees(scene, worker, prompts, tools, salt=None):
    def agrees():
        return all(
            scene.predicted(scene.status().worker, prompt, salt) == tools.held(worker, prompt, salt)
            for prompt in prompts
        )

    return agrees


@pytest.fixture(params=["map", "array"])
def encoding(request):
    return request.param


@pytest.mark.parametrize("topic", [True, False])
async def test_what_a_worker_computes_is_known_within_2_seconds(start, scene, tools, encoding, topic):
    worker = await start(kv_events_encoding=encoding, kv_events_replay_topic=topic)
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        prompts = it.prompts(5)
        for prompt in prompts:
            await it.complete(worker.url, prompt)
        await tools.until(agrees(it, worker, prompts, tools), 2.0)
        assert [it.predicted(it.status().worker, prompt) for prompt in prompts] == [96] * 5


async def test_evictions_are_known_too(start, scene, tools):
    worker = await start(kv_blocks=32)
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        prompts = it.prompts(40)
        for prompt in prompts:
            await it.complete(worker.url, prompt)
        await tools.until(agrees(it, worker, prompts, tools), 2.0)
        assert 0 < sum(tools.held(worker, prompt) > 0 for prompt in prompts) < 10


async def test_a_late_subscriber_learns_what_was_stored_before_it_came(start, scene, tools, encoding):
    worker = await start(kv_events_encoding=encoding, kv_blocks=32)
    async with scene(tools.section_of(worker.url), started=False) as it:
        prompts = it.prompts(20)
        for prompt in prompts:
            await it.complete(worker.url, prompt)
        it.feeds.start()
        await tools.until(lambda: it.feeds.snapshot() and agrees(it, worker, prompts, tools)(), 2.0)
        assert it.status().last_seq == worker.publisher.sequence - 1


async def test_without_a_replay_socket_only_what_comes_after_the_start_is_known(start, scene, tools):
    worker = await start(kv_events_replay=None)
    async with scene(tools.section_of(worker.url), started=False) as it:
        before, after = it.prompts(2)
        await it.complete(worker.url, before)
        it.feeds.start()
        await tools.until(lambda: it.feeds.snapshot() and it.status().status == "events")
        await it.complete(worker.url, after)
        await tools.until(agrees(it, worker, [after], tools), 2.0)
        assert it.predicted(it.status().worker, before) == 0


@pytest.mark.parametrize("topic", [True, False])
async def test_lost_events_are_replayed(start, scene, tools, encoding, topic):
    worker = await start(kv_events_encoding=encoding, kv_events_replay_topic=topic, kv_blocks=32)
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        prompts = it.prompts(20)
        for number, prompt in enumerate(prompts):
            if number % 5 == 3:
                worker.publisher.drop_next += 2
            await it.complete(worker.url, prompt)
        worker.publisher.drop_next = 0
        await it.complete(worker.url, it.prompts(1)[0])  # only a later number shows that one is missing
        await tools.until(agrees(it, worker, prompts, tools), 2.0)
        status = it.status()
        assert worker.publisher.dropped >= 5
        assert status.counters["gaps"] >= 3
        assert status.counters.get("losses", 0) == 0


async def test_events_that_nobody_can_repeat_make_the_index_forget(start, scene, tools):
    worker = await start(kv_events_replay=None)
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        old, lost, new = it.prompts(3)
        await it.complete(worker.url, old)
        await tools.until(agrees(it, worker, [old], tools), 2.0)
        worker.publisher.drop_next = 1
        await it.complete(worker.url, lost)
        worker.publisher.drop_next = 0
        await it.complete(worker.url, new)
        await tools.until(agrees(it, worker, [new], tools), 2.0)
        assert it.predicted(it.status().worker, old) == 0
        await tools.until(lambda: it.status().status == "gap", 1.0)
        assert "lost KV events and cannot repeat them" in it.feeds.degraded("m")[0]


async def test_a_replay_that_never_comes_is_not_waited_for(start, scene, tools):
    worker = await start(kv_events_replay=None)
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    section = tools.section_of(
        worker.url,
        kv_events=tools.EventSocket(endpoint=worker.publisher.endpoint, replay_endpoint=f"tcp://127.0.0.1:{port}"),
    )
    async with scene(section) as it:
        old, new = it.prompts(2)
        await tools.until(lambda: it.status().status == "events", 8.0)  # the first replay is given up after 5 s
        await it.complete(worker.url, old)
        await tools.until(agrees(it, worker, [old], tools), 2.0)
        worker.publisher.drop_next = 1
        await it.complete(worker.url, it.prompts(1)[0])
        worker.publisher.drop_next = 0
        await it.complete(worker.url, new)
        await tools.until(lambda: it.predicted(it.status().worker, old) == 0, 2.0)
    silent.close()


async def test_a_reset_of_the_cache_is_followed(start, scene, tools):
    worker = await start()
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        before, after = it.prompts(4), it.prompts(4)
        for prompt in before:
            await it.complete(worker.url, prompt)
        await tools.until(agrees(it, worker, before, tools), 2.0)
        async with it.http.post(f"{worker.url}/reset_prefix_cache") as response:
            assert (await response.json())["success"]
        for prompt in after:
            await it.complete(worker.url, prompt)
        await tools.until(agrees(it, worker, before + after, tools), 2.0)
        assert sum(it.predicted(it.status().worker, prompt) for prompt in before) == 0


async def test_salts_keep_prompts_apart(start, scene, tools):
    worker = await start()
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        (prompt,) = it.prompts(1)
        await it.complete(worker.url, prompt, cache_salt="mine")
        await tools.until(agrees(it, worker, [prompt], tools, "mine"), 2.0)
        assert it.predicted(it.status().worker, prompt, "mine") == 96
        assert it.predicted(it.status().worker, prompt) == it.predicted(it.status().worker, prompt, "yours") == 0


async def test_predictions_are_what_the_worker_then_takes_from_its_cache(start, scene, tools):
    workers = [await start(kv_blocks=48, slots=4) for _ in range(3)]
    async with scene(*(tools.section_of(worker.url) for worker in workers)) as it:
        await tools.until(lambda: all(row.status == "events" for row in it.feeds.snapshot()))
        ids = [row.worker for row in it.feeds.snapshot()]
        systems = it.prompts(3, 80)
        for number in range(120):
            worker, worker_id = workers[number % 3], ids[number % 3]
            prompt = systems[number % 7 % 3] + it.rng.choice([*it.prompts(1, 40), [9] * 40, [8] * 120])
            await tools.until(agrees_on(it, worker, worker_id, prompt, tools), 2.0)
            expected = it.predicted(worker_id, prompt)
            assert await it.complete(worker.url, prompt) == expected


def agrees_on(scene, worker, worker_id, prompt, tools):
    def agrees():
        return scene.predicted(worker_id, prompt) == tools.held(worker, prompt)

    return agrees
