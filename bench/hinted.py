"""What residency costs a whole gateway: CPU per request of a conversation without it, with rules that nobody can say, and with hints inside.

The gateways are measured in turn, each several times, on one core with `wrk` and the workers on the other: ``python -m bench.hinted --tokenizer DIR``.
What counts is the ratio within one run; it is to stay below 1.1. All gateways tokenize, look prompts up and decide by ttft over eight workers.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench.overhead import CONNECTIONS, MANY_WORKERS, PORT, Proxy, measure
from bench.processes import running

LOAD: Final = "talks"
_CONFIG: Final = """\
listen: {{host: 127.0.0.1, port: {port}}}
admin: {{host: 127.0.0.1, port: {admin}}}
{residency}
models:
  - name: m
    policy: ttft
    tokenizer: {tokenizer}
    workers:
{workers}
"""
_WORKER: Final = '      - {{url: "http://127.0.0.1:{port}", driver: openai, hints: {{driver: {hints}}}, capabilities: {{block_size: 16}}}}'
_KINDS: Final = {
    "off": ("", "none"),
    "nobody takes hints": ("residency: {}", "none"),
    "on": ("residency: {rules: {retain: true}}", "kv-hints"),
}
"""Name to the section `residency` and the workers' hint driver."""


def gateways(folder: Path, tokenizer: Path) -> list[Proxy]:
    """One per kind."""
    found = []
    for number, (name, (residency, hints)) in enumerate(_KINDS.items()):
        workers = "\n".join(_WORKER.format(port=port, hints=hints) for port in MANY_WORKERS)
        path = folder / f"{number}.yaml"
        path.write_text(
            _CONFIG.format(port=PORT, admin=PORT + 1, residency=residency, tokenizer=tokenizer, workers=workers)
        )
        found.append(Proxy(name, (sys.executable, "-m", "gateway", "serve", "--config", str(path))))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.hinted", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("simulator/data"), help="default: the simulator's")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="of all gateways in turn (default: 5)")
    arguments = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    CONNECTIONS.setdefault(LOAD, CONNECTIONS["chat"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = gateways(folder, arguments.tokenizer.resolve())
        costs: dict[str, list[float]] = {gateway.name: [] for gateway in found}
        workers = [sys.executable, "-m", "bench.worker", *map(str, MANY_WORKERS)]
        with running(workers, core=1, port=MANY_WORKERS[0], log=folder / "workers.log"):
            for _ in range(arguments.rounds):
                for gateway in found:
                    cell = measure(gateway, LOAD, arguments.seconds, folder)
                    if cell.errors:
                        raise RuntimeError(f"{gateway.name}: {cell.errors}")
                    costs[gateway.name].append(cell.cpu_us)
    for kind, cells in costs.items():
        ratio = statistics.median(cost / base for cost, base in zip(cells, costs["off"], strict=True))
        print(f"residency {kind:20} {statistics.median(cells):7.1f} us  {ratio:5.2f}")


if __name__ == "__main__":
    main()
