"""The families of `/metrics` about residency: hints by rule, action and fate, what they took, what is pinned, what is held back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import Metric

from gateway.telemetry.families import counter, gauge, histograms

if TYPE_CHECKING:
    from gateway.telemetry.histogram import Histogram


class ResidencyReading(NamedTuple):
    """One fleet's.

    Attributes:
        model: the fleet's name.
        counts: (rule, worker, action, ``offered`` or a fate, how many).
        open: hints that have not ended.
        throttled: by rule, whether it is held back.
        pinned: (worker, tier, tokens pinned, tokens that its device holds, 0: not known).
    """

    model: str
    counts: Sequence[tuple[str, str, str, str, int]]
    open: int
    throttled: Mapping[str, bool]
    pinned: Sequence[tuple[str, str, int, int]]


def residency_families(readings: "Iterable[ResidencyReading]", latency: "Mapping[str, Histogram]") -> Iterator[Metric]:
    """`latency`: seconds of a hint's calls, by driver."""
    hints = counter(
        "warmroute_hints",
        "Residency hints: `offered` counts each once, so does the sum of skipped, refused, failed, useful and wasted in the end",
        "model rule action fate",
    )
    by_worker = counter("warmroute_worker_hints", "Residency hints to each worker, by fate", "model worker fate")
    still = gauge("warmroute_hints_open", "Hints whose fate is not known yet", "model")
    throttled = gauge(
        "warmroute_hint_rule_throttled", "1 for a rule that is held back because it is of little use", "model rule"
    )
    pinned = gauge("warmroute_hint_pinned_tokens", "Tokens that are pinned in a worker's memory", "model worker tier")
    share = gauge(
        "warmroute_hint_pinned_share", "The same as a share of what its device memory holds", "model worker tier"
    )
    for reading in readings:
        model = reading.model
        rules: dict[tuple[str, str, str], int] = {}
        workers: dict[tuple[str, str], int] = {}
        for rule, worker, action, fate, count in reading.counts:
            rules[rule, action, fate] = rules.get((rule, action, fate), 0) + count
            workers[worker, fate] = workers.get((worker, fate), 0) + count
        for labels, count in rules.items():
            hints.add_metric([model, *labels], count)
        for (worker, fate), count in workers.items():
            by_worker.add_metric([model, worker, fate], count)
        still.add_metric([model], reading.open)
        for rule, held in reading.throttled.items():
            throttled.add_metric([model, rule], float(held))
        for worker, tier, tokens, capacity in reading.pinned:
            if tokens:
                pinned.add_metric([model, worker, tier], tokens)
                if capacity:
                    share.add_metric([model, worker, tier], tokens / capacity)
    yield from (hints, by_worker, still, throttled, pinned, share)
    yield histograms("warmroute_hint_seconds", "What the calls of one hint took, by driver", "driver", latency)
