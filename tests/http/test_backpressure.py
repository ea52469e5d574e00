"""Clients that read slowly or not at all: the worker is held back, memory stays flat, nobody else waits."""

import asyncio
import socket

import pytest

PIECE = b"data: " + b"x" * 16_000 + b"\n\n"


@pytest.fixture
def slow_client():
    """A client that reads only when told to."""
    socks = []

    async def connect(bench, http, body=None):
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", bench.gateway.port))
        await loop.sock_sendall(sock, http.post(body or {"model": "m", "stream": True}))
        socks.append(sock)
        return sock

    yield connect
    for sock in socks:
        sock.close()


async def sends_until_held_back(worker, pieces):
    """Send pieces until the gateway takes no more; how many went."""
    sent = 0
    for piece in pieces:
        worker.writer.write(piece)
        sent += 1
        try:
            async with asyncio.timeout(0.3):
                await worker.writer.drain()
        except TimeoutError:
            return sent
    return sent


async def reads_to_the_last_chunk(sock):
    """Everything up to the end of a chunked answer. Its chunks may be framed anew, so their sizes tell nothing."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while not data.endswith(b"0\r\n\r\n"):
        piece = await loop.sock_recv(sock, 65536)
        assert piece, f"ended after {len(data)} bytes"
        data += piece
    return bytes(data)


def unsent(bench):
    return bench.gateway._server.unsent()


async def test_a_worker_is_read_no_faster_than_its_client_reads(start, http, slow_client):
    bench = await start()
    async with bench.bystander():
        sock = await slow_client(bench, http)
        worker, _ = await bench.worker.receives()
        await worker.sends(http.SSE_HEAD)
        sent = await sends_until_held_back(worker, [http.chunk(PIECE)] * 2000)
        assert sent < 1500  # of 32 MB; the kernel's own buffers take a few
        # What the gateway holds is a read or two above uvloop's high-water mark.
        assert unsent(bench) < 1_000_000
        worker.writer.write(http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        answer = await reads_to_the_last_chunk(sock)
        assert answer.count(PIECE[:100]) == sent
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await bench.settles()
    assert bench.outcomes == {"completed": 2}


async def test_a_client_that_never_reads_is_given_up_and_its_worker_freed(start, http, slow_client):
    bench = await start(timeouts={"between_chunks": 0.5})
    sock = await slow_client(bench, http)
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD)
    await sends_until_held_back(worker, [http.chunk(PIECE)] * 2000)
    async with asyncio.timeout(3):
        await worker.sees_end()
    await bench.settles()
    assert bench.outcomes == {"client_gone": 1}
    assert bench.error_types == {"client_stalled": 1}
    assert bench.failures() == 0
    # Its connection is gone as well, with everything that it did not read.
    await http.until(lambda: not bench.gateway._server.connections_open, 1)
    sock.close()


async def test_a_worker_that_was_held_back_serves_the_next_request(start, http, slow_client):
    bench = await start()
    sock = await slow_client(bench, http)
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD)
    await sends_until_held_back(worker, [http.chunk(PIECE)] * 2000)
    worker.writer.write(b"0\r\n\r\n")
    await reads_to_the_last_chunk(sock)
    await bench.settles()
    for _ in range(3):
        other = await bench.client()
        await other.sends(http.post())
        await worker.receives()
        await worker.sends(http.answer(b"[]"))
        assert (await other.receives()).body == b"[]"
    assert bench.worker.connections == 1


async def test_a_big_body_goes_up_no_faster_than_the_worker_reads(start, http):
    bench = await start()
    client = await bench.client()
    body = b'{"model":"m","x":"%b"}' % (b"x" * 30_000_000)
    await client.sends(http.post(body))
    worker = await bench.worker.accepts()
    await worker.head()
    request = await worker.reader.readexactly(len(body))
    assert request == body
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200
