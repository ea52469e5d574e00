"""What works less well than it should is said: in `/readyz`, in one log line, in a counter. And reloads while requests run."""

import asyncio

import orjson
import structlog

from gateway.config.load import loads
from gateway.degradation import LOG_EVERY, PolicyFaultLog
from gateway.inspector.admin import readiness


def config_of(*workers, name="m", **sections):
    urls = [{"url": worker.url, "driver": "vllm"} for worker in workers]
    return loads(orjson.dumps({"models": [{"name": name, "workers": urls}], **sections}).decode())


def report(bench):
    return readiness(bench.gateway._admin_sources())[1]


async def test_readyz_tells_of_ejected_workers(start, http):
    bench = await start(workers=3, health={"interval": 60})
    assert report(bench)["degraded"] == []
    (gone, *_) = bench.workers
    await gone.stop()
    clients = [await bench.client() for _ in range(12)]
    async with bench.workers[1].answering(http.answer()), bench.workers[2].answering(http.answer()):
        for client in clients:
            await client.sends(http.post())
        for client in clients:
            assert (await client.receives()).status == 200
    assert report(bench)["degraded"] == [f"m: 1 of 3 workers ejected: 127.0.0.1:{gone.port}"]
    assert report(bench)["ready"]


async def test_a_policy_that_misbehaves_is_logged_once_a_minute_counted_and_shown(start, http):
    bench = await start(workers=2)
    (fleet,) = bench.gateway.proxy.fleets
    now = 0.0
    log = PolicyFaultLog(lambda: [fleet], lambda: now)
    with structlog.testing.capture_logs() as lines:
        log.look()
        assert lines == []
        fleet.policy.faults = 1
        fleet.policy.last_fault = "Moody: ValueError: bad mood"
        log.look()
        fleet.policy.faults = 500
        for _ in range(10):
            log.look()
        assert [line["faults"] for line in lines] == [1]
        now = LOG_EVERY
        log.look()
        assert [line["faults"] for line in lines] == [1, 499]
        now = LOG_EVERY * 3
        log.look()
    assert len(lines) == 2
    assert lines[0]["last"] == "Moody: ValueError: bad mood"
    (sentence,) = report(bench)["degraded"]
    assert sentence.startswith("m: policy leastload misbehaved 500 times")
    body, _ = await bench.gateway.metrics.scrape(None)
    assert b'warmroute_policy_faults_total{model="m"} 500.0' in body


async def test_a_worker_that_a_reload_removes_finishes_what_it_has(start, http):
    bench = await start(workers=2)
    clients = [await bench.client() for _ in range(2)]
    for client in clients:
        await client.sends(http.post({"model": "m", "stream": True}))
    begun = {}
    for _ in clients:
        scripted, peer, _ = await bench.arrives()
        begun[scripted.port] = peer
        await peer.sends(http.SSE_HEAD)
    removed, stays = bench.workers
    worker = bench.fleet_worker(removed)
    await bench.gateway._reconfigure(config_of(stays))
    assert worker.state.value == "gone"
    assert worker.in_flight == 1
    for peer in begun.values():
        await peer.sends(http.chunk(b"data: 1\n\n") + b"0\r\n\r\n")
    for client in clients:
        await client.head()
        assert await client.chunked_body() == b"data: 1\n\n"
    await bench.settles()
    assert worker.in_flight == 0
    # Its connections leave the pool, and nothing new goes there.
    async with stays.answering(http.answer()):
        await begun[stays.port].closes()
        for client in clients:
            await client.sends(http.post())
            assert (await client.receives()).get("x-warmroute-worker") == f"127.0.0.1:{stays.port}"


async def test_requests_never_notice_reloads(start, http):
    bench = await start(workers=2)
    done = 0

    async def ask(client):
        nonlocal done
        while done < 400:
            await client.sends(http.post())
            assert (await client.receives()).status == 200
            done += 1

    one, two = bench.workers
    async with one.answering(http.answer()), two.answering(http.answer()):
        asking = asyncio.gather(*[ask(await bench.client()) for _ in range(8)])
        turn = 0
        while not asking.done():
            turn += 1
            workers = ((one, two), (one,), (one, two), (two, one))[turn % 4]
            await bench.gateway._reconfigure(config_of(*workers, limits={"keep_alive": 60 + turn % 2}))
            await asyncio.sleep(0.01)
        await asking
    await bench.settles()
    assert turn > 3
    assert bench.outcomes == {"completed": done}


async def test_a_configuration_that_cannot_be_built_changes_nothing(start, http):
    bench = await start()
    before = bench.gateway.proxy.fleets
    broken = config_of(bench.worker, telemetry={"traces": {"exporter": "file", "file": "/nowhere/at/all/spans.jsonl"}})
    try:
        await bench.gateway._reconfigure(broken)
        raise AssertionError("a file in a folder that is not there was opened")
    except OSError:
        pass
    assert bench.gateway.proxy.fleets is before
    assert bench.fleet_worker(bench.worker).routable
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200
