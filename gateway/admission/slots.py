"""Who has room: slots of a worker, and how much prefill may be under way there. No clock, no I/O.

Workers queue first come first served. What is sent beyond their slots waits there, where no priority counts; what is sent to a
worker that prefills one prompt at a time stalls all its streams as long as there are prompts. So both are bounded here.
"""

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateway.config.schema import WorkerLimits
    from gateway.fleet.worker import Worker


def capacity(worker: "Worker", limits: "Mapping[str, WorkerLimits]") -> float:
    """Requests that may be there at once: its slots, or what is configured where that is less; infinite where neither is known."""
    slots = worker.capabilities.slots
    limit = limits[worker.id].max_concurrent if worker.id in limits else None
    if slots is None:
        return inf if limit is None else limit
    return slots if limit is None else min(slots, limit)


def total(workers: "Iterable[Worker]", limits: "Mapping[str, WorkerLimits]") -> float:
    """Slots of all that take requests."""
    return sum(capacity(worker, limits) for worker in workers if worker.routable)


def remaining(worker: "Worker", now: float) -> float:
    """Seconds of prefill that are still before a new prompt there."""
    left = worker.backlog
    if left > 0 and worker.prefill_since:
        left -= min(max(0.0, now - worker.prefill_since), worker.head)
    return max(0.0, left)


def paced(worker: "Worker", now: float, ahead: float) -> bool:
    """Whether another prompt may go there: less than `ahead` seconds of prefill are, or it does not prefill one at a time."""
    if not worker.backlog or worker.capabilities.prefill != "exclusive":
        return True
    return remaining(worker, now) < ahead


def places(worker: "Worker", now: float, ahead: float, limits: "Mapping[str, WorkerLimits]", held: int = 0) -> float:
    """How many more requests may go there now, each of which changes the answer.

    Args:
        worker: who.
        now: seconds.
        ahead: see `paced`.
        limits: configured ones, by id.
        held: slots there that are reserved for others.
    """
    if not worker.routable:
        return 0
    free = capacity(worker, limits) - worker.in_flight - held
    if free <= 0 or not paced(worker, now, ahead):
        return 0
    return 1 if worker.capabilities.prefill == "exclusive" and ahead < inf else free


def opens_at(worker: "Worker", now: float, ahead: float) -> float:
    """When `paced` will hold, if nothing else happens and predictions are right; infinite: only an event can tell."""
    excess = remaining(worker, now) - ahead
    if excess < 0:
        return now
    begun = worker.prefill_since
    left = worker.head - (now - begun) if begun else 0.0
    return now + excess if excess < left else inf
