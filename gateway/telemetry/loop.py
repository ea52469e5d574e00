"""Whether the process itself is well: how late the event loop runs, how long the garbage collector stops it, its memory."""

import asyncio
import gc
import os
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Final

from gateway.telemetry.histogram import Histogram

INTERVAL: Final = 0.1
"""Seconds between two samples of the loop's lag."""
WINDOW: Final = 600
"""Samples that `Lag.worst` looks back on: a minute."""
GC_BOUNDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Bounds in seconds. A full collection of a large heap has been seen to take 0.1 to 0.4 s in serving processes."""


class Lag:
    """How late timers fire.

    Attributes:
        last: seconds that the latest sample was late.
    """

    __slots__ = ("_samples", "last")

    def __init__(self) -> None:
        self.last = 0.0
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, late: float) -> None:
        """Add one sample."""
        self.last = late
        self._samples.append(late)

    def worst(self) -> float:
        """The largest of the last `WINDOW` samples, in seconds; 0 before the first."""
        return max(self._samples, default=0.0)


class LoopMonitor:
    """Samples the loop that `start` is called on, until `stop`.

    Attributes:
        lag: of the loop.
        gc_pauses: seconds that collections took, by generation.
    """

    __slots__ = ("_collection_started", "_due", "_loop", "_timer", "gc_pauses", "lag")

    def __init__(self) -> None:
        self.lag = Lag()
        self.gc_pauses = tuple(Histogram(GC_BOUNDS) for _ in range(3))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._collection_started: float | None = None

    def start(self) -> None:
        """Begin, on the running loop. Calling it again does nothing."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        gc.callbacks.append(self._collecting)
        self._schedule(self._loop)

    def stop(self) -> None:
        """End: no timer and no callback are left. Calling it again does nothing."""
        if self._loop is None:
            return
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gc.callbacks.remove(self._collecting)

    def rss(self) -> int:
        """Resident memory of this process in bytes; 0 where there is no /proc."""
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + INTERVAL
        self._timer = loop.call_at(self._due, self._sample)

    def _sample(self) -> None:
        loop = self._loop
        if loop is None:
            return
        # The loop's clock may be coarser than its timers: never negative.
        self.lag.add(max(0.0, loop.time() - self._due))
        self._schedule(loop)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        """Called by the collector itself, before and after each collection, in whatever thread set it off."""
        if phase == "start":
            self._collection_started = perf_counter()
        elif self._collection_started is not None:
            self.gc_pauses[info["generation"]].observe(perf_counter() - self._collection_started)
            self._collection_started = None
