"""How the workers of a fleet stand beside each other: who rests, who is suspect, whose success is far below the others'. No clock, no I/O."""

from typing import TYPE_CHECKING

from gateway.fleet.outliers import outliers
from gateway.fleet.worker import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.config.schema import Outliers
    from gateway.fleet.membership import Membership
    from gateway.fleet.states import Life


def soonest(lives: "Sequence[Life]", now: float) -> tuple[float, int] | None:
    """If some would take requests but have asked for a rest: seconds until the first may, and its kind of status.

    The status is 429 if that is what all of them said, else 503. None: nobody rests.
    """
    resting = [
        life for life in lives if life.rest_until > now and (life.worker.state is WorkerState.READY or life.tryable)
    ]
    if not resting:
        return None
    all_429 = all(life.rest_status == 429 for life in resting)
    return min(life.rest_until for life in resting) - now, 429 if all_429 else 503


def degraded(membership: "Membership", now: float) -> list[str]:
    """What works less well than it should, in words: a panic, rests, suspects."""
    lives, said = membership.lives, []
    if membership.panic:
        used = [life for life in lives if life.worker.routable and life.worker.state is WorkerState.EJECTED]
        said.append(f"panic: too many workers are out, these are used though they failed: {_ids(used)}")
    if resting := [life for life in lives if life.rest_until > now]:
        said.append(f"workers that asked for a rest (Retry-After): {_ids(resting)}")
    if suspects := [life for life in lives if life.suspect_until > now]:
        said.append(f"suspect, for others of their host were ejected: {_ids(suspects)}")
    return said


def compare(lives: "Sequence[Life]", rules: "Outliers", now: float) -> int:
    """End an interval: eject those whose success rate is far below the others', as far as the share allows it; how many those were."""
    ready = [life for life in lives if life.worker.state is WorkerState.READY]
    counts = [(life.good, life.bad) for life in ready]
    for life in lives:
        life.good = life.bad = 0
    if not rules.enabled:
        return 0
    found = outliers(counts, rules)
    for place, rate, mean in found:
        reason = f"{rate:.0%} of its requests succeeded, {mean:.0%} in the mean of its peers and itself"
        ready[place].outlier(now, reason)
    return sum(ready[each.place].worker.state is WorkerState.EJECTED for each in found)


def _ids(lives: "Sequence[Life]") -> str:
    return ", ".join(sorted(life.worker.id for life in lives))
