"""Every fault that a network has, between the gateway and its workers: an answer is whole, or an error that its client can read."""

import asyncio
import random

import pytest
from sturdy import WHOLE, stream_body

from bench.clients import Client, Result, Tally
from gateway.tasks import TaskGroup

STREAM = {"model": "m", "stream": True}
HARMLESS = {
    "latency": {"latency": 0.02},
    "jitter": {"jitter": 0.01},
    "little bandwidth": {"bandwidth": 20_000},
    "one byte at a time": {"slices": 1},
    "slices across every boundary": {"slices": 7},
    "all of them": {"latency": 0.002, "jitter": 0.004, "slices": 13, "bandwidth": 50_000},
}


async def answer_to(bench, http, body=None):
    """One request of a client of its own: (head, body)."""
    client = await bench.client()
    await client.sends(http.post(body))
    message = await client.receives()
    await bench.settles()
    return message


@pytest.mark.parametrize("fault", HARMLESS)
async def test_what_only_slows_or_cuts_a_stream_changes_no_byte_of_it(stage, http, fault):
    scene = await stage()
    scene.all_get(**HARMLESS[fault])
    streamed = await answer_to(scene.bench, http, STREAM)
    assert (streamed.status, streamed.body) == (200, stream_body(5))
    assert (await answer_to(scene.bench, http)).body == WHOLE
    assert sum(proxy.hurt for proxy in scene.proxies) >= 1
    assert scene.bench.outcomes == {"completed": 2}


@pytest.mark.parametrize("fault", ["reset_after", "close_after", "hang_after"])
@pytest.mark.parametrize("passed", [120, 300, 420])
async def test_a_stream_that_is_cut_ends_with_an_error_event_of_its_own_and_no_done(stage, http, fault, passed):
    scene = await stage(timeouts={"between_chunks": 0.3})
    scene.all_get(**{fault: passed})
    answer = await answer_to(scene.bench, http, STREAM)
    before, found, error = answer.body.rpartition(b'data: {"error":')
    assert (answer.status, found) == (200, b'data: {"error":')
    assert not before or before.endswith(b"\n\n")
    assert error.endswith(b"}}\n\n")
    assert b"[DONE]" not in answer.body
    assert scene.bench.outcomes == {"failed": 1}
    assert sum(worker.asked for worker in scene.workers) == 1, "a stream that has begun is not retried"


@pytest.mark.parametrize("fault", [{"reset_after": 30}, {"close_after": 30}, {"garbage": 60}])
async def test_an_answer_that_breaks_before_its_head_is_whole_is_a_502(stage, http, fault):
    scene = await stage()
    scene.all_get(**fault)
    answer = await answer_to(scene.bench, http)
    assert answer.status == 502
    assert answer.json["error"]["type"]
    scene.all_get()
    assert (await answer_to(scene.bench, http)).body == WHOLE


async def test_a_connection_that_is_reset_when_the_request_comes_is_told_and_the_next_request_is_served(stage, http):
    scene = await stage()
    scene.all_get(refuse=True)
    assert (await answer_to(scene.bench, http)).status in {502, 503}
    scene.all_get()
    assert (await answer_to(scene.bench, http)).status == 200


async def test_a_black_hole_costs_its_own_request_a_504_and_nobody_else_anything(stage, http):
    scene = await stage(timeouts={"first_byte": 0.4})
    scene.all_get(black_hole=True)
    swallowed = await scene.bench.client()
    await swallowed.sends(http.post())
    await http.until(lambda: sum(proxy.hurt for proxy in scene.proxies) == 1)
    scene.all_get()
    for _ in range(5):
        client = await scene.bench.client()
        await client.sends(http.post(STREAM))
        assert (await client.receives()).body == stream_body(5)
    answer = await swallowed.receives()
    assert answer.status == 504
    assert answer.json["error"]["code"] == "upstream_timeout_first_byte"


async def test_a_host_that_dies_fails_its_own_streams_cleanly_and_no_other(stage, http):
    scene = await stage(events=100)
    clients = [await scene.bench.client() for _ in range(8)]
    for client in clients:
        await client.sends(http.post(STREAM))
        assert (await client.head()).status == 200
        await client.chunk()
    served = scene.workers[0].serving
    assert 0 < served < 8
    scene.proxies[0].cut_all()
    ends = [await client.chunked_body() for client in clients]
    assert sum(b'data: {"error":' in end for end in ends) == served
    assert sum(end.endswith(b"data: [DONE]\n\n") for end in ends) == 8 - served
    await scene.bench.settles()
    assert scene.bench.outcomes == {"completed": 8 - served, "failed": served}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_whatever_the_network_does_when_the_law_holds_and_every_answer_is_whole_or_a_clean_error(
    stage, http, faults, seed
):
    scene = await stage(
        workers=3,
        timeouts={"first_byte": 0.4, "between_chunks": 0.4, "connect": 0.5},
        telemetry={"traces": {"exporter": "console", "sample": 0.0}},
    )
    rng, tally = random.Random(seed), Tally()
    kinds = [
        faults.NONE,
        faults.NONE,
        faults.Faults(latency=0.005, jitter=0.02),
        faults.Faults(slices=5),
        faults.Faults(reset_after=rng.randrange(600)),
        faults.Faults(close_after=rng.randrange(600)),
        faults.Faults(hang_after=rng.randrange(600)),
        faults.Faults(garbage=rng.randrange(1, 200)),
        faults.Faults(black_hole=True),
        faults.Faults(refuse=True),
    ]
    clock = asyncio.get_running_loop().time
    end = clock() + 2.0
    tasks = TaskGroup("storm")
    clients = [
        tasks.spawn(
            "client",
            Client(scene.bench.gateway.port, random.Random(seed * 100 + n), tally, leave=0.3).asks(
                lambda: clock() < end
            ),
        )
        for n in range(24)
    ]
    while clock() < end:
        proxy = rng.choice(scene.proxies)
        proxy.faults = rng.choice(kinds)
        if rng.random() < 0.1:
            proxy.cut_all()
        await asyncio.sleep(0.02)
    scene.all_get()
    await asyncio.gather(*clients)
    await scene.bench.settles()
    assert not tally.results[Result.BROKEN], "\n".join(f"{count} {error}" for error, count in tally.errors.items())
    assert tally.results[Result.ANSWERED] > 0
    assert tally.results[Result.CLEAN_ERROR] > 0
    outcomes = scene.bench.outcomes
    assert sum(outcomes.values()) == scene.bench.gateway.metrics.accepted
    assert not scene.bench.error_types.keys() & {"internal_error", "_OTHER"}
    # The gateway may count as answered, or as failed, what its client had left by then; never the other way round.
    assert outcomes["completed"] >= tally.results[Result.ANSWERED]
    assert outcomes["failed"] >= tally.results[Result.CLEAN_ERROR] + tally.results[Result.CUT_SHORT]
    for _ in range(3):
        assert (await answer_to(scene.bench, http)).status == 200
    scene.bench.obeys_conservation()
