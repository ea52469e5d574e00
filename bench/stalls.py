"""Who kept whom waiting during a long run: every process is asked whether it is well, beside the load, and its silence noted.

A time limit that passes says that a worker did not answer in time, not why. On a machine that is too busy a process may not get a core for
seconds; then the same question, asked directly and past the gateway, goes unanswered as long. So a stall is evidence, and the lack of one too.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Final

EVERY: Final = 0.25
"""Seconds between two questions."""
WORTH: Final = 1.0
"""An answer that took longer is noted as a stall."""
ENOUGH: Final = 2.5
"""Seconds of silence that make a time limit pass, together with what a request takes otherwise: half of the run's limits."""
_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Stall:
    """A process that did not answer for `until - since` seconds, on the clock of `time.monotonic`."""

    who: str
    since: float
    until: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.until - self.since


@dataclass
class Watch:
    """Asks the processes.

    Attributes:
        asked: port and path of each, by name.
        stalls: of all, as they ended.
        own: how late this process' own timers were, where that is worth noting: it is the clients'.
    """

    asked: dict[str, tuple[int, str]]
    stalls: list[Stall] = field(default_factory=list)
    own: list[Stall] = field(default_factory=list)

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, (port, path) in self.asked.items():
                group.create_task(self._ask(name, port, path))
            group.create_task(self._look_at_myself())

    def explains(self, who: str, when: float, seconds: float) -> bool:
        """Whether `who` was silent for long enough in the `seconds` before `when` that a request may have had to wait for that."""
        since = when - seconds
        silent = sum(
            max(0.0, min(when, stall.until) - max(since, stall.since)) for stall in self.stalls if stall.who == who
        )
        return silent >= ENOUGH

    def seconds(self) -> float:
        """Of silence, of all processes together."""
        return sum(stall.seconds for stall in self.stalls)

    async def _ask(self, name: str, port: int, path: str) -> None:
        question = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        while True:
            since = time.monotonic()
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_PATIENCE):
                        reader, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.write(question)
                        await reader.read()
                        writer.close()
            finally:  # also when this watch ends before the answer comes
                until = time.monotonic()
                if until - since > WORTH:
                    self.stalls.append(Stall(name, since, until))
            await asyncio.sleep(EVERY)

    async def _look_at_myself(self) -> None:
        while True:
            since = time.monotonic()
            await asyncio.sleep(EVERY)
            until = time.monotonic()
            if until - since > EVERY + WORTH:
                self.own.append(Stall("clients", since + EVERY, until))
