"""Second attempts beside the first, on real sockets: who answers, what is counted, and when there is none.

Each test ends under the conservation law (`tests/conftest.py`): one outcome per request, no lease, exchange or task left over.
"""

import asyncio
import random

import pytest

from gateway.http.hedging import repeatable

SOON = {"after": 0.1, "budget": 1.0}
STREAM = {"model": "m", "stream": True, "messages": []}
QUIET = {"interval": 60}


@pytest.fixture
async def hedged(start):
    """A gateway with two workers that hedges after 0.1 s; keywords as for `start`."""

    async def begin(workers=2, hedging=SOON, **sections):
        return await start(workers=workers, model={"hedging": hedging}, health=QUIET, **sections)

    return begin


def results(bench):
    lanes = bench.gateway.proxy.hedging.lanes.values()
    return {name: count for lane in lanes for name, count in lane.results.items()}


async def ends(peer):
    """The gateway has closed this connection."""
    async with asyncio.timeout(2):
        await peer.sees_end()


async def test_the_second_attempt_answers_when_the_first_is_silent_and_the_first_is_ended(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    slow, first, request = await bench.arrives()
    quick, second, again = await bench.arrives()
    assert quick is not slow
    assert again.body == request.body
    assert again.get("x-request-id") == request.get("x-request-id")
    assert bench.fleet_worker(slow).in_flight == bench.fleet_worker(quick).in_flight == 1
    await second.sends(http.SSE_HEAD + http.chunk(b"data: 2\n\n"))
    head = await client.head()
    assert head.get("x-warmroute-worker") == bench.fleet_worker(quick).id
    assert await client.chunk() == b"data: 2\n\n"
    await ends(first)
    await http.until(lambda: bench.fleet_worker(slow).in_flight == 0)
    assert bench.fleet_worker(quick).in_flight == 1
    await second.sends(http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert await client.chunked_body() == b"data: [DONE]\n\n"
    await bench.settles()
    assert bench.outcomes == {"completed": 1}
    assert bench.attempts == {"hedge_lost": 1, None: 1}
    assert results(bench) == {"won": 1}
    assert bench.failures(slow) == 0
    assert bench.fleet_worker(slow).weight < 1, "it kept somebody waiting"


async def test_the_first_attempt_answers_if_its_body_begins_first(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    first, peer, _ = await bench.arrives()
    _, second, _ = await bench.arrives()
    closing = http.SSE_HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    await peer.sends(closing + http.chunk(b"data: 1\n\n"))
    assert (await client.head()).get("x-warmroute-worker") == bench.fleet_worker(first).id
    await ends(second)
    await peer.sends(b"0\r\n\r\n")
    assert await client.chunked_body() == b"data: 1\n\n"
    await bench.settles()
    assert results(bench) == {"lost": 1}
    assert bench.outcomes == {"completed": 1}
    # The connection carries the next request, to whichever worker.
    await client.sends(http.post({"model": "m"}))
    _, peer, _ = await bench.arrives()
    await peer.sends(http.answer(b"[2]"))
    assert (await client.receives()).body == b"[2]"


async def test_a_head_alone_decides_nothing(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    _, first, _ = await bench.arrives()
    await first.sends(http.SSE_HEAD)
    quick, second, _ = await bench.arrives()
    await second.sends(http.SSE_HEAD)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.head(), 0.15)
    await second.sends(http.chunk(b"data: 2\n\n") + http.chunk(b"data: 3\n\n") + b"0\r\n\r\n")
    assert (await client.head()).get("x-warmroute-worker") == bench.fleet_worker(quick).id
    assert await client.chunked_body() == b"data: 2\n\ndata: 3\n\n"
    await ends(first)


async def test_no_second_attempt_once_the_body_has_begun(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    _, first, _ = await bench.arrives()
    await first.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n"))
    await client.head()
    await asyncio.sleep(0.3)
    await first.sends(b"0\r\n\r\n")
    assert await client.chunked_body() == b"data: 1\n\n"
    assert sum(worker.connections for worker in bench.workers) == 1
    assert results(bench) == {}


async def test_a_stream_that_breaks_after_it_has_won_is_broken_once_and_nobody_takes_over(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    _, first, _ = await bench.arrives()
    _, second, _ = await bench.arrives()
    await second.sends(http.SSE_HEAD + http.chunk(b"data: 2\n\n"))
    await client.head()
    await client.chunk()
    await second.resets()
    assert b"upstream_reset_midstream" in await client.chunked_body()
    await ends(first)
    await bench.settles()
    assert bench.outcomes == {"failed": 1}


@pytest.mark.parametrize("status", ["500 Oh", "503 Busy", "429 Busy"])
async def test_a_worker_that_fails_does_not_win_while_another_may_answer(hedged, http, status):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    _, first, _ = await bench.arrives()
    _, second, _ = await bench.arrives()
    await second.sends(http.answer(b"no", status=status))
    await http.until(lambda: sum(worker.in_flight for worker in bench.fleet_workers) == 1)
    await first.sends(http.answer(b"[1]"))
    assert (await client.receives()).body == b"[1]"
    await bench.settles()
    assert bench.outcomes == {"completed": 1}
    assert results(bench) == {"lost": 1}


async def test_when_both_fail_the_client_gets_one_error(hedged, http):
    bench = await hedged(retries={"attempts": 1})
    client = await bench.client()
    await client.sends(http.post(STREAM))
    _, first, _ = await bench.arrives()
    _, second, _ = await bench.arrives()
    await first.resets()
    await http.until(lambda: sum(worker.in_flight for worker in bench.fleet_workers) == 1)
    await second.sends(http.answer(b"no", status="500 Oh"))
    response = await client.receives()
    assert (response.status, response.body) == (500, b"no")
    await bench.settles()
    assert bench.outcomes == {"failed": 1}


async def test_when_the_first_has_failed_the_second_goes_on_and_answers(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    slow, first, _ = await bench.arrives()
    _, second, _ = await bench.arrives()
    await first.resets()
    await http.until(lambda: bench.fleet_worker(slow).in_flight == 0 or bench.failures(slow) == 1)
    await second.sends(http.answer(b"[2]"))
    assert (await client.receives()).body == b"[2]"
    await bench.settles()
    assert bench.outcomes == {"completed": 1}
    assert bench.failures(slow) == 1


async def test_a_client_that_leaves_ends_both(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    _, first, _ = await bench.arrives()
    _, second, _ = await bench.arrives()
    await client.closes()
    await ends(first)
    await ends(second)
    await bench.settles()
    assert bench.outcomes == {"client_gone": 1}
    assert results(bench) == {"ended": 1}


async def test_a_slow_reader_of_the_winner_is_held_back_as_any_other(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    await bench.arrives()
    _, second, _ = await bench.arrives()
    piece = b"x" * 65536
    await second.sends(http.SSE_HEAD + http.chunk(piece))
    sent = 0

    async def pour():
        nonlocal sent
        while True:
            await second.sends(http.chunk(piece))
            sent += 1

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pour(), 1)
    assert 0 < sent < 1000, "64 MB fit into no buffer on the way"
    second.writer.write(b"0\r\n\r\n")
    await client.head()
    assert len(await client.chunked_body()) >= sent * len(piece)


async def test_without_another_worker_there_is_no_second_attempt(hedged, http):
    bench = await hedged(workers=1)
    client = await bench.client()
    await client.sends(http.post(STREAM))
    peer, _ = await bench.worker.receives()
    await asyncio.sleep(0.3)
    await peer.sends(http.answer(b"[1]"))
    assert (await client.receives()).body == b"[1]"
    assert results(bench) == {}


async def test_second_attempts_are_a_share_of_the_requests(hedged, http):
    bench = await hedged(hedging={"after": 0.05, "budget": 0.25})
    clients = [await bench.client() for _ in range(8)]
    for client in clients:
        await client.sends(http.post(STREAM))
    peers = [(await bench.arrives())[1] for _ in range(10)]
    await asyncio.sleep(0.3)
    assert sum(worker.connections for worker in bench.workers) == 10
    for peer in peers:
        peer.writer.write(http.answer(b"[]", fields=b"connection: close\r\n"))
    assert [(await client.receives()).body for client in clients] == [b"[]"] * 8
    text, _ = bench.gateway.metrics.render(None)
    assert b'warmroute_hedge_budget_exhausted_total{model="m"} 6.0' in text


async def test_without_hedging_nothing_is_sent_twice(start, http):
    bench = await start(workers=2)
    client = await bench.client()
    await client.sends(http.post(STREAM))
    _, peer, _ = await bench.arrives()
    await asyncio.sleep(0.3)
    await peer.sends(http.answer(b"[1]"))
    assert (await client.receives()).body == b"[1]"
    assert sum(worker.connections for worker in bench.workers) == 1


async def test_what_has_effects_is_never_sent_twice(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post({**STREAM, "store": True}))
    _, peer, _ = await bench.arrives()
    await asyncio.sleep(0.3)
    await peer.sends(http.answer(b"[1]"))
    assert (await client.receives()).body == b"[1]"
    assert sum(worker.connections for worker in bench.workers) == 1


async def test_the_record_shows_both_attempts_and_both_decisions(hedged, http):
    bench = await hedged()
    client = await bench.client()
    await client.sends(http.post(STREAM))
    slow, _, _ = await bench.arrives()
    quick, second, _ = await bench.arrives()
    await second.sends(http.answer(b"[2]"))
    await client.receives()
    await bench.settles()
    (record,) = bench.gateway.decisions.recent(10)
    document = record.document()
    first, hedge = document["attempts"]
    assert (first["worker"], first["error"], first["hedge"]) == (bench.fleet_worker(slow).id, "hedge_lost", False)
    assert (hedge["worker"], hedge["error"], hedge["hedge"]) == (bench.fleet_worker(quick).id, None, True)
    assert document["chosen"] == bench.fleet_worker(quick).id
    assert document["earlier"][0]["chosen"] == bench.fleet_worker(slow).id
    assert record.summary()["worker"] == bench.fleet_worker(quick).id
    reasons = {key[2]: series.overhead.count for key, series in bench.gateway.metrics.decisions.items()}
    assert reasons.pop("hedge") == 1
    assert sum(reasons.values()) == 1


async def test_a_stage_may_hedge_where_its_model_does_not(start, http):
    bench = await start(workers=2, stages={"planner": {"hedging": SOON}}, health=QUIET)
    client = await bench.client()
    await client.sends(http.post(STREAM, fields="x-warmroute-stage: planner\r\n"))
    await bench.arrives()
    _, second, _ = await bench.arrives()
    await second.sends(http.answer(b"[2]"))
    assert (await client.receives()).body == b"[2]"
    await http.until(lambda: sum(worker.in_flight for worker in bench.fleet_workers) == 0)
    await client.sends(http.post(STREAM))
    await asyncio.sleep(0.3)
    assert sum(worker.in_flight for worker in bench.fleet_workers) == 1
    await client.closes()


async def test_a_percentile_is_learned_before_anything_is_hedged(hedged, http):
    bench = await hedged(hedging={"after": "p95", "budget": 1.0})
    client = await bench.client()
    for _ in range(20):
        await client.sends(http.post(STREAM))
        _, peer, _ = await bench.arrives()
        await peer.sends(http.answer(b"[1]", fields=b"connection: close\r\n"))
        assert (await client.receives()).body == b"[1]"
    await bench.settles()
    (lane,) = bench.gateway.proxy.hedging.lanes.values()
    assert lane.after(stream=True) is not None
    assert lane.after(stream=False) is None
    await client.sends(http.post(STREAM))
    await bench.arrives()
    _, second, _ = await bench.arrives()
    await second.sends(http.answer(b"[2]"))
    assert (await client.receives()).body == b"[2]"


SAFE = [
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"store": False, "tools": [{"type": "function", "function": {}}]}),
    ("/v1/completions", {"n": 2}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}]}),
    ("/v1/responses", {"store": False}),
]
UNSAFE = [
    ("/v1/responses", {}),
    ("/v1/responses", {"store": True}),
    ("/v1/responses", {"store": False, "background": True}),
    ("/v1/responses", {"store": False, "previous_response_id": "r"}),
    ("/v1/responses", {"store": False, "tools": [{"type": "mcp"}]}),
    ("/v1/chat/completions", {"store": True}),
    ("/v1/chat/completions", {"kv_transfer_params": {"do_remote_decode": True}}),
    ("/v1/chat/completions", {"tools": "?"}),
    ("/v1/messages", {"tools": [{"type": "web_search_20250305"}]}),
    ("/v1/messages", {"mcp_servers": [{}]}),
    ("/v1/embeddings", {}),
    ("/v1/audio/transcriptions", {}),
]


@pytest.mark.parametrize(("path", "body"), SAFE)
def test_a_mere_generation_may_be_made_twice(path, body):
    assert repeatable(path, body)


@pytest.mark.parametrize(("path", "body"), UNSAFE)
def test_what_does_more_than_generate_may_not(path, body):
    assert not repeatable(path, body)


async def test_under_random_delays_failures_and_departures_every_request_ends_once(hedged, http):
    rng = random.Random(11)
    bench = await hedged(workers=3, hedging={"after": 0.02, "budget": 1.0, "max": 2}, retries={"attempts": 3})
    whole = http.SSE_HEAD + http.chunk(b"data: 1\n\n")

    async def serve(peer):
        try:
            while True:
                await peer.receives()
                await asyncio.sleep(rng.choice([0, 0, 0.01, 0.03, 0.1]))
                chance = rng.random()
                if chance < 0.1:
                    peer.writer.transport.abort()
                    return
                if chance < 0.2:
                    await peer.sends(http.answer(b"no", status="503 Busy"))
                    continue
                await peer.sends(whole)
                await asyncio.sleep(rng.choice([0, 0.01]))
                await peer.sends(http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        except (
            ConnectionError,
            asyncio.IncompleteReadError,
            RuntimeError,
        ):  # uvloop's word for a connection that is gone
            pass

    async def accept(worker, tasks):
        while True:
            tasks.create_task(serve(await worker.accepts()))

    answered = left = 0

    async def ask(number):
        nonlocal answered, left
        for turn in range(15):
            client = await bench.client()
            await client.sends(http.post(STREAM))
            if (number + turn) % 5 == 0:
                await asyncio.sleep(rng.random() * 0.1)
                await client.resets()
                left += 1
                continue
            message = await client.receives()
            assert message.status in {200, 502, 503}
            if message.status == 200:
                assert message.body == b"data: 1\n\ndata: [DONE]\n\n"
            answered += 1
            await client.closes()

    async with asyncio.TaskGroup() as servers:
        accepting = [servers.create_task(accept(worker, servers)) for worker in bench.workers]
        await asyncio.gather(*(ask(number) for number in range(12)))
        await bench.settles()
        for task in accepting:
            task.cancel()
        for worker in bench.workers:
            await worker.stop()
    assert answered + left == 180
    assert sum(bench.outcomes.values()) == 180
    assert results(bench).get("won", 0) > 0
    assert results(bench).get("lost", 0) > 0
