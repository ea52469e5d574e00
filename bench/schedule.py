"""Faults on a schedule, for `bench.soak`.

Simulated workers are processes that are killed, stopped, slowed down, cut off and lose events, and the gateway's configuration changes meanwhile. Each
fault says which errors it may cause; all others are nobody's doing.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

import orjson

from bench.processes import listens

_BROKEN_OFF: Final = frozenset({"upstream_reset", "upstream_reset_midstream", "cut short"})
TOO_LATE: Final = frozenset({"upstream_timeout_first_byte", "upstream_timeout_idle", "upstream_timeout_total"})
CAUSES: Final = {
    "kill": _BROKEN_OFF,
    "hang": TOO_LATE,
    "reset": _BROKEN_OFF,
    "slow": frozenset[str](),
    "events": frozenset[str](),
    "reload": frozenset[str](),
    "badfile": frozenset[str](),
}
"""The errors that each fault may cause, of requests at the worker that it hits. Slow workers, lost events and files of any kind cost no request anything."""
_NOBODY: Final = frozenset({"reload", "badfile"})
"""Faults that hit no worker."""
TIME_LIMIT: Final = 5.0
"""Seconds of the gateway's time limits in this run: a worker that hangs longer is told of."""
SLACK: Final = TIME_LIMIT + 3.0
"""Seconds after a fault in which what it did may still show."""
_LASTING: Final = {"hang": TIME_LIMIT + 2.0, "kill": 2.0}
_START: Final = 90.0
"""Seconds that a worker may take to start: on a busy machine imports alone take many."""


class SimulatedWorker:
    """``warmroute simulate-worker`` as a process that can be killed and started again on the same ports."""

    def __init__(self, ports: tuple[int, int, int], log: Path, core: int) -> None:
        """`ports`: HTTP, events, replay."""
        self.port = ports[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = [
            *("taskset", "-c", str(core), sys.executable, "-m", "gateway", "simulate-worker", "--model", "m"),
            *("--profile", "h100-8b", "--speed", "20", "--port", str(self.port)),
            *("--kv-events", f"tcp://127.0.0.1:{ports[1]}", "--kv-events-replay", f"tcp://127.0.0.1:{ports[2]}"),
        ]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to run; `ready` waits for it."""
        with self._log.open("ab") as output:
            self._child = subprocess.Popen(self._command, stdout=output, stderr=output)

    async def ready(self) -> None:
        """Wait until it listens.

        Raises:
            RuntimeError: it does not.
        """
        deadline = time.monotonic() + _START
        while not listens(self.port):
            status = self._child.poll() if self._child is not None else None
            if status is not None or time.monotonic() > deadline:
                said = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"a worker does not start (status {status}): {said}")
            await asyncio.sleep(0.1)

    def signal(self, number: int) -> None:
        """Send a signal to its process."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait(5)

    async def fails(self, **faults: object) -> None:
        """Set its faults anew: those of `simulator.server.Faults`; none: all are over."""
        body = orjson.dumps({"clear": True, **faults})
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            b"POST /simulator/faults HTTP/1.1\r\nHost: w\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = await reader.read()
        writer.close()
        if b" 200 " not in answer[:20]:
            raise RuntimeError(f"the simulated worker does not take its faults: {answer[-300:]!r}")


@dataclass
class Happening:
    """One fault, from when it began to when it was over, on the clock of `time.monotonic`, and the worker that it hit (a URL; empty: none)."""

    kind: str
    worker: str
    began: float
    ended: float = float("inf")

    def explains(self, failure: "Failure") -> bool:
        """Whether that may be its doing."""
        return (
            failure.error in CAUSES[self.kind]
            and failure.worker == self.worker
            and self.began <= failure.when <= self.ended + SLACK
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed, as the gateway logs it.

    Attributes:
        when: it ended, on the clock of `time.monotonic`.
        error: its `error_type`.
        worker: URL of the one that it was at last; empty: none.
        seconds: from its head to its end.
    """

    when: float
    error: str
    worker: str
    seconds: float


def failures_in(log: str, offset: float) -> list[Failure]:
    """Those of a gateway's log. `offset`: seconds from the clock of `time.monotonic` to that of the log."""
    found = []
    for line in log.splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):
            entry = orjson.loads(line)
            if entry.get("event") == "request" and entry.get("outcome") == "failed":
                when = datetime.fromisoformat(entry["time"]).timestamp() - offset
                worker = f"http://{entry['worker']}" if entry.get("worker") else ""
                found.append(Failure(when, entry["error_type"], worker, entry["duration_ms"] / 1000))
    return found


@dataclass
class Schedule:
    """Makes one fault after the other happen, each kind once before any comes again, to a random worker.

    Attributes:
        kinds: which.
        workers: whom they may hit.
        config: the gateway's file and what may stand in it, one after the other.
        pause: seconds between two faults, and how long one lasts if nothing else is said.
        happened: what was done so far.
    """

    kinds: list[str]
    workers: list[SimulatedWorker]
    config: tuple[Path, list[bytes]]
    rng: random.Random
    pause: float = 3.0
    happened: list[Happening] = field(default_factory=list)

    async def run(self, until: float) -> None:
        """Go on until then; what is under way is brought to its end."""
        while True:
            for kind in self.rng.sample(self.kinds, len(self.kinds)):
                if time.monotonic() + self.pause + _LASTING.get(kind, self.pause) > until:
                    return
                await asyncio.sleep(self.pause)
                worker = self.rng.choice(self.workers)
                hit = worker.url if kind not in _NOBODY else ""
                happening = Happening(kind, hit, time.monotonic())
                self.happened.append(happening)
                await self._steps(kind, worker)
                happening.ended = time.monotonic()

    def unexplained(self, failures: Iterable[Failure]) -> list[Failure]:
        """Those that no fault of their worker explains."""
        return [each for each in failures if not any(happening.explains(each) for happening in self.happened)]

    def said_of(self, failure: Failure) -> str:
        """A failure, and what had happened last."""
        before = [happening for happening in self.happened if happening.began <= failure.when]
        last = (
            f"{failure.when - before[-1].began:.1f} s after {before[-1].kind} began" if before else "before any fault"
        )
        return f"{failure.error} at {failure.worker or 'no worker'} {last}"

    async def _steps(self, kind: str, worker: SimulatedWorker) -> None:
        steps: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": lambda: self._killed(worker),
            "hang": lambda: self._stopped(worker),
            "reset": lambda: self._faulty(worker, reset_after_bytes=self.rng.randrange(2000)),
            "slow": lambda: self._faulty(worker, slow_factor=10.0),
            "events": lambda: self._faulty(worker, drop_events_share=0.5),
            "reload": self._reloaded,
            "badfile": self._misread,
        }
        await steps[kind]()

    async def _killed(self, worker: SimulatedWorker) -> None:
        worker.kill()
        await asyncio.sleep(_LASTING["kill"])
        worker.start()
        await worker.ready()

    async def _stopped(self, worker: SimulatedWorker) -> None:
        worker.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(_LASTING["hang"])
        finally:
            worker.signal(signal.SIGCONT)

    async def _faulty(self, worker: SimulatedWorker, **faults: object) -> None:
        await worker.fails(**faults)
        await asyncio.sleep(self.pause)
        await worker.fails()

    async def _reloaded(self) -> None:
        path, versions = self.config
        versions.append(versions.pop(0))
        path.write_bytes(versions[0])
        await asyncio.sleep(self.pause)

    async def _misread(self) -> None:
        path, versions = self.config
        path.write_bytes(versions[0][:-20] + b"EVIL: [")
        await asyncio.sleep(self.pause)
        path.write_bytes(versions[0])
