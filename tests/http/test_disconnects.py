"""Clients that leave at any moment: their worker sees it at once, counters return to zero, nobody is blamed."""

import asyncio

import pytest

AT_ONCE = 1.0
"""Seconds within which a worker must see its client gone; in fact it takes one turn of the loop."""


async def leave(client, how):
    await (client.closes() if how == "FIN" else client.resets())


async def sees_it(bench, worker):
    """The worker's connection ends in time, and the gateway counts the request as the client's own decision."""
    async with asyncio.timeout(AT_ONCE):
        await worker.sees_end()
    await bench.settles()
    assert bench.outcomes["client_gone"] == 1
    assert bench.error_types == {"client_disconnect": 1}
    assert bench.failures() == 0
    assert bench.gateway._pool.counts().keys() <= {f"127.0.0.1:{bench.worker.port}"}


async def sees_it_beside(bench, http, worker):
    """As `sees_it`, while the bystander's request goes on."""
    async with asyncio.timeout(AT_ONCE):
        await worker.sees_end()
    await http.until(lambda: "client_gone" in bench.outcomes, AT_ONCE)
    assert bench.error_types == {"client_disconnect": 1}
    assert bench.failures() == 0
    assert bench.fleet_worker(bench.worker).in_flight == 1


@pytest.fixture(params=["FIN", "RST"])
def how(request):
    return request.param


async def test_a_client_that_leaves_while_uploading_never_reaches_a_worker(start, http, how):
    bench = await start()
    async with bench.bystander():
        client = await bench.client()
        await client.sends(http.post(b"x" * 100_000)[:50_000])
        await asyncio.sleep(0.02)  # for the gateway to have begun to read
        await leave(client, how)
        await http.until(lambda: "client_gone" in bench.outcomes, AT_ONCE)
        assert bench.error_types == {"client_disconnect": 1}
        assert bench.worker.connections == 1  # the bystander's
    await bench.settles()
    assert bench.outcomes == {"client_gone": 1, "completed": 1}
    assert bench.attempts == {None: 1}


async def test_a_client_that_leaves_before_the_first_byte_is_noticed_by_its_worker(start, http, how):
    bench = await start()
    async with bench.bystander():
        client = await bench.client()
        await client.sends(http.post())
        worker, _ = await bench.worker.receives()
        await leave(client, how)
        await sees_it_beside(bench, http, worker)


async def test_a_client_that_leaves_mid_stream_is_noticed_by_its_worker(start, http, how):
    bench = await start()
    async with bench.bystander():
        client = await bench.client()
        await client.sends(http.post({"model": "m", "stream": True}))
        worker, _ = await bench.worker.receives()
        await worker.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n"))
        await client.head()
        await client.chunk()
        await leave(client, how)
        await sees_it_beside(bench, http, worker)


async def test_a_client_that_leaves_in_the_middle_of_a_fixed_answer_is_noticed_by_its_worker(start, http, how):
    bench = await start()
    async with bench.bystander():
        client = await bench.client()
        await client.sends(http.post())
        worker, _ = await bench.worker.receives()
        await worker.sends(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await client.head()
        await leave(client, how)
        await sees_it_beside(bench, http, worker)


async def test_a_client_that_leaves_while_its_request_is_still_being_sent_is_noticed_by_its_worker(start, http, how):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post(b'{"model":"m","x":"%b"}' % (b"x" * 20_000_000)))
    worker = await bench.worker.accepts()
    await worker.head()
    worker.reader._transport.pause_reading()
    await leave(client, how)
    await http.until(lambda: bool(bench.outcomes), AT_ONCE)
    assert bench.outcomes == {"client_gone": 1}
    worker.reader._transport.resume_reading()
    await sees_it(bench, worker)


async def test_a_client_that_leaves_while_the_gateway_connects_is_forgotten(start, http, how, black_hole):
    bench = await black_hole(start)
    client = await bench.client()
    await client.sends(http.post())
    worker = bench.fleet_workers[0]
    await http.until(lambda: worker.in_flight > 0)
    await leave(client, how)
    await bench.settles()
    assert bench.outcomes == {"client_gone": 1}
    assert bench.gateway._health._lives[worker].failures == 0
    assert bench.gateway._pool.counts() == {}


async def test_the_last_byte_counts_even_if_the_client_leaves_right_after_it(start, http, how):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer())
    await client.receives()
    await leave(client, how)
    await bench.settles()
    assert bench.outcomes == {"completed": 1}


async def test_fifty_clients_leave_at_once_and_fifty_workers_connections_end(start, http):
    bench = await start(workers=2)
    clients = [await bench.client() for _ in range(50)]
    for client in clients:
        await client.sends(http.post({"model": "m", "stream": True}))
    peers = [(await bench.arrives())[1] for _ in clients]
    for number, peer in enumerate(peers):
        if number % 2:
            await peer.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n"))
    for client in clients:
        client.writer.transport.abort()
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*(peer.sees_end() for peer in peers))
    await bench.settles()
    assert bench.outcomes == {"client_gone": 50}
    assert bench.gateway._pool.counts() == {}
