"""What admission costs in instructions of a request: ``python -m bench.instructions``, the gateways of `bench.admitted` under valgrind's callgrind.

Time on a machine that does other things as well is noise; the number of instructions that a gateway's process executes (its own, without the
kernel's) is not: two runs differ by less than a percent. It says nothing of caches and system calls, so the ratios of `bench.admitted` stay the
ones that count.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Final, Self

from bench.admitted import CONFIGS, REFUSED, Held, values_of
from bench.clients import until_ready
from bench.overhead import WORKERS
from bench.processes import listens, running
from gateway.admission.keys import new_key

_CLIENTS: Final = 16
_WARM: Final = 400
_START: Final = 300.0
_IDLE: Final = 10.0
_DUMP: Final = 60.0


def request_of(key: str) -> bytes:
    """What `bench/lua/small.lua` sends, with a key."""
    body = b'{"model":"m","messages":[{"role":"user","content":"Say hello."}],"max_tokens":16}'
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(port: int, request: bytes, count: int, *, status: bytes) -> None:
    """Send so many, over a few connections.

    Raises:
        RuntimeError: an answer has another status.
    """
    left = iter(range(count))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if head[9:12] != status:
                raise RuntimeError(head.decode())
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))


def counted(config: Path, port: int, request: bytes, count: int, *, hold: bool, keep: Path | None) -> float:
    """Instructions of a request."""
    out = config.with_suffix(".callgrind")
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"),
        *(sys.executable, "-m", "gateway", "serve", "--config", str(config)),
    ]
    with config.with_suffix(".log").open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START
        while not listens(port):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(config.with_suffix(".log").read_text(errors="replace")[-2000:])
            time.sleep(0.5)
        asyncio.run(until_ready(port + 1, 1, _START))
        with ExitStack() as stack:
            if hold:
                loop = asyncio.new_event_loop()
                stack.callback(loop.close)
                _, writer = loop.run_until_complete(asyncio.open_connection("127.0.0.1", port))
                writer.write(request)
                loop.run_until_complete(asyncio.sleep(2.0))
            status = b"429" if hold else b"200"
            asyncio.run(load(port, request, _WARM, status=status))
            with _Counting(child.pid, out) as idle:
                time.sleep(_IDLE)
            with _Counting(child.pid, out) as busy:
                asyncio.run(load(port, request, count, status=status))
    finally:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
        child.kill()
        child.wait()
    if keep is not None:
        for part in config.parent.glob(f"{out.name}*"):
            (keep / part.name).write_text(part.read_text(errors="replace"))
    # Timers go on meanwhile, and on a slow machine there are more of them.
    return (busy.instructions - idle.instructions / idle.seconds * busy.seconds) / count


class _Counting:
    """Counts the instructions of a block.

    Attributes:
        instructions, seconds: of it, once it has ended.
    """

    def __init__(self, pid: int, out: Path) -> None:
        self._pid = str(pid)
        self._out = out
        self.instructions = 0
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._control("-z")
        self._control("-i", "on")
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
        self._control("-i", "off")
        before = set(self._out.parent.glob(f"{self._out.name}.*"))
        self._control("-d")
        deadline = time.monotonic() + _DUMP
        while time.monotonic() < deadline:  # it is written by the process itself, when that comes to it
            for part in set(self._out.parent.glob(f"{self._out.name}.*")) - before:
                if found := re.search(r"^totals: (\d+)", part.read_text(errors="replace"), re.MULTILINE):
                    self.instructions = int(found[1])
                    return
            time.sleep(0.2)
        raise RuntimeError("callgrind wrote no counts")

    def _control(self, *arguments: str) -> None:
        subprocess.run(["callgrind_control", *arguments, self._pid], check=True, capture_output=True)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of each gateway (default: 400)")
    parser.add_argument("--only", nargs="*", choices=CONFIGS, help="of these alone")
    parser.add_argument("--keep", type=Path, help="folder for callgrind's files")
    arguments = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Held)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    key = new_key()
    values = values_of(key, server.server_port)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        workers = [sys.executable, "-m", "bench.worker", *map(str, WORKERS)]
        stack.enter_context(running(workers, core=1, port=WORKERS[0], log=Path(name) / "workers.log"))
        base = 0.0
        for kind in arguments.only or CONFIGS:
            config = Path(name) / f"{kind}.yaml"
            config.write_text(CONFIGS[kind].format(**values))
            cost = counted(
                config, values["port"], request_of(key), arguments.requests, hold=kind == REFUSED, keep=arguments.keep
            )
            base = base or cost
            print(f"admission {kind:8} {cost / 1000:8.1f} k instructions  {cost / base:5.3f}", flush=True)
    server.shutdown()


if __name__ == "__main__":
    main()
