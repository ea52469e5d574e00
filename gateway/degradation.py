"""What works less well than it should, in words: for `/readyz`, and for one log line instead of a thousand."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from gateway.fleet.worker import WorkerState
from gateway.inspector.admin import FleetStatus
from gateway.telemetry.resilience import ResilienceReading

if TYPE_CHECKING:
    from gateway.fleet.fleet import Fleet, Fleets
    from gateway.fleet.health import HealthMonitor
    from gateway.http.hedging import Hedging

LOG_EVERY: Final = 60.0
"""Seconds between two log lines about the same policy's faults, at least."""
LOOK_EVERY: Final = 1.0
"""Seconds between two looks at the policies' fault counts."""

_log = structlog.get_logger(__name__)


def fleet_status(fleet: "Fleet", matching: Sequence[str] = ()) -> FleetStatus:
    """How a fleet does, for `/readyz`; that no worker is ready at all is said there. `matching`: what others know to be wrong.

    In a panic a fleet that has no ready worker takes requests all the same, so it counts those that do: a gateway that is taken out of service
    then would be the outage that the panic is there to prevent.
    """
    degraded = list(matching)
    if fleet.retry_budget.exhausted(monotonic()):
        degraded.append("the retry budget is exhausted: answers of workers that fail go to the clients as they are")
    total = len(fleet.workers)
    ejected = [worker.id for worker in fleet.workers if worker.state is WorkerState.EJECTED]
    if ejected:
        degraded.append(f"{len(ejected)} of {total} workers ejected: {', '.join(sorted(ejected))}")
    faults = policy_faults(fleet)
    if faults:
        degraded.append(
            f"policy {fleet.policy_name} misbehaved {faults} times, those requests went to the least loaded worker;"
            f" last: {_last_fault(fleet)}"
        )
    ready = fleet.ready or sum(worker.routable for worker in fleet.workers)
    return FleetStatus(fleet.name, ready, total, degraded)


def resilience(
    fleets: "Fleets", health: "HealthMonitor", hedging: "Hedging"
) -> Iterator[tuple[str, ResilienceReading]]:
    """What a scrape shows of each fleet's panics, rests, budgets and second attempts."""
    panics, apart = health.panics(), health.apart()
    for fleet in fleets:
        hedges: Counter[str] = Counter()
        unhedged = 0
        for (name, _), lane in hedging.lanes.items():
            if name == fleet.name:
                hedges.update(lane.results)
                unhedged += lane.budget.refused
        resting, suspect = apart.get(fleet.name, (0, 0))
        yield (
            fleet.name,
            ResilienceReading(
                panics.get(fleet.name, False),
                resting,
                suspect,
                health.outliers.get(fleet.name, 0),
                fleet.retry_budget.spent,
                fleet.retry_budget.refused,
                hedges,
                unhedged,
            ),
        )


def policy_faults(fleet: "Fleet") -> int:
    """How often a step of the fleet's policy misbehaved (`policies.pipeline.Pipeline.faults`); 0 for policies that do not count."""
    faults: int = getattr(fleet.policy, "faults", 0)
    return faults


def _last_fault(fleet: "Fleet") -> str:
    return str(getattr(fleet.policy, "last_fault", ""))


class PolicyFaultLog:
    """Logs that a policy misbehaves: at once when it begins, then at most once in `LOG_EVERY` seconds."""

    __slots__ = ("_clock", "_fleets", "_logged")

    def __init__(self, fleets: "Callable[[], Iterable[Fleet]]", clock: Callable[[], float]) -> None:
        """`fleets` gives those of the configuration in use; `clock` monotonic seconds."""
        self._fleets = fleets
        self._clock = clock
        self._logged: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY)

    def look(self) -> None:
        """Log what is new and due."""
        now = self._clock()
        logged = {}
        for fleet in self._fleets():
            faults = policy_faults(fleet)
            seen, at = self._logged.get(fleet.name, (0, now - LOG_EVERY))
            if faults < seen:  # another policy since
                seen = 0
            if faults > seen and now - at >= LOG_EVERY:
                _log.error(
                    "policy misbehaves; these requests went to the least loaded worker",
                    model=fleet.name,
                    policy=fleet.policy_name,
                    faults=faults - seen,
                    last=_last_fault(fleet),
                )
                seen, at = faults, now
            logged[fleet.name] = (seen, at)
        self._logged = logged
