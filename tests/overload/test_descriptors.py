"""Real shortages of file descriptors, in processes of their own with a lowered RLIMIT_NOFILE."""

import asyncio
import contextlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")

LIMIT = 128
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
async def program():
    """`await program(arguments, limit)`: Python with at most so many descriptors; standard error is kept."""
    processes = []

    async def begin(*arguments, limit=LIMIT):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            env=ENVIRONMENT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()


async def lines_until(process, word):
    """Lines of standard error up to the one with `word`."""
    lines = []
    async with asyncio.timeout(20):
        while True:
            line = await process.stderr.readline()
            assert line, lines
            lines.append(line)
            if word in line:
                return lines


async def connected(http, port, count):
    return [http.Peer(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)]


async def get(port, target):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_crowd_beyond_the_descriptors_is_told_so_and_the_gateway_stays_well(program, http, tmp_path):
    worker = http.ScriptedWorker()
    await worker.start()
    config = tmp_path / "config.yaml"
    config.write_bytes(
        orjson.dumps(
            {
                "listen": {"host": "127.0.0.1", "port": 0},
                "admin": {"host": "127.0.0.1", "port": 0},
                "models": [{"name": "m", "workers": [{"url": worker.url, "driver": "openai"}]}],
                "health": {"interval": 0.2},
            }
        )
    )
    served = await program("-m", "gateway", "serve", "--config", str(config))
    said = await lines_until(served, b'"serving"')
    facts = orjson.loads(said[-1])
    port, admin = (int(re.search(r":(\d+)$", facts[name])[1]) for name in ("listen", "admin"))
    while b'"ready":true' not in await get(admin, "/readyz"):  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.05)
    async with worker.answering(http.answer()):
        crowd = await connected(http, port, 300)
        answers = []
        async with asyncio.timeout(20):
            for client in crowd:
                with contextlib.suppress(ConnectionError):  # it may have been told already, and closed
                    await client.sends(http.post())
                answers.append(await client.receives())
        refused = [answer for answer in answers if answer.status != 200]
        assert len(refused) >= 300 - LIMIT, "and every one of them has got an answer"
        assert {answer.status for answer in refused} == {503}
        assert {answer.json["error"]["code"] for answer in refused} == {"gateway_overloaded"}
        assert all(int(answer.get("retry-after")) >= 1 for answer in refused)
        assert b"200 OK" in await get(admin, "/healthz"), "what is kept for others is kept"
        metrics = (await get(admin, "/metrics")).decode()
        assert float(re.search(r"^warmroute_connections_refused_total (\S+)", metrics, re.MULTILINE)[1]) >= 100
        assert 'state="ready"' in metrics
        for client in crowd:
            await client.closes()
        async with asyncio.timeout(15):
            while True:
                (client,) = await connected(http, port, 1)
                await client.sends(http.post())
                status = (await client.receives()).status
                await client.closes()
                if status == 200:
                    break
                await asyncio.sleep(0.1)
    served.terminate()
    rest = (await served.stderr.read()).splitlines()
    about = [line for line in rest if b"new connections are refused" in line]
    assert len(about) == 1, rest
    assert not [line for line in rest if b"Traceback" in line or b"task failed" in line]
    await worker.stop()


ACCEPTING = """
import asyncio, os, resource
import uvloop
from types import SimpleNamespace
from gateway.overload.accept import Acceptor

class Hello(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")

async def main():
    # Nobody has counted: the kernel is the first to say no.
    guard = SimpleNamespace(has_room=lambda: True, turned_away=0)
    acceptor = Acceptor(asyncio.get_running_loop(), Hello, guard)
    await acceptor.start("127.0.0.1", 0, 100)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 9, used + 9))
    print(acceptor.port, flush=True)
    await asyncio.sleep(3600)

uvloop.run(main())
"""


async def test_with_no_descriptor_left_the_spare_one_says_no_in_one_line_and_accepting_goes_on_afterwards(
    program, http
):
    process = await program("-c", ACCEPTING, limit=1024)
    port = int(await process.stdout.readline())
    crowd = await connected(http, port, 40)
    greeted, refused = [], []
    async with asyncio.timeout(20):
        for client in crowd:
            start = await client.reader.readexactly(5)
            (greeted if start == b"hello" else refused).append((client, start))
    assert greeted
    assert len(refused) >= 20
    for client, start in refused:
        rest = await client.sees_end()
        assert (start + rest).startswith(b"HTTP/1.1 503 "), rest
        assert b"gateway_overloaded" in rest
    for client in crowd:
        await client.closes()
    async with asyncio.timeout(10):
        while True:
            (client,) = await connected(http, port, 1)
            start = await client.reader.read(5)
            await client.closes()
            if start == b"hello":
                break
            await asyncio.sleep(0.05)
    process.terminate()
    said = await process.stderr.read() + await process.stdout.read()
    assert said.count(b"no descriptor is left") == 1


@pytest.mark.parametrize(("soft", "hard", "then"), [(200, 900, 900), (900, 900, 900)])
def test_commands_that_run_on_take_the_descriptors_that_the_system_allows(soft, hard, then):
    program = (
        "import asyncio, resource\n"
        "from gateway.cli.running import run\n"
        "async def main(): return 0\n"
        "assert run(main()) == 0\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        check=True,
        timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    assert int(told.stdout) == then
