"""Panics, rests, budgets and second attempts, by model, as Prometheus families."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric

from gateway.telemetry.families import counter, gauge


class ResilienceReading(NamedTuple):
    """One fleet at one moment.

    Attributes:
        panic: so many workers are out that those that failed are used.
        resting: workers that have asked for nothing new for now.
        suspect: workers that have to prove themselves, for others of their host were ejected.
        outliers: workers that were ejected because of their success rate, ever.
        retries: further attempts that the budget has paid for, ever.
        retries_refused: those that it has not.
        hedges: second attempts beside the first, by what became of the race, ever.
        hedges_refused: those that their budget did not pay for.
    """

    panic: bool = False
    resting: int = 0
    suspect: int = 0
    outliers: int = 0
    retries: int = 0
    retries_refused: int = 0
    hedges: Mapping[str, int] = {}
    hedges_refused: int = 0


def resilience_families(readings: Iterable[tuple[str, ResilienceReading]]) -> Iterator[Metric]:
    """One series per model and family; of hedges, one for each way in which a race has ended."""
    panic = gauge("warmroute_fleet_panic", "1 while workers are used though they failed, as too many are out", "model")
    resting = gauge("warmroute_fleet_workers_resting", "Workers that asked for nothing new (Retry-After)", "model")
    suspect = gauge("warmroute_fleet_workers_suspect", "Workers of a host of which others were ejected", "model")
    outliers = counter("warmroute_outlier_ejections", "Workers ejected because of their success rate", "model")
    spent = counter("warmroute_retry_budget_spent", "Retries after an answer that the budget paid for", "model")
    refused = counter("warmroute_retry_budget_exhausted", "Retries that were not made: no budget", "model")
    hedges = counter(
        "warmroute_hedges", "Requests with a second attempt beside the first, by who answered", "model result"
    )
    unhedged = counter("warmroute_hedge_budget_exhausted", "Second attempts that were not made: no budget", "model")
    for model, reading in readings:
        panic.add_metric([model], float(reading.panic))
        resting.add_metric([model], reading.resting)
        suspect.add_metric([model], reading.suspect)
        outliers.add_metric([model], reading.outliers)
        spent.add_metric([model], reading.retries)
        refused.add_metric([model], reading.retries_refused)
        unhedged.add_metric([model], reading.hedges_refused)
        for result, value in reading.hedges.items():
            hedges.add_metric([model, result], value)
    yield from (panic, resting, suspect, outliers, spent, refused, hedges, unhedged)
