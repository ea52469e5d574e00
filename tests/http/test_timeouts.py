"""Workers that are slow: each phase has its limit, and a limit hurts nobody but the request that reached it."""

import asyncio

import orjson
import pytest

from gateway.tasks import TaskGroup

SLACK = 0.7
"""Seconds that a limit may be exceeded: the sweeper looks four times a second, and this machine may be busy."""


async def seconds(awaitable):
    loop = asyncio.get_running_loop()
    began = loop.time()
    result = await awaitable
    return result, loop.time() - began


async def test_a_worker_that_never_answers_is_a_504_and_its_connection_closed(start, http):
    bench = await start(timeouts={"first_byte": 0.4})
    async with bench.bystander():
        client = await bench.client()
        await client.sends(http.post())
        worker, _ = await bench.worker.receives()
        response, waited = await seconds(client.receives())
        assert response.status == 504
        assert response.json["error"]["code"] == "upstream_timeout_first_byte"
        assert 0.3 < waited < 0.4 + SLACK
        await worker.sees_end()
        assert bench.failures() == 1
    await bench.settles()
    assert bench.outcomes == {"completed": 1, "failed": 1}
    assert bench.gateway.metrics.retries == {}


async def test_a_worker_that_stops_in_its_head_is_a_504(start, http):
    bench = await start(timeouts={"first_byte": 0.3})
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(b"HTTP/1.1 200 OK\r\ncontent-")
    assert (await client.receives()).status == 504
    await worker.sees_end()


async def test_a_stream_that_falls_silent_ends_with_an_error_event(start, http):
    bench = await start(timeouts={"between_chunks": 0.4})
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n"))
    await client.head()
    await client.chunk()
    rest, waited = await seconds(client.chunked_body())
    error = orjson.loads(rest.removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_timeout_idle"
    assert 0.3 < waited < 0.4 + SLACK
    await worker.sees_end()
    await bench.settles()
    assert bench.failures() == 1
    assert bench.fleet_worker(bench.worker).in_flight == 0


async def test_a_stream_that_moves_now_and_then_goes_on(start, http):
    bench = await start(timeouts={"between_chunks": 0.6, "total": 0.5, "first_byte": 0.5})
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD)
    await client.head()
    for _ in range(6):
        await asyncio.sleep(0.2)
        await worker.sends(http.chunk(b": still here\n\n"))
        assert await client.chunk() == b": still here\n\n"
    await worker.sends(b"0\r\n\r\n")
    assert await client.chunk() == b""
    await bench.settles()
    assert bench.outcomes == {"completed": 1}


async def test_the_total_holds_for_answers_that_are_no_streams(start, http):
    bench = await start(timeouts={"total": 0.5})
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
    await client.head()

    async def trickles():
        while not worker.writer.is_closing():
            worker.writer.write(b"x")
            await asyncio.sleep(0.1)

    tasks = TaskGroup("test")
    tasks.spawn("trickle", trickles())
    _, waited = await seconds(client.sees_end())
    await tasks.cancel()
    assert 0.3 < waited < 0.5 + SLACK
    await bench.settles()
    assert bench.error_types == {"upstream_timeout_total": 1}


async def test_the_total_holds_before_the_first_byte_of_what_is_no_stream(start, http):
    bench = await start(timeouts={"total": 0.4})
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    response = await client.receives()
    assert (response.status, response.json["error"]["code"]) == (504, "upstream_timeout_total")
    await worker.sees_end()


async def test_a_stream_may_take_longer_than_the_total_to_begin(start, http):
    bench = await start(timeouts={"total": 0.3})
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await asyncio.sleep(0.8)
    await worker.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n") + b"0\r\n\r\n")
    assert (await client.receives()).body == b"data: 1\n\n"


@pytest.mark.parametrize(("section", "status"), [({"first_byte": 0.3}, 504), ({"first_byte": 0}, 200)])
async def test_a_model_may_have_limits_of_its_own(start, http, section, status):
    bench = await start(model={"timeouts": section}, timeouts={"first_byte": 60 if status == 504 else 0.3})
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    if status == 200:
        await asyncio.sleep(0.8)
        await worker.sends(http.answer())
    assert (await client.receives()).status == status


async def test_a_worker_that_hangs_slows_nobody_else_down(start, http):
    bench = await start(workers=2, timeouts={"first_byte": 30})
    hanging = await bench.client()
    await hanging.sends(http.post())
    stuck, _, _ = await bench.arrives()
    other = next(worker for worker in bench.workers if worker is not stuck)
    client = await bench.client()
    async with other.answering(http.answer()), asyncio.timeout(2):
        for _ in range(20):
            await client.sends(http.post())
            assert (await client.receives()).status == 200
    hanging.writer.transport.abort()
