"""Short forms of the long runs: many clients that leave, a worker that is killed; afterwards nothing is left over."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from gateway.tasks import TaskGroup

ROOT = Path(__file__).parents[2]


def bench_of(name, *arguments):
    """Run a benchmark; its output and exit status."""
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory and descriptors are read from /proc")
def test_nothing_is_left_of_thousands_of_requests_whose_clients_leave():
    said, status = bench_of("soak", "--requests", "4000", "--leave", "0.3")
    assert status == 0, said
    assert "nothing is left over" in said
    assert "RSS of the gateway in the second half" in said


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the worker's processes are found in /proc")
def test_only_what_a_killed_worker_was_serving_fails():
    said, status = bench_of("kill_one", "--clients", "60", "--seconds", "1")
    assert status == 0, said


class Worker(asyncio.Protocol):
    """Answers after a moment: with a stream of three events, or at once."""

    def __init__(self, rng):
        self._rng = rng
        self._data = b""

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            self._data = b""
        elif found and len(body) == int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            self._data = b""
            asyncio.get_running_loop().call_later(self._rng.uniform(0, 0.01), self._answer, b'"stream":true' in body, 3)

    def _answer(self, stream, left):
        if self._transport.is_closing():
            return
        if not stream:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return
        if left == 3:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        self._transport.write(b"9\r\ndata: 1\n\n\r\n" if left else b"0\r\n\r\n")
        if left:
            asyncio.get_running_loop().call_later(0.003, self._answer, stream, left - 1)


async def test_clients_that_leave_at_every_moment_leave_no_task_span_or_socket(start, http, tmp_path):
    rng = random.Random(11)
    loop = asyncio.get_running_loop()
    async with (
        await loop.create_server(lambda: Worker(rng), "127.0.0.1", 0) as one,
        await loop.create_server(lambda: Worker(rng), "127.0.0.1", 0) as two,
    ):
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (one, two)]
        spans = tmp_path / "spans.jsonl"
        bench = await start(
            workers=0,
            model={"workers": [{"url": url, "driver": "vllm"} for url in urls]},
            telemetry={"traces": {"exporter": "file", "file": str(spans), "sample": 1.0}},
        )
        fixed = asyncio.all_tasks()
        requests = 1200

        async def client():
            peer = None
            for _ in range(requests // 24):
                peer = peer or await bench.client()
                body = {"model": "m", "stream": rng.random() < 0.5, "x": "x" * rng.randrange(3000)}
                raw = http.post(body)
                moment = rng.choice(("uploading", "waiting", "reading", "", "", "", "", "", "", ""))
                if moment == "uploading":
                    raw = raw[: rng.randrange(60, len(raw))]
                await peer.sends(raw)
                if moment:
                    if moment == "reading":
                        await peer.head()
                    await asyncio.sleep(rng.choice((0, 0.001, 0.008)))
                    await (peer.resets() if rng.random() < 0.5 else peer.closes())
                    peer = None
                else:
                    response = await peer.receives()
                    assert response.status == 200
                    assert response.body in {b"{}", b"data: 1\n\n" * 3}

        tasks = TaskGroup("clients")
        await asyncio.gather(*(tasks.spawn("client", client()) for _ in range(24)))
        for peer in bench.clients:
            await peer.closes()
        await bench.settles()
        await http.until(lambda: not bench.gateway._server.connections_open)
        assert bench.outcomes.keys() == {"completed", "client_gone"}
        assert bench.gateway._tracing.open == 0
        assert {task.get_name() for task in asyncio.all_tasks() - fixed} == set()
        assert len(bench.gateway.proxy.hedging) == 0
        bench.obeys_conservation()
        accepted = bench.gateway.metrics.accepted
        await bench.gateway.stop(1)
        exported = [orjson.loads(line) for line in spans.read_bytes().splitlines()]
        made = [s for line in exported for r in line["resourceSpans"] for g in r["scopeSpans"] for s in g["spans"]]
        assert sum(span["kind"] == 2 for span in made) == accepted
        attempts = sum(span["kind"] == 3 and span["name"] == "POST" for span in made)
        assert attempts == sum(bench.attempts.values())
        assert len(bench.gateway.decisions.recent(10_000)) == accepted
        assert bench.gateway.decisions.running() == []
