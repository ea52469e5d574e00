"""What admission costs a whole gateway: CPU per small request without it, with keys, a stage and a gate, and of a refusal.

The gateways are measured in turn, each several times, on one core with `wrk` and the workers on the other: ``python -m bench.admitted``. What counts is
the ratio within one run. For the refusals the only worker has one slot, which somebody holds, and no line.
"""

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from bench.overhead import HERE, PORT, WORKERS
from bench.processes import running
from gateway.admission.keys import hashed, new_key

_HEAD: Final = """\
listen: {{host: 127.0.0.1, port: {port}}}
admin: {{host: 127.0.0.1, port: {admin}}}
overload: {{lag: 0}}
models:
  - name: m
    policy: leastload
"""
_WORKERS: Final = """\
    workers:
      - {{url: "http://127.0.0.1:{workers[0]}", driver: openai, capabilities: {{slots: 256}}}}
      - {{url: "http://127.0.0.1:{workers[1]}", driver: openai, capabilities: {{slots: 256}}}}
"""
_GATE: Final = """\
    admission: {{}}
stages: {{chat: {{deadline: 10s, match: {{models: [m]}}}}}}
"""
_KEYS: Final = """\
tenants: {{shop: {{keys: ["{hash}"]}}}}
"""
_FULL: Final = """\
    workers:
      - {{url: "http://127.0.0.1:{held}", driver: openai, limits: {{max_concurrent: 1, max_queue: 0}}}}
"""
_CONNECTIONS: Final = 32
REFUSED: Final = "refused"
CONFIGS: Final = {
    "off": _HEAD + _WORKERS,
    "keys": _HEAD + _WORKERS + _KEYS,
    "gate": _HEAD + _WORKERS + _GATE,
    "both": _HEAD + _WORKERS + _GATE + _KEYS,
    REFUSED: _HEAD + _FULL,
}
"""The configurations that are compared, to be formatted with `values_of`."""


def values_of(key: str, held: int) -> dict[str, Any]:
    """What stands in the configurations for a key and the port of `Held`."""
    return {"port": PORT, "admin": PORT + 1, "workers": WORKERS, "hash": hashed(key), "held": held}


class Held(BaseHTTPRequestHandler):
    """A worker that is well and never answers a request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Health."""
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Hold the slot."""
        time.sleep(3600)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def measure(config: Path, script: Path, seconds: float, *, hold: bool) -> float:
    """CPU microseconds of a request. With `hold`, a first one takes the slot and all that are counted must be refused."""
    command = (sys.executable, "-m", "gateway", "serve", "--config", str(config))
    url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    wrk = ["taskset", "-c", "1", "wrk", "-t1", f"-c{_CONNECTIONS}", "-s", str(script)]
    with ExitStack() as stack:
        process = stack.enter_context(running(command, core=0, port=PORT, log=config.with_suffix(".log")))
        time.sleep(1.0)
        if hold:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", PORT)))
            body = b'{"model":"m","messages":[]}'
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            time.sleep(0.2)
        subprocess.run([*wrk, "-d1s", url], check=True, capture_output=True)
        before = process.cpu_seconds()
        output = subprocess.run([*wrk, f"-d{seconds:g}s", url], check=True, capture_output=True, text=True).stdout
        spent = process.cpu_seconds() - before
    requests = int(re.search(r"(\d+) requests in", output)[1])  # type: ignore[index]  # wrk says so always
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    refused = int(bad[1]) if bad else 0
    if refused != (requests if hold else 0):
        raise RuntimeError(f"{refused} of {requests} requests were refused")
    return spent * 1e6 / requests


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.admitted", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="of all gateways in turn (default: 5)")
    arguments = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Held)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    key = new_key()
    values = values_of(key, server.server_port)
    costs: dict[str, list[float]] = {kind: [] for kind in CONFIGS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "small.lua"
        small = (HERE / "lua" / "small.lua").read_text()
        # All send the key, so that all read as many bytes.
        script.write_text(f'{small}wrk.headers["Authorization"] = "Bearer {key}"\n')
        for kind, text in CONFIGS.items():
            (folder / f"{kind}.yaml").write_text(text.format(**values))
        workers = [sys.executable, "-m", "bench.worker", *map(str, WORKERS)]
        with running(workers, core=1, port=WORKERS[0], log=folder / "workers.log"):
            for _ in range(arguments.rounds):
                for kind, cells in costs.items():
                    config = folder / f"{kind}.yaml"
                    cells.append(measure(config, script, arguments.seconds, hold=kind == REFUSED))
    for kind, cells in costs.items():
        ratio = statistics.median(cost / base for cost, base in zip(cells, costs["off"], strict=True))
        print(f"admission {kind:8} {statistics.median(cells):7.1f} us  {ratio:5.2f}")
    server.shutdown()


if __name__ == "__main__":
    main()
