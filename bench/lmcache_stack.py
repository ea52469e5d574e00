"""A real LMCache on the CPU for benchmarks: its coordinator, multiprocess servers with one folder as their storage, and vLLM workers that use them.

The engine's folder has a virtual environment (`venv`) with vLLM for the CPU and LMCache, and a small model (`model`).
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import orjson

from bench.processes import listens

CHUNK: Final = 32
"""Tokens in a chunk, and in a block."""
BLOCKS: Final = 140
"""In a worker's device memory."""
START: Final = 900.0
"""Seconds for a worker to start: 30 on an idle machine, ten times that on a busy one."""

_ENVIRONMENT: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Site:
    """One worker with its LMCache server, by their ports on loopback."""

    vllm: int
    events: int
    http: int
    zmq: int

    @property
    def worker(self) -> str:
        """The worker's URL."""
        return f"http://127.0.0.1:{self.vllm}"

    @property
    def hints(self) -> str:
        """The server's."""
        return f"http://127.0.0.1:{self.http}"

    @property
    def instance(self) -> str:
        """What the coordinator calls the server."""
        return f"mp-{self.http}"


@dataclass(slots=True)
class Stack:
    """The processes. A context manager: leaving it stops what was started, and nothing else.

    Attributes:
        engine: see the module.
        work: for logs and the storage's files.
        base: the first of a hundred ports that are free.
        l1_gb: of each server.
    """

    engine: Path
    work: Path
    base: int
    l1_gb: float = 0.002
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[Site, Site]:
        """Both workers."""
        first, second = (
            Site(self.base + 10 + number, self.base + 20 + number, self.base + 40 + number, self.base + 50 + number)
            for number in range(2)
        )
        return first, second

    @property
    def coordinator(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.base}"

    @property
    def model(self) -> str:
        """What LMCache calls the model."""
        return str(self.engine / "model")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._running)):
            self.stop(name)

    def start(self) -> None:
        """Start everything, and wait until it answers.

        Raises:
            RuntimeError: something did not start; the message has the end of its output.
        """
        self.run("coordinator", ["lmcache", "coordinator", "--host", "127.0.0.1", "--port", str(self.base),
                 "--chunk-size", str(CHUNK)], self.base)  # fmt: skip
        for number, site in enumerate(self.sites):
            self.start_server(number)
            self._spawn(f"worker-{number}", self._vllm(site))
        for number, site in enumerate(self.sites):
            self._wait(f"worker-{number}", site.vllm, START)

    def start_server(self, number: int) -> None:
        """One LMCache server."""
        site = self.sites[number]
        storage = {"type": "fs", "base_path": str(self.work / "l2")}
        (self.work / "l2").mkdir(exist_ok=True)
        self.run(f"server-{number}", [
            "lmcache", "server", "--instance-id", site.instance, "--host", "127.0.0.1", "--port", str(site.zmq),
            "--http-port", str(site.http), "--chunk-size", str(CHUNK), "--l1-size-gb", str(self.l1_gb),
            "--eviction-policy", "LRU", "--supported-transfer-mode", "auto", "--coordinator-url", self.coordinator,
            "--coordinator-advertise-ip", "127.0.0.1", "--coordinator-event-reporting",
            "--l2-adapter", orjson.dumps(storage).decode(),
        ], site.http)  # fmt: skip

    def run(self, name: str, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> None:
        """Start a program of the engine's environment, and wait until it listens on `port`."""
        self._spawn(name, command, environment)
        self._wait(name, port, 90.0)

    def kill(self, name: str) -> None:
        """SIGKILL, to all of its processes."""
        self.stop(name, signal.SIGKILL)

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a program that was started here."""
        child = self._running.pop(name, None)
        if child is None:
            return
        for each in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(8)
                # Its children are in its group, and may outlive it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                return

    def _vllm(self, site: Site) -> list[str]:
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": site.zmq,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{site.events}",
            "replay_endpoint": f"tcp://*:{site.events + 10}",
        }
        return [
            "vllm", "serve", self.model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(site.vllm),
            "--max-model-len", "4096", "--enforce-eager", "--dtype", "bfloat16", "--block-size", str(CHUNK),
            "--num-gpu-blocks-override", str(BLOCKS), "--prefix-caching-hash-algo", "sha256_cbor",
            "--enable-prompt-tokens-details",
            "--kv-transfer-config", orjson.dumps(connector).decode(), "--kv-events-config", orjson.dumps(events).decode(),
        ]  # fmt: skip

    def _spawn(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        program = self.engine / "venv" / "bin" / command[0]
        with (self.work / f"{name}.log").open("wb") as output:
            self._running[name] = subprocess.Popen(
                [str(program), *command[1:]],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )

    def _wait(self, name: str, port: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not listens(port):
            if self._running[name].poll() is not None or time.monotonic() > deadline:
                text = (self.work / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} does not listen on {port}: {text[-2000:]}")
            time.sleep(0.2)
