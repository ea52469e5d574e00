"""Stopping a gateway in the same process: what runs may finish, what cannot is told, nothing is left behind."""

import asyncio

import orjson

from gateway.tasks import TaskGroup


async def ready(bench):
    """Status of `/readyz`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.admin_port)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head = await reader.readuntil(b"\r\n")
    writer.close()
    return int(head.split()[1])


async def stopping(bench, grace):
    tasks = TaskGroup("test")
    task = tasks.spawn("stop", bench.gateway.stop(grace))
    await asyncio.sleep(0)
    return task


async def test_a_running_stream_finishes_and_its_connection_ends(start, http):
    bench = await start()
    client, idle = await bench.client(), await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n"))
    await client.head()
    await client.chunk()
    assert await ready(bench) == 200
    stop = await stopping(bench, 10)
    # New work goes elsewhere: not ready, no new connection, idle ones closed; what runs goes on.
    assert await ready(bench) == 503
    assert await idle.sees_end() == b""
    try:
        await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        raise AssertionError("the listener still accepts")
    except ConnectionRefusedError:
        pass
    await worker.sends(http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert await client.chunked_body() == b"data: [DONE]\n\n"
    async with asyncio.timeout(0.5):
        await stop
    assert await client.sees_end() == b""
    assert bench.outcomes == {"completed": 1}


async def test_an_answer_during_the_grace_period_asks_its_client_to_go(start, http):
    bench = await start()
    client, running = await bench.client(), await bench.client()
    await running.sends(http.post())
    busy, _ = await bench.worker.receives()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    stop = await stopping(bench, 10)
    await worker.sends(http.answer())
    await busy.sends(http.answer())
    # Both requests began before; the answers' heads come after.
    for peer in (client, running):
        response = await peer.receives()
        assert (response.status, response.get("connection")) == (200, "close")
        assert await peer.sees_end() == b""
    async with asyncio.timeout(0.5):
        await stop


async def test_a_stream_beyond_the_grace_period_ends_with_an_error_event(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD + http.chunk(b'data: {"cut'))
    await client.head()
    await client.chunk()
    stop = await stopping(bench, 0.2)
    rest = await client.chunked_body()
    assert rest.startswith(b"\n\ndata: ")
    assert orjson.loads(rest.partition(b"data: ")[2])["error"]["code"] == "gateway_stopping"
    assert b"[DONE]" not in rest
    assert await client.sees_end() == b""
    assert await worker.sees_end() == b""
    async with asyncio.timeout(3):
        await stop
    assert bench.error_types == {"gateway_stopping": 1}
    assert bench.failures() == 0


async def test_a_request_without_an_answer_yet_gets_a_503_at_the_end(start, http):
    bench = await start()
    waiting, uploading = await bench.client(), await bench.client()
    await waiting.sends(http.post())
    await uploading.sends(http.post(b"x" * 100_000)[:50_000])
    worker, _ = await bench.worker.receives()
    await http.until(lambda: bench.gateway.metrics.in_flight == 2)
    stop = await stopping(bench, 0.2)
    for client in (waiting, uploading):
        response = await client.receives()
        assert response.status == 503
        assert response.json["error"]["code"] == "gateway_stopping"
        assert response.get("retry-after") == "1"
        assert response.get("connection") == "close"
        assert await client.sees_end() == b""
    assert await worker.sees_end() == b""
    async with asyncio.timeout(5):
        await stop
    assert bench.outcomes == {"failed": 2}


async def test_a_request_that_is_connecting_gets_a_503_at_the_end(start, http, black_hole):
    bench = await black_hole(start, timeouts={"connect": 30})
    client = await bench.client()
    await client.sends(http.post())
    await http.until(lambda: bench.fleet_workers[0].in_flight == 1)
    stop = await stopping(bench, 0.2)
    response = await client.receives()
    assert (response.status, response.json["error"]["code"]) == (503, "gateway_stopping")
    async with asyncio.timeout(5):
        await stop


async def test_a_client_that_reads_nothing_cannot_hold_the_gateway(start, http):
    bench = await start()
    client = await bench.client()
    client.reader._transport.pause_reading()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD)
    worker.writer.write(http.chunk(b"x" * 16_000) * 1000)
    await http.until(lambda: bench.gateway._server.unsent() > 0)
    async with asyncio.timeout(5):
        await bench.gateway.stop(0.2)


async def test_nothing_is_left_of_a_gateway_that_has_stopped(start, http):
    before = asyncio.all_tasks()
    bench = await start(workers=2)
    clients = [await bench.client() for _ in range(10)]
    async with bench.workers[0].answering(http.answer()), bench.workers[1].answering(http.answer()):
        for client in clients:
            await client.sends(http.post())
        for client in clients:
            assert (await client.receives()).status == 200
        assert bench.gateway._pool.counts()
        await bench.gateway.stop(1)
    for client in clients:
        assert await client.sees_end() == b""
    for worker in bench.workers:
        for peer in worker.peers:
            await peer.sees_end()
    await http.until(lambda: not bench.gateway._server.connections_open)
    assert {task.get_coro().__qualname__ for task in asyncio.all_tasks() - before if "Worker" not in str(task)} <= set()
    assert bench.gateway._pool.counts() == {}
