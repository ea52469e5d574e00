"""Questions to workers that answer strangely: always an `Answer`, never an exception."""

import asyncio
import socket
import time

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver

from backends.vllm import VLLMDriver
from gateway.fleet.asking import MAX_ANSWER, ask, open_session
from gateway.fleet.worker import Worker


@pytest.fixture
async def raw():
    """A server that sends given bytes to whoever connects, and `stay`s or closes; gives a worker for it."""
    servers = []

    async def serve(data, *, stay=False, reset=False):
        async def answer(reader, writer):
            await reader.read(65536)
            if reset:
                writer.transport.abort()
                return
            writer.write(data)
            if stay:
                await reader.read()  # until the client closes
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        servers.append(server)
        port = server.sockets[0].getsockname()[1]
        return Worker(url=f"http://127.0.0.1:{port}/base", driver=VLLMDriver(), model="m")

    yield serve
    for server in servers:
        server.close()
        await server.wait_closed()


async def asked(worker, seconds=5.0):
    async with open_session() as session:
        return await ask(session, worker, "/health", seconds)


async def test_a_good_answer(raw):
    answer = await asked(await raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"))
    assert (answer.status, answer.body, answer.error) == (200, b"ok", None)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "GET /health: connection closed before an answer"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "GET /health: answer is no valid HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf", "GET /health: answer broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n" + b"x" * 9999999, f"more than {MAX_ANSWER} bytes"),
    ],
    ids=["nothing", "ssh", "half", "endless"],
)
async def test_a_bad_answer_is_told_in_words(raw, data, error):
    answer = await asked(await raw(data))
    assert error in answer.error
    assert not answer.timed_out


async def test_a_reset_connection(raw):
    assert (await asked(await raw(b"", reset=True))).error == "GET /health: connection closed before an answer"


async def test_a_head_without_its_body_times_out(raw):
    answer = await asked(await raw(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf", stay=True), 0.2)
    assert answer.error == "GET /health not answered within 0.2 s"
    assert answer.timed_out
    assert not answer.our_fault


class NoNames(AbstractResolver):
    """A resolver that knows no name, as a DNS server would say it."""

    async def resolve(self, host, port=0, family=socket.AF_INET):
        raise OSError(None, "Domain name not found")

    async def close(self):
        pass


async def test_a_name_that_does_not_exist():
    worker = Worker(url="http://nobody.example:1", driver=VLLMDriver(), model="m")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=NoNames())) as session:
        answer = await ask(session, worker, "/health", 5.0)
    assert answer.error == "GET /health: name not known"


async def test_plain_http_where_tls_was_expected(raw):
    worker = await raw(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    worker.url = worker.url.replace("http:", "https:")
    assert (await asked(worker)).error == "GET /health: TLS failed"


async def test_a_deadline_missed_because_our_own_loop_stood_still_is_our_fault(raw):
    worker = await raw(b"", stay=True)
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, time.sleep, 0.5)
    answer = await asked(worker, 0.1)
    assert answer.timed_out
    assert answer.our_fault
