"""More than the fleet can do: rows 33 and 34 of `test_bad_inputs`. Real sockets, workers that answer by themselves, and a gate."""

import asyncio
import time

import pytest
from sturdy import SturdyWorker

from gateway.admission.keys import hashed, new_key
from gateway.tasks import TaskGroup

SLOTS = 4
SLACK = 0.7
"""Seconds that this process may need beside: it is client, gateway and workers, and its machine may be busy."""
EVENTS, INTERVAL = 5, 0.03
SERVICE = (EVENTS + 1) * INTERVAL
"""Seconds that an answer takes."""


class Fleet:
    """Two workers of four slots, of which the most that each had at once is watched."""

    def __init__(self):
        self.workers = [SturdyWorker(EVENTS, INTERVAL) for _ in range(2)]
        self.most = 0
        self.capacity = len(self.workers) * SLOTS / SERVICE

    def sections(self):
        return [{"url": each.url, "driver": "vllm", "capabilities": {"slots": SLOTS}} for each in self.workers]

    async def watches(self):
        while True:
            self.most = max([self.most, *(worker.serving for worker in self.workers)])
            await asyncio.sleep(0.005)


@pytest.fixture
async def fleet():
    fleet, tasks = Fleet(), TaskGroup("fleet")
    for worker in fleet.workers:
        await worker.start()
    tasks.spawn("watch", fleet.watches())
    yield fleet
    await tasks.cancel()
    for worker in fleet.workers:
        await worker.stop()


class Asked:
    """One request: how it was answered, and after how many seconds."""

    def __init__(self, answer, seconds):
        self.answer, self.status, self.seconds = answer, answer.status, seconds


async def asks(bench, http, fields=""):
    began = time.monotonic()
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True, "messages": []}, fields=fields))
    answer = await client.receives()
    await client.closes()
    return Asked(answer, time.monotonic() - began)


async def test_a_burst_of_five_times_what_the_fleet_can_do_is_refused_as_far_as_it_is_too_much(start, http, fleet):
    """Row 33: the excess gets 429 with Retry-After at once, the others are in time, and the burst leaves nothing behind."""
    deadline = 1.5
    stages = {"all": {"kind": "completion", "deadline": deadline, "match": {"models": ["m"]}}}
    bench = await start(workers=0, stages=stages, model={"admission": {}, "workers": fleet.sections()})
    for _ in range(12):  # it learns what answers take
        assert (await asks(bench, http)).status == 200
    seconds = 2.0
    count = int(5 * fleet.capacity * seconds)
    tasks, burst = TaskGroup("burst"), []
    began = time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number * seconds / count - time.monotonic()))
        burst.append(tasks.spawn("one", asks(bench, http)))
    asked = await asyncio.gather(*burst)
    took = time.monotonic() - began
    served = [each for each in asked if each.status == 200]
    refused = [each for each in asked if each.status != 200]
    assert {each.status for each in refused} == {429}
    assert all(int(each.answer.get("retry-after")) >= 1 for each in refused)
    assert {each.answer.json["error"]["code"] for each in refused} <= {"deadline_unreachable", "deadline_missed"}
    # No collapse: it goes on with what it can do. (The machine of the tests is busy: three quarters.)
    assert len(served) >= 0.75 * fleet.capacity * seconds
    assert len(served) <= fleet.capacity * (took + deadline)
    late = [each for each in served if each.seconds > deadline + SLACK]
    assert len(late) <= 0.05 * len(served), sorted(each.seconds for each in late)
    assert fleet.most <= SLOTS, "the excess has waited in the gateway, never in a worker"
    # And when it is over, it is over.
    after = [await asks(bench, http) for _ in range(5)]
    assert [each.status for each in after] == [200] * 5
    assert max(each.seconds for each in after) < deadline + SLACK
    assert not bench.gateway.proxy.admissions.gates["m"].line.tickets


async def test_a_tenant_that_floods_leaves_the_others_their_share(start, http, fleet):
    """Row 34: one asks forty at a time, another two: the second gets what it asks for at about its own pace."""
    keys = {"flood": new_key(), "other": new_key()}
    bench = await start(
        workers=0,
        tenants={name: {"keys": [hashed(key)]} for name, key in keys.items()},
        model={"admission": {"max_requests": 200}, "workers": fleet.sections()},
    )
    done, on = {"flood": [], "other": []}, True

    async def goes_on(name):
        while on:
            asked = await asks(bench, http, f"Authorization: Bearer {keys[name]}\r\n")
            assert asked.status == 200
            done[name].append(asked.seconds)

    tasks = TaskGroup("tenants")
    others = [tasks.spawn("other", goes_on("other")) for _ in range(2)]
    async with asyncio.timeout(20):
        while len(done["other"]) < 20:  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.02)
    alone = sorted(done["other"])[len(done["other"]) // 2]
    floods = [tasks.spawn("flood", goes_on("flood")) for _ in range(40)]
    async with asyncio.timeout(20):
        while len(done["flood"]) < 80:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    before = {name: len(each) for name, each in done.items()}
    async with asyncio.timeout(20):
        while len(done["flood"]) < before["flood"] + 120:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    on = False
    flooded = done["other"][before["other"] :]
    await asyncio.gather(*others, *floods)
    assert flooded
    middle = sorted(flooded)[len(flooded) // 2]
    waits = sorted(done["flood"])[len(done["flood"]) // 2]
    assert middle <= 2.5 * alone, "no more than one turn of a slot longer"
    assert waits >= 1.5 * middle, "the wait is the flood's"
