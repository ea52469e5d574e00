"""Processes of a benchmark: started on a core of their own, measured by the kernel's accounting, stopped by process id."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK: Final = os.sysconf("SC_CLK_TCK")
_STARTUP: Final = 60.0


@dataclass(frozen=True, slots=True)
class Process:
    """A running program and its children."""

    pid: int

    def tree(self) -> list[int]:
        """The process ids of the program and all that it has started."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(entry.name))
        found = [self.pid]
        for pid in found:
            found.extend(children.get(pid, ()))
        return found

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        total = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / _TICK

    def rss_mb(self) -> float:
        """Resident memory in MB."""
        total = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmRSS"):
                        total += int(line.split()[1])
        return total / 1024


@contextlib.contextmanager
def running(
    command: Sequence[str], *, core: int, port: int, log: Path, environment: dict[str, str] | None = None
) -> Iterator[Process]:
    """Run `command` pinned to `core` until the block ends; the block begins when `port` accepts connections.

    Raises:
        RuntimeError: it ended, or did not listen in time; the message has the end of its output.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _STARTUP
        while not listens(port):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not listen on {port}: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield Process(child.pid)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(3)
                break


def listens(port: int) -> bool:
    """Whether something on loopback accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
