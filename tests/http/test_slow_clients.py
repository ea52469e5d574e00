"""Clients that are slow, silent or many: each costs little, ends in time, and nobody else notices."""

import asyncio
import resource
import socket

import pytest

import gateway.http.body
import gateway.http.server

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n"


async def dribble(client, data, pause):
    """Send byte by byte until the gateway has had enough."""
    try:
        for index in range(len(data)):
            await client.sends(data[index : index + 1])
            await asyncio.sleep(pause)
    except ConnectionError:
        pass


@pytest.fixture
def quick_rates(monkeypatch):
    """The window over which upload rates are measured is 5 s; 0.2 s are enough here."""
    monkeypatch.setattr(gateway.http.body, "_RATE_WINDOW", 0.2)


async def test_a_head_that_comes_too_slowly_is_answered_408_while_others_are_served(start):
    bench = await start(limits={"header_read": 0.4})
    clients = [await bench.client() for _ in range(50)]
    dribbling = asyncio.gather(*(dribble(client, HEAD * 100, 0.02) for client in clients))
    await bench.serves()
    refusals = [await client.receives() for client in clients]
    assert {refusal.status for refusal in refusals} == {408}
    assert all(refusal.json["error"]["type"] == "invalid_request_error" for refusal in refusals)
    await dribbling
    await bench.serves()
    assert bench.gateway.metrics.refusals == {"header_timeout": 50}


async def test_a_connection_that_never_says_anything_is_closed_without_a_word(start):
    bench = await start(limits={"header_read": 0.2})
    client = await bench.client()
    assert await client.sees_end() == b""


async def test_the_second_head_of_a_connection_has_a_time_limit_too(start, http):
    bench = await start(limits={"header_read": 0.3})
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200
    await asyncio.sleep(0.7)  # idle between two requests is not slow
    await client.sends(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
    assert (await client.receives()).status == 200
    await client.sends(b"GET /v1/mo")
    assert (await client.receives()).status == 408
    assert await client.sees_end() == b""


async def test_a_request_that_takes_longer_than_its_head_may_is_left_alone(start, http):
    """The body comes in its own segments, and the worker takes its time."""
    bench = await start(limits={"header_read": 0.2})
    client = await bench.client()
    raw = http.post()
    await client.sends(raw[:-10])
    for index in range(10):
        await asyncio.sleep(0.01)
        await client.sends(raw[len(raw) - 10 + index : len(raw) - 9 + index])
    worker, _ = await bench.worker.receives()
    await asyncio.sleep(0.8)
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200


async def test_an_idle_connection_is_closed_after_keep_alive(start):
    bench = await start(limits={"keep_alive": 0.2})
    client = await bench.client()
    await client.sends(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
    assert (await client.receives()).status == 200
    assert await client.sees_end() == b""


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_body_that_comes_too_slowly_is_answered_408(start, quick_rates, framing):
    bench = await start(limits={"body_rate": 1000})
    client = await bench.client()
    if framing == "length":
        dribbling = asyncio.gather(dribble(client, HEAD + b"Content-Length: 5000\r\n\r\n" + b" " * 500, 0.002))
    else:
        dribbling = asyncio.gather(
            dribble(client, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100, 0.002)
        )
    assert (await client.receives()).status == 408
    assert await client.sees_end() == b""
    await dribbling
    assert bench.worker.connections == 0
    await bench.settles()
    assert bench.error_types == {"body_timeout": 1}


async def test_a_body_that_comes_fast_enough_may_take_its_time(start, http, quick_rates):
    bench = await start(limits={"body_rate": 1000})
    body = b'{"model":"m","x":"' + b"y" * 20_000 + b'"}'
    client = await bench.client()
    raw = http.post(body)
    for index in range(0, len(raw), 1000):  # some 20 kB/s over five windows
        await client.sends(raw[index : index + 1000])
        await asyncio.sleep(0.05)
    worker, request = await bench.worker.receives()
    assert request.body == body
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200


async def test_2000_idle_connections_are_held_and_the_next_is_told_that_there_are_too_many(start, http):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    try:
        bench = await start(limits={"connections": 2001, "header_read": 60})
        idle = [await bench.client() for _ in range(2000)]
        await bench.serves()  # on the last free place, which stays open
        refused = await bench.client()
        refusal = await refused.receives()
        assert refusal.status == 503
        assert refusal.get("connection") == "close"
        assert refusal.json["error"]["message"]
        assert await refused.sees_end() == b""
        assert bench.gateway.metrics.refusals == {"too_many_connections": 1}
        # A place that becomes free is given to the next.
        await idle[0].closes()
        await http.until(lambda: len(bench.gateway._server.connections_open) <= 2000)
        again = await bench.client()
        await again.sends(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await again.receives()).status == 200
        for client in bench.clients:
            client.writer.transport.abort()
        await http.until(lambda: not bench.gateway._server.connections_open)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Clients that do not read.

SIZE = 32 * 1024 * 1024
PIECE = b"x" * 65_536
KERNEL = 12 * 1024 * 1024
"""More than what four socket buffers of this system and the gateway's own buffer hold together."""


@pytest.fixture
def deaf_client(start):
    """A client that sends bytes and reads only when told to; its receive buffer is small. Closed before its gateway is stopped."""
    socks = []

    async def connects(bench, raw):
        sock = socket.socket()
        socks.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", bench.gateway.port))
        await loop.sock_sendall(sock, raw)
        return sock

    yield connects
    for sock in socks:
        sock.close()


class Pouring:
    """A worker that writes as much as it is let."""

    def __init__(self, peer, http, stream):
        self.sent = 0
        self._peer = peer
        self._piece = http.chunk(PIECE) if stream else PIECE
        self._head = http.SSE_HEAD if stream else b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % SIZE
        self._end = b"0\r\n\r\n" if stream else b""

    async def pours(self):
        self._peer.writer.transport.set_write_buffer_limits(high=65_536)
        await self._peer.sends(self._head)
        try:
            while self.sent < SIZE:
                await self._peer.sends(self._piece)
                self.sent += len(PIECE)
            await self._peer.sends(self._end)
        except ConnectionError:
            pass

    async def stands_still(self):
        """Until nothing has moved for a while."""
        before = -1
        while self.sent != before:
            before = self.sent
            await asyncio.sleep(0.15)
        return self.sent


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "fixed length"])
async def test_a_client_that_does_not_read_stops_the_worker_and_gets_everything_later(start, deaf_client, http, stream):
    bench = await start()
    sock = await deaf_client(bench, http.post(fields="Connection: close\r\n"))
    peer, _ = await bench.worker.receives()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker = Pouring(peer, http, stream)
    pouring = asyncio.gather(worker.pours())
    assert await worker.stands_still() < KERNEL
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < KERNEL
    (connection,) = bench.gateway._server.connections_open.values()
    assert connection.get_write_buffer_size() < 1024 * 1024
    loop = asyncio.get_running_loop()
    received = 0
    while data := await loop.sock_recv(sock, 1 << 20):
        received += len(data) if not stream else data.count(b"x")
    await pouring
    assert worker.sent == SIZE
    assert SIZE <= received < SIZE + 1024
    await bench.settles()
    assert bench.outcomes == {"completed": 1}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "fixed length"])
async def test_a_client_that_has_not_read_for_too_long_is_let_go_and_the_worker_with_it(
    start, deaf_client, http, stream
):
    bench = await start(timeouts={"between_chunks": 0.4})
    await deaf_client(bench, http.post())
    peer, _ = await bench.worker.receives()
    worker = Pouring(peer, http, stream)
    await worker.pours()  # ends because the gateway closes its side
    assert worker.sent < KERNEL
    await bench.settles()
    assert bench.outcomes == {"client_gone": 1}
    assert bench.error_types == {"client_stalled": 1}
    assert bench.fleet_workers[0].routable
    await http.until(lambda: not bench.gateway._server.connections_open)


async def test_answers_to_pipelined_requests_wait_for_a_client_that_does_not_read(
    start, deaf_client, http, monkeypatch
):
    """Each request costs the client 40 bytes and the gateway an answer of 90 kB: they must not pile up."""
    monkeypatch.setattr(gateway.http.server, "_STALLED", 0.3)
    bench = await start(model={"aliases": [f"{n}-{'x' * 200}" for n in range(300)]})
    await deaf_client(bench, b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n" * 2000)
    await http.until(lambda: bench.gateway._server.connections_open)
    (connection,) = bench.gateway._server.connections_open.values()
    most = 0
    async with asyncio.timeout(10):
        while bench.gateway._server.connections_open:
            most = max(most, connection.get_write_buffer_size())
            await asyncio.sleep(0.02)
    assert most < 1024 * 1024


async def test_a_client_that_does_not_read_its_last_answer_does_not_keep_the_connection(
    start, deaf_client, http, monkeypatch
):
    monkeypatch.setattr(gateway.http.server, "_STALLED", 0.2)
    bench = await start()
    sock = await deaf_client(bench, http.post(fields="Connection: close\r\n"))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer, _ = await bench.worker.receives()
    (connection,) = bench.gateway._server.connections_open.values()
    connection.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    await peer.sends(http.answer(b"x" * 200_000))
    await http.until(lambda: not bench.gateway._server.connections_open)
    await bench.settles()
