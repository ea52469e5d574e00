"""How near the process is to what it can bear, in steps with hysteresis. No clock, no I/O.

Pressure is use divided by limit: of the event loop's lag, of memory, of file descriptors. The worst of them decides. Steps go up at once and
down one at a time, only when the pressure has been well below the step for a while: a gateway at its limit must not flap.
"""

from collections import deque
from typing import Final

import msgspec

CALM, LOWEST, ALL_BUT_HIGHEST, EVERYTHING = range(4)
"""Steps: nothing is refused; the lowest class; all but the highest; all new requests."""
HOLD: Final = 1.0
"""Seconds for which the pressure must have been below a step before that is left."""
LASTING: Final = 3
"""Looks in a row at which the loop must have been late: one garbage collection, or one plug-in that blocks, is no overload."""


class Signal(msgspec.Struct, frozen=True):
    """One thing that can run out.

    Attributes:
        name: of it, as in metrics.
        first: the pressure at which the first step begins; the last one begins at 1.
        release: a step is left below its own threshold times this.
    """

    name: str
    first: float
    release: float

    def step(self, pressure: float, current: int) -> int:
        """The step that `pressure` asks for while `current` is in force."""
        wanted = CALM
        for number in (LOWEST, ALL_BUT_HIGHEST, EVERYTHING):
            threshold = self.first + (1 - self.first) * (number - 1) / 2
            if pressure >= threshold * (self.release if number <= current else 1.0):
                wanted = number
        return wanted


LAG: Final = Signal("event_loop", 0.5, 0.7)
MEMORY: Final = Signal("memory", 0.9, 0.95)
DESCRIPTORS: Final = Signal("descriptors", 0.85, 0.95)
SIGNALS: Final = (LAG, MEMORY, DESCRIPTORS)


class Lag:
    """How late the loop lastingly is: the least of the latest `LASTING` samples, in seconds."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[float] = deque([0.0] * LASTING, LASTING)

    def add(self, late: float) -> float:
        """A timer came so many seconds too late; how late the loop lastingly is."""
        self._samples.append(late)
        return min(self._samples)


class Steps:
    """Which step is in force.

    Attributes:
        step: of all signals together.
        cause: the name of the signal that asked for it; empty while calm.
        since: when the latest rise was.
        pressures: by signal, as last told.
    """

    __slots__ = ("_below_since", "cause", "pressures", "since", "step")

    def __init__(self) -> None:
        self.step = CALM
        self.cause = ""
        self.since = 0.0
        self.pressures: dict[str, float] = {}
        self._below_since: float | None = None

    def told(self, pressures: dict[str, float], now: float) -> bool:
        """The pressures are so at `now`, by signal; those that are not watched are left out. Whether the step has changed."""
        self.pressures = pressures
        wanted, cause = CALM, ""
        for signal in SIGNALS:
            asked = signal.step(pressures.get(signal.name, 0.0), self.step)
            if asked > wanted:
                wanted, cause = asked, signal.name
        if wanted > self.step:
            if self.step == CALM:
                self.since = now
            self.step, self.cause, self._below_since = wanted, cause, None
            return True
        if wanted == self.step:
            self._below_since = None
            self.cause = cause
            return False
        if self._below_since is None:
            self._below_since = now
        if now - self._below_since < HOLD:
            return False
        self._below_since = now
        self.step -= 1
        if self.step == CALM:
            self.cause = ""
        return True


def refuses(step: int, priority: int, classes: "list[int]") -> bool:
    """Whether a new request is refused.

    Args:
        step: in force.
        priority: its own; smaller is sooner.
        classes: the priorities that there are, ascending. Of a single one nothing is refused before `EVERYTHING`.
    """
    if step == EVERYTHING:
        return True
    if step == CALM or len(classes) < 2:
        return False
    return priority >= classes[-1] if step == LOWEST else priority > classes[0]
