"""`warmroute serve` as a process: signals, exit status, reloads, and what it says on standard error."""

import asyncio
import contextlib
import json
import resource
import signal
import sys
from pathlib import Path

import orjson
import pytest


class Served:
    """A gateway in a process of its own; its log lines are read as they come."""

    def __init__(self, process, path):
        self.process = process
        self.path = path
        self.lines = []
        self.port = self.admin_port = 0

    async def says(self, event):
        """The next log line with this event."""
        async with asyncio.timeout(10):
            while True:
                line = await self.process.stderr.readline()
                assert line, f"{event!r} was not said: {self.lines}"
                self.lines.append(line.decode())
                if line.startswith(b"{") and (parsed := json.loads(line))["event"] == event:
                    return parsed

    async def serving(self):
        said = await self.says("serving")
        self.port = int(said["listen"].rpartition(":")[2])
        self.admin_port = int(said["admin"].rpartition(":")[2])
        return self

    async def admin(self, path):
        """Status and body of an answer of the admin listener."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.admin_port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        raw = await reader.read()
        writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    async def is_ready(self):
        async with asyncio.timeout(10):
            while True:
                if (await self.admin("/readyz"))[0] == 200:
                    return self
                await asyncio.sleep(0.02)

    async def readyz(self):
        return orjson.loads((await self.admin("/readyz"))[1])

    async def counts(self, name):
        """Samples of a metric by their labels."""
        lines = (await self.admin("/metrics"))[1].decode().splitlines()
        return {
            line.split(" ")[0].removeprefix(name): float(line.split(" ")[1]) for line in lines if line.startswith(name)
        }

    async def first_free_descriptor(self):
        """The lowest number that is not taken for good: a limit there leaves no room at all."""
        seen = []
        for _ in range(3):
            seen.append(descriptors(self.process.pid))
            await asyncio.sleep(0.03)  # a health check in between would look like a descriptor that stays
        lasting = set.intersection(*seen)
        return next(number for number in range(len(lasting) + 1) if number not in lasting)

    def write(self, config):
        self.path.write_bytes(orjson.dumps(config))

    async def ends(self, seconds=10):
        async with asyncio.timeout(seconds):
            return await self.process.wait()


@pytest.fixture
async def serve(tmp_path):
    """`await serve(config)`: `warmroute serve` with that file, whatever becomes of it."""
    processes = []

    async def begin(config, *, raw=None):
        path = tmp_path / f"config-{len(processes)}.yaml"
        path.write_bytes(raw if raw is not None else orjson.dumps(config))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway",
            "serve",
            "--config",
            str(path),
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        processes.append(process)
        return Served(process, path)

    yield begin
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()


@pytest.fixture
async def worker(http):
    scripted = http.ScriptedWorker()
    await scripted.start()
    yield scripted
    await scripted.stop()


def config_of(*workers, **sections):
    urls = [{"url": worker.url, "driver": "vllm"} for worker in workers]
    return {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"host": "127.0.0.1", "port": 0},
        "models": [{"name": "m", "workers": urls}],
        "health": {"interval": 0.2},
    } | sections


def descriptors(pid):
    return {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}


async def client_of(http, served):
    return http.Peer(*await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 22))


async def serves_again(http, served):
    """A request on a new connection is answered, perhaps after some that are refused while the guard makes sure that the shortage is over."""
    while True:
        client = await client_of(http, served)
        await client.sends(http.post())
        response = await client.receives()
        await client.closes()
        if response.status == 200:
            return
        assert response.json["error"]["code"] == "gateway_overloaded"
        await asyncio.sleep(0.1)


async def stream(http, client, worker):
    """A stream that has begun; the worker's side of it."""
    await client.sends(http.post({"model": "m", "stream": True}))
    peer, _ = await worker.receives()
    await peer.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n"))
    await client.head()
    await client.chunk()
    return peer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_running_stream_finish_and_exits_0(http, serve, worker, number):
    served = await (await (await serve(config_of(worker))).serving()).is_ready()
    client = await client_of(http, served)
    peer = await stream(http, client, worker)
    served.process.send_signal(number)
    await served.says("stopping")
    assert (await served.admin("/readyz"))[0] == 503
    assert (await served.admin("/healthz"))[0] == 200
    await peer.sends(http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert await client.chunked_body() == b"data: [DONE]\n\n"
    assert await served.ends() == 0
    assert served.process.returncode == 0
    await client.closes()


async def test_a_stream_beyond_the_grace_period_is_told_and_the_exit_is_0(http, serve, worker):
    served = await (await (await serve(config_of(worker, grace=0.3))).serving()).is_ready()
    client = await client_of(http, served)
    await stream(http, client, worker)
    served.process.terminate()
    assert b'"gateway_stopping"' in await client.chunked_body()
    assert await served.ends() == 0
    await client.closes()


async def test_a_second_signal_ends_it_at_once(http, serve, worker):
    served = await (await (await serve(config_of(worker, grace=60))).serving()).is_ready()
    client = await client_of(http, served)
    await stream(http, client, worker)
    served.process.terminate()
    await served.says("stopping")
    served.process.terminate()
    assert await served.ends(2) == -signal.SIGTERM
    await client.closes()


async def test_a_port_in_use_is_said_and_exits_1(serve, worker):
    for section in ("listen", "admin"):
        served = await serve(config_of(worker) | {section: {"host": "127.0.0.1", "port": worker.port}})
        assert await served.ends() == 1
        said = (await served.process.stderr.read()).decode()
        assert said.startswith("warmroute: can't listen: ")
        assert str(worker.port) in said
        assert "Traceback" not in said


async def test_a_bad_configuration_is_told_with_its_place_and_exits_2(serve):
    served = await serve(None, raw=b"models:\n  - name: m\n    wrkers: []\n")
    assert await served.ends() == 2
    said = (await served.process.stderr.read()).decode()
    assert f"{served.path}:3:5" in said
    assert "workers" in said
    assert "Traceback" not in said


async def test_a_file_that_is_not_there_exits_2(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        "serve",
        "--config",
        str(tmp_path / "none.yaml"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"none.yaml" in said
    assert b"Traceback" not in said


@pytest.mark.parametrize("how", ["SIGHUP", "the file alone"])
async def test_a_reload_adds_a_model_and_requests_on_a_removed_worker_finish(http, serve, worker, how):
    other = http.ScriptedWorker()
    await other.start()
    config = config_of(worker)
    served = await (await (await serve(config)).serving()).is_ready()
    client = await client_of(http, served)
    peer = await stream(http, client, worker)
    config["models"] = [{"name": "n", "aliases": ["m"], "workers": [{"url": other.url, "driver": "vllm"}]}]
    served.write(config)
    if how == "SIGHUP":
        served.process.send_signal(signal.SIGHUP)
    await served.says("configuration reloaded")
    await served.is_ready()
    # New requests follow the new file; the stream that began under the old one goes on.
    second = await client_of(http, served)
    await second.sends(http.post({"model": "n"}))
    fresh, request = await other.receives()
    assert request.json == {"model": "n"}
    await fresh.sends(http.answer())
    assert (await second.receives()).status == 200
    await peer.sends(http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert await client.chunked_body() == b"data: [DONE]\n\n"
    report = await served.readyz()
    assert report["fleets"] == {"n": {"ready": 1, "total": 1}}
    assert report["reload"]["ok"]
    served.process.terminate()
    assert await served.ends() == 0
    await client.closes()
    await second.closes()
    await other.stop()


async def test_a_bad_file_leaves_the_old_configuration_and_says_so_until_it_is_mended(http, serve, worker):
    config = config_of(worker)
    served = await (await (await serve(config)).serving()).is_ready()
    served.path.write_bytes(b"models: [")
    served.process.send_signal(signal.SIGHUP)
    said = await served.says("the configuration has mistakes; the old one stays")
    assert said["problems"].startswith(f"{served.path}:")
    report = await served.readyz()
    assert report["ready"]
    assert not report["reload"]["ok"]
    assert "the configuration file has an error; the previous one is in use" in report["degraded"]
    assert (await served.counts("warmroute_config_reloads_total"))['{result="failed"}'] >= 1
    client = await client_of(http, served)
    await client.sends(http.post())
    peer, _ = await worker.receives()
    await peer.sends(http.answer())
    assert (await client.receives()).status == 200
    served.write(config | {"grace": 5, "listen": {"host": "127.0.0.1", "port": 1}})
    served.process.send_signal(signal.SIGHUP)
    await served.says("configuration reloaded")
    report = await served.readyz()
    assert report["reload"]["ok"]
    # What a reload can't give is not forgotten.
    assert [line for line in report["degraded"] if line.startswith("listen stays at 127.0.0.1:")]
    assert (await served.counts("warmroute_config_reloads_total"))['{result="ok"}'] == 1
    await client.closes()


async def test_a_reload_changes_the_level_and_form_of_the_log_lines(serve, worker):
    config = config_of(worker)
    served = await (await (await serve(config)).serving()).is_ready()
    served.write(config | {"telemetry": {"logs": {"level": "info", "format": "console"}}})
    served.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(5):
        while True:
            line = (await served.process.stderr.readline()).decode()
            if "configuration reloaded" in line:
                break
    assert not line.startswith("{")
    served.process.terminate()
    assert await served.ends() == 0
    assert b"stopped" in await served.process.stderr.read()


async def test_running_out_of_descriptors_ejects_no_worker_and_ends_with_the_shortage(http, serve, worker):
    served = await (await (await serve(config_of(worker))).serving()).is_ready()
    limit = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
    crowd = [await client_of(http, served) for _ in range(5)]
    used = await served.first_free_descriptor()
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (used, limit[1]))
    for client in crowd:
        await client.sends(http.post())
        response = await client.receives()
        assert (response.status, int(response.get("retry-after")) > 0) == (503, True)
        # Until the guard has looked it is the attempt that fails, from then on nothing is attempted.
        assert response.json["error"]["code"] in {"gateway_exhausted", "gateway_overloaded"}
    await asyncio.sleep(1)  # five health checks, none of which could be made
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, limit)
    samples = await served.counts("warmroute_worker_state")
    assert samples[f'{{model="m",state="ready",worker="127.0.0.1:{worker.port}"}}'] == 1
    async with worker.answering(http.answer()), asyncio.timeout(5):
        await serves_again(http, served)
    for client in crowd:
        await client.closes()


async def test_after_a_crowd_beyond_the_descriptors_clients_are_served_again(http, serve, worker):
    served = await (await (await serve(config_of(worker))).serving()).is_ready()
    limit = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
    used = await served.first_free_descriptor()
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (used + 5, limit[1]))
    crowd = [await client_of(http, served) for _ in range(30)]
    await asyncio.sleep(0.3)
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, limit)
    for client in crowd:
        client.writer.transport.abort()
    async with worker.answering(http.answer()), asyncio.timeout(5):
        await serves_again(http, served)
