"""Where events come from: found, configured, or nowhere; several ranks; LMCache; workers without any."""

import asyncio

import pytest
from aiohttp import web

BLOCK = 16


@pytest.fixture
async def answering():
    """An HTTP server that answers each path with what it was told, 404 for others."""
    runners = []

    async def answering(answers):
        async def answer(request):
            told = answers.get(request.path)
            if told is None:
                return web.Response(status=404)
            if isinstance(told, int):
                return web.Response(status=told)
            return web.json_response(told) if not isinstance(told, str) else web.Response(text=told)

        runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield answering
    for runner in runners:
        await runner.cleanup()


METRICS = (
    'vllm:cache_config_info{{block_size="{size}",enable_prefix_caching="{caching}",engine="0",num_gpu_blocks="{blocks}"}} 1.0\n'
    "process_start_time_seconds 1.79609750723e+09\n"
)


async def subscribed(it, publisher, tools, status="events"):
    await tools.until(lambda: it.feeds.snapshot() and it.status().status == status)
    heard = it.status().counters.get("batches", 0)
    while it.status().counters.get("batches", 0) == heard:
        publisher.batch([])
        await asyncio.sleep(0.01)


def stored(hashes, parent, tokens, *rest):
    return ["BlockStored", hashes, parent, tokens, BLOCK, None, *rest]


async def test_a_worker_too_old_to_name_its_socket_can_be_configured(scene, tools, start):
    worker = await start(topic="kv@x")
    url = "http://127.0.0.1:9"  # nobody answers there
    socket = tools.EventSocket(
        endpoint=worker.publisher.endpoint, replay_endpoint=worker.publisher.replay_endpoint, topic="kv@x"
    )
    async with scene(tools.section_of(url, kv_events=socket)) as it:
        await tools.until(lambda: it.status().status == "events")
        (prompt,) = it.prompts(1)
        await it.complete(worker.url, prompt)
        await tools.until(lambda: it.predicted("127.0.0.1:9", prompt) == 96, 2.0)


async def test_another_topic_is_not_listened_to(scene, tools, publishers):
    publisher = publishers()
    socket = tools.EventSocket(endpoint=publisher.endpoint, topic="kv@mine")
    async with scene(tools.section_of("http://127.0.0.1:9", kv_events=socket)) as it:
        await tools.until(lambda: it.status().status == "events")
        while not it.status().counters.get("batches"):
            publisher.batch([stored([1], None, list(range(16)))], b"kv@yours")
            publisher.batch([stored([2], None, list(range(100, 116)))], b"kv@mine")
            await asyncio.sleep(0.01)
        assert it.predicted("127.0.0.1:9", [*range(17)]) == 0
        assert it.predicted("127.0.0.1:9", [*range(100, 117)]) == 16


async def test_every_rank_is_followed_and_the_best_one_counts(scene, tools, publishers, answering):
    one, two = publishers(), publishers()
    sources = {
        str(rank): {"publisher": "zmq", "endpoint": each.endpoint, "replay_endpoint": None, "topic": ""}
        for rank, each in enumerate((one, two))
    }
    url = await answering(
        {"/kv_event_sources": sources, "/metrics": METRICS.format(size=BLOCK, caching=True, blocks=100)}
    )
    async with scene(tools.section_of(url, id="w")) as it:
        await tools.until(lambda: it.status().status == "events")
        tokens = [*range(60)]
        while (it.predicted("w", tokens), it.status().blocks["device"]) != (48, 4):
            one.batch([["AllBlocksCleared"], stored([1], None, tokens[:16])])
            two.batch([["AllBlocksCleared"], stored([1, 2, 3], None, tokens[:48])], rank=1)
            await asyncio.sleep(0.02)
        assert it.status().ranks == 2
        assert set(it.feeds.match(it.chains(tokens))) == {"w"}


async def test_lmcache_tells_of_slower_tiers_and_its_restart_forgets(scene, tools, publishers):
    engine, lmcache = publishers(), publishers()
    section = tools.section_of(
        "http://127.0.0.1:9",
        kv_events=tools.EventSocket(endpoint=engine.endpoint),
        lmcache_events=tools.EventSocket(endpoint=lmcache.endpoint, topic="kv@node:a@"),
    )
    async with scene(section) as it:
        name = "127.0.0.1:9"
        await tools.until(lambda: it.status().status == "events")
        tokens = [*range(1000)]
        topic = b"kv@node:a@/models/m"

        def tiers():
            match = it.feeds.match(it.chains(tokens)).get(name)
            return (match.device, match.l1, match.l2) if match else (0, 0, 0)

        while tiers() != (32, 224, 256):
            engine.batch([stored([1, 2], None, tokens[:32], "GPU")])
            lmcache.batch(
                [
                    ["BlockStored", [b"a" * 32], None, tokens[:256], 256, None, "lmcache-l1"],
                    ["BlockStored", [b"b" * 32], b"a" * 32, tokens[256:512], 256, None, "lmcache-l2-fs"],
                ],
                topic,
            )
            await asyncio.sleep(0.02)
        lmcache.batch([["BlockRemoved", [b"b" * 32], "lmcache-l2-fs"]], topic)
        await tools.until(lambda: tiers() == (32, 224, 0))
        lmcache.batch([["AllBlocksCleared"]], topic)
        await tools.until(lambda: tiers() == (0, 0, 0))


async def test_what_is_never_reported_as_removed_is_forgotten_after_a_while(scene, tools, publishers):
    publisher = publishers()
    section = tools.section_of(
        "http://127.0.0.1:9",
        kv_events=tools.EventSocket(endpoint=publisher.endpoint),
        forget_after=tools.TierTimes(l1=0.5),
    )
    async with scene(section) as it:
        await subscribed(it, publisher, tools)
        publisher.batch([stored([1, 2], None, [*range(32)], "GPU"), stored([5, 6, 7], None, [*range(48)], "cpu")])
        await tools.until(lambda: it.predicted("127.0.0.1:9", [*range(60)]) == 48)
        await tools.until(lambda: it.predicted("127.0.0.1:9", [*range(60)]) == 32, 2.0)


async def test_a_worker_without_events_is_imagined_with_its_own_capacity(scene, tools, start):
    worker = await start(kv_events=None, kv_events_replay=None, kv_blocks=24)
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "history")
        name = it.status().worker
        status = it.status()
        assert (status.block_size, status.capacity, status.capacity_origin) == (BLOCK, 24, "/metrics")
        prompts = it.prompts(10)
        for prompt in prompts:
            it.feeds.sent(name, it.chains(prompt))
        assert [it.predicted(name, prompt) for prompt in prompts] == [0] * 6 + [96] * 4
        assert it.feeds.match(it.chains(prompts[-1]))[name].source == "history"
        assert it.feeds.degraded("m") == [
            f"1 of 1 workers send no KV events, what they hold is guessed: {name} (GET /kv_event_sources names no socket)"
        ]


async def test_configured_numbers_win(scene, tools, start):
    worker = await start(kv_events=None, kv_events_replay=None)
    capabilities = tools.Capabilities(block_size=32, kv_capacity_tokens=3200)
    async with scene(tools.section_of(worker.url, capabilities=capabilities)) as it:
        await tools.until(lambda: it.status().status == "history")
        status = it.status()
        assert (status.block_size, status.block_size_origin) == (32, "configured")
        assert (status.capacity, status.capacity_origin) == (100, "configured")


@pytest.mark.parametrize("driver", ["openai", "vllm"])
async def test_events_that_are_not_to_be_had_or_not_wanted_are_no_trouble(scene, tools, start, driver):
    worker = await start()
    section = tools.section_of(worker.url, driver=driver, kv_events="off" if driver == "vllm" else "auto")
    async with scene(section) as it:
        await tools.until(lambda: it.status().status == "history")
        assert it.feeds.degraded("m") == []


async def test_a_worker_that_caches_no_prefixes_is_left_alone(scene, tools, answering):
    url = await answering({"/metrics": METRICS.format(size=BLOCK, caching=False, blocks=100)})
    async with scene(tools.section_of(url)) as it:
        await tools.until(lambda: it.status().status == "none")
        assert it.status().reason == "prefix caching is off (/metrics)"
        it.feeds.sent(it.status().worker, it.chains(range(100)))
        assert it.feeds.block_sizes == []


async def test_a_restart_makes_an_imagined_cache_empty(scene, tools, answering):
    answers = {"/metrics": METRICS.format(size=BLOCK, caching=True, blocks=100)}
    url = await answering(answers)
    async with scene(tools.section_of(url)) as it:
        await tools.until(lambda: it.status().status == "history")
        name = it.status().worker
        it.feeds.sent(name, it.chains(range(100)))
        assert it.predicted(name, range(100)) == 96
        feed = it.feeds._feeds[name]
        feed._again.set()  # as when the worker has become ready again
        await asyncio.sleep(0.1)
        assert it.predicted(name, range(100)) == 96
        answers["/metrics"] = answers["/metrics"].replace("1.79609750723", "1.79609999999")
        feed._again.set()
        await tools.until(lambda: it.predicted(name, range(100)) == 0)


async def test_a_worker_that_is_still_loading_is_asked_until_it_answers(scene, tools, answering, start):
    worker = await start()
    answers = {"/kv_event_sources": 503, "/metrics": 503}
    url = await answering(answers)
    async with scene(tools.section_of(url)) as it:
        await asyncio.sleep(0.1)
        assert it.status().status == "connecting"
        assert it.status().reason == "GET /kv_event_sources answered 503"
        publisher = worker.publisher
        answers["/kv_event_sources"] = {
            "0": {
                "publisher": "zmq",
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "topic": publisher.topic,
            }
        }
        answers["/metrics"] = METRICS.format(size=BLOCK, caching=True, blocks=64)
        await tools.until(lambda: it.status().status == "events", 3.0)


async def test_a_block_size_that_the_events_belie_is_not_believed(scene, tools, publishers, answering):
    publisher = publishers()
    url = await answering(
        {
            "/kv_event_sources": {"0": {"publisher": "zmq", "endpoint": publisher.endpoint}},
            "/metrics": METRICS.format(size=64, caching=True, blocks=100),
        }
    )
    async with scene(tools.section_of(url, id="w")) as it:
        await tools.until(lambda: it.status().status == "events")
        tokens = [*range(100)]
        while it.predicted("w", tokens) != 96:
            publisher.batch([stored([1, 2, 3, 4, 5, 6], None, tokens[:96])])
            await asyncio.sleep(0.05)
        assert it.status().block_size == BLOCK
        assert "w says that its blocks have 64 tokens, but its events say 16" in it.feeds.degraded("m")


async def test_a_configured_block_size_is_believed_and_what_does_not_fit_is_said(scene, tools, publishers):
    publisher = publishers()
    section = tools.section_of(
        "http://127.0.0.1:9",
        id="w",
        kv_events=tools.EventSocket(endpoint=publisher.endpoint),
        capabilities=tools.Capabilities(block_size=64),
    )
    async with scene(section) as it:
        await tools.until(lambda: it.status().block_size == 64)
        await subscribed(it, publisher, tools)
        publisher.batch([stored([1, 2], None, [*range(32)])])
        await tools.until(lambda: it.status().problems.get("other_block_size") == 2)
        assert it.feeds.degraded("m") == [
            "w sends blocks of another size than 64 tokens (configured): 2 of them are not used"
        ]


async def test_silence_after_many_prompts_is_said(scene, tools, publishers, monkeypatch):
    publisher = publishers()
    monkeypatch.setattr("gateway.prefix.worker_feed.SILENT_AFTER", 0.2)
    section = tools.section_of(
        "http://127.0.0.1:9",
        id="w",
        kv_events=tools.EventSocket(endpoint=publisher.endpoint),
        capabilities=tools.Capabilities(block_size=BLOCK),
    )
    async with scene(section) as it:
        await tools.until(lambda: it.status().status == "events")
        for prompt in it.prompts(20):
            it.feeds.sent("w", it.chains(prompt))
        await tools.until(lambda: it.status().silent)
        assert it.feeds.degraded("m") == ["1 of 1 workers publish KV events of which none came: w"]
        await subscribed(it, publisher, tools)
        await tools.until(lambda: not it.status().silent)


async def test_what_was_sent_counts_at_once_and_until_it_should_have_been_confirmed(scene, tools, start):
    worker = await start()
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        (prompt,) = it.prompts(1)
        name = it.status().worker
        expectation = it.feeds.sent(name, it.chains(prompt))
        assert it.feeds.match(it.chains(prompt))[name].source == "expected"
        assert it.predicted(name, prompt) == 96
        expectation.settle(asyncio.get_running_loop().time())
        await tools.until(lambda: it.predicted(name, prompt) == 0, 3.0)


@pytest.mark.parametrize(("bind", "name"), [("127.0.0.1", "localhost"), ("[::1]", "[::1]")])
async def test_names_and_both_kinds_of_addresses_are_connected_to(scene, tools, publishers, bind, name):
    publisher = publishers(bind)
    socket = tools.EventSocket(endpoint=f"tcp://{name}:{publisher.port}")
    async with scene(tools.section_of("http://127.0.0.1:9", kv_events=socket)) as it:
        await subscribed(it, publisher, tools)


async def test_a_name_that_nobody_knows_is_no_end_of_anything(scene, tools):
    socket = tools.EventSocket(endpoint="tcp://no-such-host.invalid:5557")
    async with scene(tools.section_of("http://127.0.0.1:9", kv_events=socket)) as it:
        await asyncio.sleep(0.3)
        assert it.status().status == "connecting"
        assert it.status().reason == "no connection to tcp://no-such-host.invalid:5557"
