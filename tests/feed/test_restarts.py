"""A worker that is started again holds nothing, and nothing may be believed of it for longer than two seconds."""

import asyncio
import signal
import sys
import time

import aiohttp
import pytest


def port_of(url):
    return int(url.rpartition(":")[2])


def ports_of(worker):
    """Options that start another worker where this one is."""
    return {
        "port": worker.port,
        "kv_events": worker.publisher.endpoint.replace("127.0.0.1", "*"),
        "kv_events_replay": worker.publisher.replay_endpoint,
    }


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restart_on_the_same_ports_is_noticed(start, scene, tools, replay):
    worker = await start(**({} if replay else {"kv_events_replay": None}))
    ports = ports_of(worker)
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        old, new = it.prompts(5), it.prompts(2)
        for prompt in old:
            await it.complete(worker.url, prompt)
        name = it.status().worker
        await tools.until(lambda: all(it.predicted(name, prompt) == 96 for prompt in old), 2.0)
        await worker.stop()
        again = await start(**ports)
        for prompt in new:
            await it.complete(again.url, prompt)
        await tools.until(lambda: not any(it.predicted(name, prompt) for prompt in old), 2.0)
        await tools.until(lambda: it.status().status == ("events" if replay else "gap"), 2.0)
        await it.complete(again.url, old[0])
        wanted = [*new, old[0]] if replay else [old[0]]
        await tools.until(
            lambda: all(it.predicted(name, prompt) == tools.held(again, prompt) for prompt in wanted), 2.0
        )


async def test_a_restart_that_reaches_the_same_number_is_noticed(start, scene, tools):
    worker = await start()
    ports = ports_of(worker)
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        old, new = it.prompts(5), it.prompts(5)
        for prompt in old:
            await it.complete(worker.url, prompt)
        name = it.status().worker
        await tools.until(lambda: all(it.predicted(name, prompt) == 96 for prompt in old), 2.0)
        await worker.stop()
        again = await start(**ports)
        for prompt in new:
            await it.complete(again.url, prompt)
        assert again.publisher.sequence == 5
        await tools.until(lambda: [it.predicted(name, prompt) for prompt in old + new] == [0] * 5 + [96] * 5, 2.0)
        assert it.status().counters["restarts"] == 1


async def test_a_worker_that_stays_away_is_forgotten_within_2_seconds(start, scene, tools):
    worker = await start()
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        (prompt,) = it.prompts(1)
        await it.complete(worker.url, prompt)
        name = it.status().worker
        await tools.until(lambda: it.predicted(name, prompt) == 96, 2.0)
        await worker.stop()
        await tools.until(lambda: it.predicted(name, prompt) == 0, 2.0)
        assert it.status().status == "connecting"
        assert it.status().reason.startswith("no connection to tcp://127.0.0.1:")


async def test_a_connection_that_breaks_for_a_moment_costs_no_knowledge(start, scene, tools):
    worker = await start()
    async with scene(tools.section_of(worker.url)) as it:
        await tools.until(lambda: it.status().status == "events")
        first, second = it.prompts(2)
        await it.complete(worker.url, first)
        name = it.status().worker
        await tools.until(lambda: it.predicted(name, first) == 96, 2.0)
        publisher = worker.publisher
        await publisher.stop()
        publisher.endpoint = publisher.endpoint.replace("127.0.0.1", "*")
        publisher.publish([{"type": "AllBlocksCleared"}])  # while nobody listens
        publisher.publish([])
        await publisher.start()
        await it.complete(worker.url, second)
        await tools.until(lambda: (it.predicted(name, first), it.predicted(name, second)) == (0, 96), 2.0)
        assert it.status().counters["disconnects"] == 1
        assert it.status().counters.get("restarts", 0) == it.status().counters.get("losses", 0) == 0


async def ready(url, seconds=20.0):
    """Wait until a worker in another process answers."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    pytest.fail("the worker does not start")


async def spawn(port, events, replay):
    arguments = f"--port {port} --model m --speed 500 --profile h100-8b --block-size 16 --kv-blocks 64"
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "simulate-worker", *arguments.split()),
        *("--kv-events", f"tcp://*:{events}", "--kv-events-replay", f"tcp://*:{replay}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def test_kill_9_and_a_restart_on_the_same_ports(start, scene, tools, free_ports):
    port, events, replay = free_ports(3)
    url = f"http://127.0.0.1:{port}"
    process = await spawn(port, events, replay)
    try:
        await ready(url)
        async with scene(tools.section_of(url, driver="neuron")) as it:
            await tools.until(lambda: it.status().status == "events")
            old, new = it.prompts(4), it.prompts(2)
            for prompt in old:
                await it.complete(url, prompt)
            name = it.status().worker
            await tools.until(lambda: all(it.predicted(name, prompt) == 96 for prompt in old), 2.0)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            process = await spawn(port, events, replay)
            await tools.until(lambda: not any(it.predicted(name, prompt) for prompt in old), 2.0)
            await ready(url)
            for prompt in [*new, old[0]]:
                await it.complete(url, prompt)
            await tools.until(
                lambda: [it.predicted(name, prompt) for prompt in [*new, *old]] == [96, 96, 96, 0, 0, 0], 2.0
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
