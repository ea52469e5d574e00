"""Fleets in virtual time: a workload through the gateway's own policies, against simulated engines.

* `options`: the fleet, and what the command line may say about its workers.
* `keys`: content ids to block hashes.
* `knowledge`: what the gateway hears of the caches, and when.
* `run`: `replay`, from event to event.
* `bounds`, `series`, `result`: what is measured.
* `side_by_side`: several policies, in processes; the only part with a clock.
"""

from simulator.fleet.options import FleetOptions, TierOptions, WorkerOptions, explicit_worker
from simulator.fleet.result import Outcome, ReplayResult, Requests
from simulator.fleet.run import Progress, ReplayError, replay
from simulator.fleet.series import Series
from simulator.fleet.side_by_side import side_by_side

__all__ = [
    "FleetOptions",
    "Outcome",
    "Progress",
    "ReplayError",
    "ReplayResult",
    "Requests",
    "Series",
    "TierOptions",
    "WorkerOptions",
    "explicit_worker",
    "replay",
    "side_by_side",
]
