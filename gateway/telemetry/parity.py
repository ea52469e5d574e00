"""The families of `/metrics` about whether our tokens are the workers'."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.prompt.parity_status import Standing

if TYPE_CHECKING:
    from gateway.prompt.parity_status import ParityStatus

_WORKER = ("worker", "model")


def parity_families(statuses: "Iterable[tuple[str, ParityStatus]]") -> Iterator[Metric]:
    """How well each worker's tokens agree with ours. `statuses`: each with its model's name."""
    standing = GaugeMetricFamily(
        "warmroute_parity", "1 for what is known of its tokens, else 0", labels=[*_WORKER, "standing"]
    )
    proven = GaugeMetricFamily(
        "warmroute_parity_proven", "1 if our token ids may stand for the text of requests", labels=_WORKER
    )
    observed = CounterMetricFamily(
        "warmroute_parity_answers", "Answers whose number of prompt tokens was compared with ours", labels=_WORKER
    )
    wrong = CounterMetricFamily("warmroute_parity_wrong_answers", "Those that had another number", labels=_WORKER)
    for model, status in statuses:
        labels = [status.worker, model]
        for one in Standing:
            standing.add_metric([*labels, one.value], float(one is status.standing))
        proven.add_metric(labels, float(status.proven))
        observed.add_metric(labels, status.observed)
        wrong.add_metric(labels, status.wrong)
    yield from (standing, proven, observed, wrong)
