import asyncio
import time

import pytest

from simulator.server.clock import Clock

CHAT = "/v1/chat/completions"


def test_a_clock_goes_on_from_the_same_moment_when_its_pace_changes():
    real = [100.0]
    clock = Clock(lambda: real[0], 2.0)
    real[0] = 105.0
    assert clock.now() == 10.0
    clock.set_pace(0.5)
    assert clock.now() == 10.0
    real[0] = 107.0
    assert clock.now() == 11.0
    assert clock.real_delay(12.0) == 2.0


async def test_tokens_come_at_the_profiles_times(start, http, chat):
    worker = await start(profile="trn1-8b", speed=1.0)
    begun = time.monotonic()
    async with http.post(worker.url + CHAT, json=chat(max_tokens=20, stream=True)) as response:
        arrivals = [time.monotonic() - begun async for line in response.content if line.startswith(b'data: {"id"')]
    expected = worker.profile.prefill_seconds(10) + 19 * worker.profile.itl(1, 30)
    # Never early; late only as far as a busy machine makes it.
    assert expected - 0.005 <= arrivals[-1] < expected + 1
    assert arrivals[1] >= worker.profile.prefill_seconds(10) - 0.005


async def test_an_idle_worker_has_no_timer_and_no_task(start, http, chat):
    worker = await start(kv_events="tcp://127.0.0.1:*")
    tasks = len(asyncio.all_tasks())
    async with http.post(worker.url + CHAT, json=chat(max_tokens=5)) as response:
        await response.read()
    await asyncio.sleep(0)
    assert worker.pump._timer is None
    assert len(worker.pump) == 0
    assert len(asyncio.all_tasks()) <= tasks + 1  # the connection's own


@pytest.mark.parametrize("stream", [False, True])
async def test_two_hundred_requests_at_once_all_end(start, http, chat, stream):
    worker = await start(speed=500.0, profile="h100-8b")

    async def one(number):
        async with http.post(worker.url + CHAT, json=chat(f"number {number}", stream=stream)) as response:
            return await response.text()

    texts = await asyncio.gather(*(one(number) for number in range(200)))
    assert all(("[DONE]" if stream else "chat.completion") in text for text in texts)
    assert (worker.stats().running, worker.stats().waiting, len(worker.pump), worker.requests) == (0, 0, 0, 0)
