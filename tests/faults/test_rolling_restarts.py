"""All workers are restarted, one after the other, under load: what fails is what the killed one was serving, and with drain nothing."""

import asyncio
import random

import aiohttp
import pytest

from bench.clients import Client, Result, Tally
from gateway.tasks import TaskGroup

pytestmark = pytest.mark.slow
CLIENTS = 24
QUICK = {"interval": 0.1, "timeout": 0.5, "slow_start": 0, "ejection": {"base": 0.3}}


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, port):
        self.tally = Tally()
        self._on = True
        self._tasks = TaskGroup("load")
        self._clients = [
            self._tasks.spawn(
                "client", Client(port, random.Random(number), self.tally, leave=0.0).asks(lambda: self._on)
            )
            for number in range(CLIENTS)
        ]

    async def answered(self, more):
        """Wait for so many more answers."""
        wanted = self.tally.results[Result.ANSWERED] + more
        async with asyncio.timeout(20):
            while self.tally.results[Result.ANSWERED] < wanted:  # noqa: ASYNC110 - counters have no event
                await asyncio.sleep(0.01)

    async def stops(self):
        self._on = False
        await asyncio.gather(*self._clients)


def state(scene, number):
    """The gateway's view of the worker of that number."""
    return next(worker for worker in scene.bench.fleet_workers if worker.port == scene.workers[number].port)


async def test_without_drain_only_streams_on_the_killed_worker_fail(stage, http):
    scene = await stage(workers=3, events=15, direct=True, health=QUICK)
    load = Load(scene.bench.gateway.port)
    await load.answered(CLIENTS)
    served = 0
    for number, worker in enumerate(scene.workers):
        served += state(scene, number).in_flight
        await worker.stop()
        await load.answered(2 * CLIENTS)
        before = worker.asked
        await worker.start()
        await http.until(lambda worker=worker, before=before: worker.asked > before, seconds=20)
        await http.until(lambda number=number: state(scene, number).routable, seconds=20)
    await load.stops()
    await scene.bench.settles()
    results = load.tally.results
    assert results[Result.BROKEN] == 0, load.tally.errors
    assert results[Result.CLEAN_ERROR] + results[Result.CUT_SHORT] <= served
    assert results[Result.CLEAN_ERROR] > 0
    assert load.tally.errors.keys() <= {"upstream_reset_midstream", "upstream_reset"}
    assert scene.bench.outcomes["completed"] == results[Result.ANSWERED]


async def test_with_drain_nothing_fails(stage, http):
    scene = await stage(workers=3, events=15, direct=True, health=QUICK)
    load = Load(scene.bench.gateway.port)
    admin = f"http://127.0.0.1:{scene.bench.gateway.admin_port}/api/workers"
    await load.answered(CLIENTS)
    async with aiohttp.ClientSession() as session:
        for number, worker in enumerate(scene.workers):
            there = state(scene, number)
            async with session.post(f"{admin}/{there.id}/drain", json={}) as response:
                assert response.status == 200
            await http.until(lambda there=there: there.in_flight == 0, seconds=20)
            await worker.stop()
            before = worker.asked
            await load.answered(2 * CLIENTS)
            assert worker.asked == before
            await worker.start()
            async with session.post(f"{admin}/{there.id}/undrain", json={}) as response:
                assert response.status == 200
            await http.until(lambda worker=worker, before=before: worker.asked > before, seconds=20)
    await load.stops()
    await scene.bench.settles()
    results = load.tally.results
    assert results[Result.ANSWERED] == load.tally.total, (results, load.tally.errors)
    assert scene.bench.outcomes == {"completed": load.tally.total}
