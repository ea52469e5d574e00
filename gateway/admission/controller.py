"""The gates of all fleets in real time: futures for those who wait, and timers for what no event tells.

A gate speaks to whoever stands before it through `Ticket.turn`; here that is a future. Everything else is `gateway.admission.gate`'s.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from gateway.admission.gate import Gate
from gateway.admission.queue import Ticket
from gateway.admission.stages import Stages
from gateway.config.schema import Admission, WorkerLimits
from gateway.errors import GatewayError
from gateway.telemetry.workers import QueueReading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.config.schema import Config
    from gateway.fleet.fleet import Fleets
    from gateway.telemetry.w3c import TraceParent

_CONVERSATIONS: Final = 10_000
"""Traces of conversations that are remembered, for the stages that follow."""
_NO_LIMITS: Final = WorkerLimits()


class Admissions:
    """All gates.

    Attributes:
        gates: by fleet; a fleet without one never lets anybody wait.
        stages: all there are.
    """

    __slots__ = ("_all", "_loop", "_timers", "_traces", "gates", "stages")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._all: dict[str, Gate] = {}
        # With their times: what is due already uvloop makes a handle without one.
        self._timers: dict[Gate, tuple[float, asyncio.TimerHandle]] = {}
        self._traces: OrderedDict[tuple[str, str], TraceParent] = OrderedDict()
        self.gates: Mapping[str, Gate] = {}
        self.stages = Stages({})

    @property
    def needed(self) -> bool:
        """Whether any request has anything to do with admission."""
        return bool(self.gates or self.stages.by_name)

    def configure(self, config: "Config", fleets: "Fleets") -> None:
        """Go by another configuration. Never fails; who waits or runs goes on."""
        self.stages = Stages(config.stages, self.stages)
        gates: dict[str, Gate] = {}
        for model in config.models:
            fleet = fleets.resolve(model.name)
            if fleet is None:
                continue
            limits = {
                worker.id: section.limits
                for worker, section in zip(fleet.workers, model.workers, strict=True)
                if section.limits != _NO_LIMITS
            }
            if model.admission is None and not limits:
                continue
            gate = gates[model.name] = self._all.get(model.name) or Gate(model.name)
            gate.configure(fleet.workers, model.admission, limits, self.stages, Admission())
            for worker in fleet.workers:
                worker.opened = gate.opened
        self._all = gates
        self.gates = gates

    async def turn(self, gate: Gate, ticket: Ticket) -> None:
        """Wait until it is the turn of a ticket that waits. Whoever is cancelled here closes the ticket, as in all other cases.

        Raises:
            GatewayError: it is refused.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        ticket.turn = partial(_settle, future)
        self._look_again(gate)
        await future

    def follow(self, stage: str, session: str, trace: "TraceParent") -> None:
        """A conversation's request of `stage` has this place in a trace."""
        self._traces[session, stage] = trace
        if len(self._traces) > _CONVERSATIONS:
            self._traces.popitem(last=False)

    def followed(self, stage: str, session: str) -> "TraceParent | None":
        """Where the conversation's latest request of `stage` stood in a trace."""
        return self._traces.get((session, stage))

    def readings(self) -> dict[str, QueueReading]:
        """What waits, by fleet."""
        now = monotonic()
        return {
            name: QueueReading(len(gate.line), gate.line.oldest(now), gate.late(now))
            for name, gate in self.gates.items()
        }

    def stop(self) -> None:
        """End the timers."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _look_again(self, gate: Gate) -> None:
        now = monotonic()
        wake = gate.wake(now)
        timer = self._timers.get(gate)
        if wake is None:
            return
        when = self._loop.time() + wake - now
        if timer is not None:
            if timer[0] <= when:
                return
            timer[1].cancel()
        self._timers[gate] = when, self._loop.call_at(when, self._look, gate)

    def _look(self, gate: Gate) -> None:
        del self._timers[gate]
        gate.opened(monotonic())
        self._look_again(gate)


def _settle(future: "asyncio.Future[None]", error: GatewayError | None) -> None:
    with suppress(asyncio.InvalidStateError):  # its client has left at this very moment
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
