"""Gives every stream of events its turn, and the rest of the process the time between the turns.

All streams share one task, for fairness: with a task each, a thousand busy streams would make one round of the event loop as
long as a thousand turns.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

SLICE = 0.002
"""Seconds of work between two returns to the event loop."""

_log = structlog.get_logger(__name__)


class Worked(Protocol):
    """Something that has work to do from time to time."""

    queued: bool
    """Whether it waits for its turn; kept by the pump."""

    def work(self, deadline: float) -> bool:
        """Do something until there is nothing more (False) or the deadline on the pump's clock has come (True)."""

    def broke(self, error: Exception) -> None:
        """`work` raised, which is a mistake of ours."""


class Pump:
    """One task for the work of many."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ready: deque[Worked] = deque()
        self._awake = asyncio.Event()

    def enqueue(self, one: Worked) -> None:
        """It has work to do; nothing happens when it waits already."""
        if not one.queued:
            one.queued = True
            self._ready.append(one)
            self._awake.set()

    async def run(self) -> None:
        """Go on until cancelled."""
        clock = self._clock
        ready = self._ready
        while True:
            await self._awake.wait()
            self._awake.clear()
            deadline = clock() + SLICE
            while ready:
                one = ready.popleft()
                one.queued = False
                try:
                    if one.work(deadline):
                        self.enqueue(one)
                except Exception as error:  # noqa: BLE001 - one stream's trouble must not end the others
                    one.broke(error)
                if clock() >= deadline:
                    await asyncio.sleep(0)
                    deadline = clock() + SLICE
