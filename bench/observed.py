"""What telemetry costs a whole gateway: CPU per request with all of it off, as it is by default, and with traces besides.

The gateways are measured in turn, each several times, on one core with `wrk` and the workers on the other: ``python -m bench.observed``. What counts is
the ratio within one run. Traces go to a collector that takes everything and looks at nothing.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from bench.overhead import _CONFIG, MANY_WORKERS, PORT, TOKENS, WORKERS, Proxy, measure
from bench.processes import running

_OFF: Final = "telemetry: {decisions: {count: 0}}\n"
_TRACED: Final = """\
telemetry:
  traces: {{exporter: otlp, endpoint: "http://127.0.0.1:{port}/v1/traces", sample: {sample}}}
"""


class Collector(BaseHTTPRequestHandler):
    """Takes everything."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read a batch and say thanks."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def gateways(folder: Path, collector: int, policy: str) -> list[Proxy]:
    """One per kind of telemetry."""
    values = {"port": PORT, "admin": PORT + 1, "workers": WORKERS, "folder": folder}
    base = _CONFIG.format(**values).replace("leastload", policy)
    kinds = {"off": _OFF, "default": ""}
    kinds |= {f"traces {share:.0%}": _TRACED.format(port=collector, sample=share) for share in (0.0, 0.1, 1.0)}
    found = []
    for name, more in kinds.items():
        path = folder / f"{name.replace(' ', '-').rstrip('%')}.yaml"
        path.write_text(base + more)
        found.append(Proxy(name, (sys.executable, "-m", "gateway", "serve", "--config", str(path))))
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.observed", description=__doc__)
    parser.add_argument("--loads", default="small", help="small, chat, stream, long (default: small)")
    parser.add_argument("--seconds", type=int, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="of all gateways in turn (default: 5)")
    parser.add_argument("--policy", default="leastload", help="default: leastload, the cheapest one")
    arguments = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = gateways(folder, server.server_port, arguments.policy)
        workers = [sys.executable, "-m", "bench.worker", *map(str, MANY_WORKERS), "--tokens", str(TOKENS)]
        with running(workers, core=1, port=WORKERS[0], log=folder / "workers.log"):
            for load in arguments.loads.split(","):
                cells: dict[str, list[float]] = {gateway.name: [] for gateway in found}
                for _ in range(arguments.rounds):
                    for gateway in found:
                        cell = measure(gateway, load, arguments.seconds, folder)
                        cells[gateway.name].append(cell.cpu_us)
                off = cells["off"]
                for kind, costs in cells.items():
                    ratio = statistics.median(cost / base for cost, base in zip(costs, off, strict=True))
                    print(f"{load:7} telemetry {kind:12} {statistics.median(costs):7.1f} us  {ratio:5.2f}", flush=True)
    server.shutdown()


if __name__ == "__main__":
    main()
