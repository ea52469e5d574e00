"""Watches the process and says which new requests are refused: before it collapses, the least urgent ones first.

Nothing is counted per request while all is well: the proxy reads one attribute.
"""

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from gateway.errors import GatewayError, Source
from gateway.overload.pressure import CALM, DESCRIPTORS, EVERYTHING, LAG, MEMORY, Lag, Steps, refuses
from gateway.overload.readings import (
    descriptors_limit,
    descriptors_used,
    give_back_memory,
    memory_limit,
)

if TYPE_CHECKING:
    from gateway.config.schema import Overload

INTERVAL: Final = 0.1
"""Seconds between two looks."""
REASON: Final = "gateway_overloaded"
_MEMORY_EVERY: Final = 3
"""Looks between two at the memory, which is read from a file."""
_TRIM_EVERY: Final = 10.0
_CLASSES: Final = 64
"""Priorities that are told apart; clients choose them, so that there may be any number."""
_SPARE: Final = 16
"""Descriptors that are kept for what is not a request: the admin listener, health checks, log files, a reload."""
_SPARE_SHARE: Final = 0.05
_LONGEST_RETRY: Final = 30
_SPREAD: Final = 4
"""Seconds over which those that are refused are told to come back: not all at once."""
_REFUSED: Final = (
    "",
    "the lowest class of requests is refused",
    "all but the highest class are refused",
    "all new requests are refused",
)

_log = structlog.get_logger(__name__)


class Guard:
    """One process'.

    Attributes:
        step: see `gateway.overload.pressure`; 0 while all is well. The only thing that is read for each request.
        refused: requests that were refused, by what was short.
        turned_away: connections that were refused because of descriptors; the acceptor counts them.
        limits: of each signal that is watched: seconds, bytes, descriptors.
    """

    __slots__ = (
        "_classes",
        "_due",
        "_lag",
        "_looks",
        "_loop",
        "_on_descriptors",
        "_opened",
        "_refusals",
        "_resident",
        "_rss",
        "_settings",
        "_stages",
        "_steps",
        "_timer",
        "_trimmed",
        "_used",
        "limits",
        "refused",
        "step",
        "turned_away",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, rss: Callable[[], int], on_descriptors: Callable[[], None]
    ) -> None:
        """A guard that watches nothing before `configure` and `start`.

        Args:
            loop: whose lag is watched.
            rss: resident bytes of the process.
            on_descriptors: called while descriptors are short: what is idle can be closed.
        """
        self._loop = loop
        self._rss = rss
        self._on_descriptors = on_descriptors
        self._steps = Steps()
        self._lag = Lag()
        self._settings: Overload | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._stages: set[int] = {0}
        self._classes: list[int] = [0]
        self._refusals = 0
        self._trimmed = 0.0
        self._looks = self._resident = 0
        self._used = self._opened = 0
        self.limits: dict[str, float] = {}
        self.refused: dict[str, int] = {}
        self.turned_away = 0
        self.step = CALM

    def configure(self, settings: "Overload", priorities: Iterable[int]) -> None:
        """Go by another configuration. `priorities`: of its stages."""
        self._settings = settings
        self._stages = {0, *priorities}
        self._classes = sorted(self._stages)
        self.limits = {
            name: limit
            for name, limit in (
                (LAG.name, settings.lag),
                (MEMORY.name, (settings.memory or memory_limit()) * settings.memory_share),
            )
            if limit
        }

    def start(self) -> None:
        """Begin to watch. Calling it again does nothing."""
        if self._timer is None:
            self._used = descriptors_used()
            self._schedule()

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def pressures(self) -> dict[str, float]:
        """Use divided by limit, by signal that is watched."""
        return self._steps.pressures

    @property
    def degraded(self) -> list[str]:
        """For `/readyz`."""
        if not self.step:
            return []
        cause = self._steps.cause
        share = self._steps.pressures.get(cause, 0.0)
        return [f"overloaded: {cause} at {share:.0%} of its limit; {_REFUSED[self.step]}"]

    def has_room(self) -> bool:
        """Whether another client may connect, as far as descriptors go. Each call that says so counts as one that did."""
        limit = descriptors_limit()
        if limit and self._used + self._opened >= limit - max(_SPARE, int(limit * _SPARE_SHARE)):
            return False
        self._opened += 1
        return True

    def check(self, priority: int | None) -> None:
        """Refuse a new request if it has to be. To be called only while there is a `step`.

        Args:
            priority: its class; None: it is not known yet, and only a step at which that does not matter refuses it.

        Raises:
            GatewayError: 503 with `Retry-After`.
        """
        if priority is None:
            if self.step < EVERYTHING:
                return
        else:
            if priority not in self._classes and len(self._classes) < _CLASSES:
                self._classes = sorted({*self._classes, priority})
            if not refuses(self.step, priority, self._classes):
                return
        cause = self._steps.cause
        self.refused[cause] = self.refused.get(cause, 0) + 1
        raise self._refusal()

    def _refusal(self) -> GatewayError:
        self._refusals += 1
        lasted = int(monotonic() - self._steps.since)
        wait = min(_LONGEST_RETRY, 1 + lasted // 2) + self._refusals % _SPREAD
        return GatewayError(
            503,
            REASON,
            "The gateway is overloaded; send the request again later.",
            source=Source.GATEWAY,
            code=REASON,
            retry_after=wait,
            # A connection is a descriptor.
            close=self._steps.cause == DESCRIPTORS.name,
        )

    def _schedule(self) -> None:
        self._due = monotonic() + INTERVAL
        self._timer = self._loop.call_later(INTERVAL, self._look)

    def _look(self) -> None:
        now = monotonic()
        late = self._lag.add(max(0.0, now - self._due))
        self._schedule()
        self._used, self._opened = descriptors_used(), 0
        self._looks += 1
        if MEMORY.name in self.limits and self._looks % _MEMORY_EVERY == 0:
            self._resident = self._rss()
        used = {LAG.name: late, MEMORY.name: self._resident, DESCRIPTORS.name: self._used}
        before = self.step
        if self._settings is not None and (allowed := descriptors_limit() * self._settings.descriptors):
            self.limits[DESCRIPTORS.name] = allowed  # others can change it from outside
        changed = self._steps.told({name: used[name] / limit for name, limit in self.limits.items()}, now)
        self.step = self._steps.step
        if self._steps.pressures.get(DESCRIPTORS.name, 0.0) >= DESCRIPTORS.first:
            self._on_descriptors()
        if self._steps.cause == MEMORY.name and now - self._trimmed >= _TRIM_EVERY:
            self._trimmed = now
            give_back_memory()
        if changed and not self.step:
            self._classes = sorted(self._stages)
            _log.warning("no longer overloaded", seconds=round(now - self._steps.since, 1), refused=dict(self.refused))
        elif changed and before < self.step:
            _log.error(
                "overloaded", what=_REFUSED[self.step], cause=self._steps.cause, **_rounded(self._steps.pressures)
            )


def _rounded(pressures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in pressures.items()}
