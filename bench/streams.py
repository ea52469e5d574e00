"""What the gateway adds to each chunk of many concurrent streams.

Workers write stamped chunks at a steady rate; clients read the stamps. The same load once goes straight to the workers and once through the gateway, which has core 0 for
itself. What counts is the difference of the percentiles, and the gateway's CPU and memory.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from bench.overhead import _CONFIG, PORT, WORKERS
from bench.processes import Process, running

_BODY: Final = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
_REQUEST: Final = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_MARK: Final = b"@@"


@dataclass
class Seen:
    """What the clients of one run have seen."""

    delays_ns: list[int] = field(default_factory=list)
    ended: int = 0
    broken: int = 0


class _Client(asyncio.Protocol):
    def __init__(self, seen: Seen, done: asyncio.Future[None]) -> None:
        self._seen = seen
        self._done = done
        self._complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._transport.write(_REQUEST % (len(_BODY), _BODY))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        at = data.find(_MARK)
        while at >= 0:
            end = data.find(b";", at)
            if end > 0:
                self._seen.delays_ns.append(now - int(data[at + 2 : end]))
            at = data.find(_MARK, at + 2)
        if data.endswith(b"0\r\n\r\n"):
            self._complete = True
            self._transport.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._seen.ended += self._complete
        self._seen.broken += not self._complete
        if not self._done.done():
            self._done.set_result(None)


async def _run(ports: tuple[int, ...], streams: int) -> Seen:
    loop = asyncio.get_running_loop()
    seen = Seen()
    ends = []
    for number in range(streams):
        done = loop.create_future()
        ends.append(done)
        await loop.create_connection(lambda done=done: _Client(seen, done), "127.0.0.1", ports[number % len(ports)])  # type: ignore[misc]
        if number % 20 == 19:
            await asyncio.sleep(0.02)
    await asyncio.gather(*ends)
    return seen


def _percentile(sorted_values: list[int], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))] / 1e6


def _report(name: str, seen: Seen) -> float:
    delays = sorted(seen.delays_ns)
    p50, p99, worst = _percentile(delays, 0.5), _percentile(delays, 0.99), delays[-1] / 1e6
    print(
        f"  {name:16} {len(delays)} chunks  p50 {p50:.2f} ms  p99 {p99:.2f} ms  max {worst:.1f} ms  broken {seen.broken}"
    )
    return p99


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0, help="chunks a second of each stream")
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    tokens = int(arguments.rate * arguments.seconds)
    interval = 1 / arguments.rate
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "warmroute.yaml"
        config.write_text(_CONFIG.format(port=PORT, admin=PORT + 1, workers=WORKERS))
        worker = [
            sys.executable,
            "-m",
            "bench.worker",
            *map(str, WORKERS),
            "--tokens",
            str(tokens),
            "--interval",
            str(interval),
        ]
        gateway = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        print(f"{arguments.streams} streams at {arguments.rate:g} chunks/s")
        with running(worker, core=1, port=WORKERS[0], log=folder / "workers.log"):
            direct = _report("direct", uvloop.run(_run(WORKERS, arguments.streams)))
            with running(gateway, core=0, port=PORT, log=folder / "gateway.log") as process:
                time.sleep(1)
                through, cpu, rss = _through_gateway(process, arguments.streams)
    print(f"  added p99 per chunk {through - direct:.2f} ms; gateway CPU {cpu:.2f} s, resident {rss:.0f} MB")


def _through_gateway(process: Process, streams: int) -> tuple[float, float, float]:
    before = process.cpu_seconds()
    peak = 0.0

    async def watched() -> Seen:
        nonlocal peak
        run = asyncio.get_running_loop().create_task(_run((PORT,), streams))
        while not run.done():
            peak = max(peak, await asyncio.to_thread(process.rss_mb))
            await asyncio.wait({run}, timeout=2)
        return run.result()

    seen = uvloop.run(watched())
    return _report("through gateway", seen), process.cpu_seconds() - before, peak


if __name__ == "__main__":
    main()
