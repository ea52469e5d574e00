"""The gateway's gate in a replay: the same object, in virtual time.

Whose turn has come is told while an engine's outputs are being read; so turns are noted here, and taken when the event is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from gateway.admission.gate import Gate
from gateway.admission.queue import Ticket
from gateway.admission.stages import Stages
from gateway.config.schema import Admission, Stage, WorkerLimits

if TYPE_CHECKING:
    from gateway.errors import GatewayError
    from gateway.fleet.worker import Worker
    from simulator.workloads.workload import WorkRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """What the configuration would say.

    Attributes:
        settings: the model's `admission`.
        stages: as in `stages:`; requests name theirs.
        weights: of tenants, by name; others weigh 1.
        limits: of workers, by id.
    """

    settings: Admission = field(default_factory=Admission)
    stages: Mapping[str, Stage] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, WorkerLimits] = field(default_factory=dict)


@dataclass(slots=True)
class Turn:
    """The waiting of a request is over: its turn, or a refusal."""

    index: int
    error: "GatewayError | None"


class Door:
    """The gate and who stands before it.

    Attributes:
        gate: the gateway's.
        tickets: of requests that have arrived and not ended, by their index.
        turns: what the gate has said and nobody has acted upon yet.
        wake: when it was last asked for.
    """

    __slots__ = ("_options", "_stages", "gate", "tickets", "turns", "wake")

    def __init__(self, options: AdmissionOptions, workers: "Sequence[Worker]") -> None:
        self._options = options
        self._stages = Stages(options.stages)
        self.gate = Gate("m")
        self.gate.configure(workers, options.settings, options.limits, self._stages, options.settings)
        self.tickets: dict[int, Ticket] = {}
        self.turns: list[Turn] = []
        self.wake: float | None = None

    def ticket(self, index: int, request: "WorkRequest", now: float) -> Ticket:
        """The ticket of a request that arrives."""
        stage = self._stages.by_name.get(request.stage or "")
        ticket = self.tickets[index] = Ticket(
            now,
            tenant=request.tenant,
            weight=self._options.weights.get(request.tenant, 1.0),
            stage=stage,
            group=(stage.name if stage is not None else "", request.tenant),
            pool=self.gate.pool_of(stage),
            priority=stage.priority if stage is not None else 0,
            deadline=now + stage.deadline if stage is not None else float("inf"),
            tokens=request.prompt_tokens,
            session=request.session,
            turn=partial(self._turn, index),
        )
        return ticket

    def close(self, index: int, now: float, first_byte: float = 0.0, *, completed: bool = False) -> None:
        """The request has ended, in whichever way."""
        ticket = self.tickets.pop(index, None)
        if ticket is not None:
            self.gate.close(ticket, now, first_byte, completed=completed)

    def next_wake(self, now: float) -> float | None:
        """When to call `Gate.advance`, if that is sooner than it was asked for already."""
        wake = self.gate.wake(now)
        if wake is None or (self.wake is not None and now < self.wake <= wake):
            return None
        self.wake = wake
        return wake

    def _turn(self, index: int, error: "GatewayError | None") -> None:
        self.turns.append(Turn(index, error))
