"""Prometheus families from names, help texts and label names in one line each."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily

from gateway.telemetry.histogram import Histogram


def counter(name: str, text: str, labels: str) -> CounterMetricFamily:
    """A family of counters; `labels`: names with spaces between."""
    return CounterMetricFamily(name, text, labels=labels.split())


def gauge(name: str, text: str, labels: str) -> GaugeMetricFamily:
    """A family of gauges; `labels`: names with spaces between."""
    return GaugeMetricFamily(name, text, labels=labels.split())


def histograms(
    name: str, text: str, labels: str, by_labels: Mapping[Any, Histogram], *, scale: float = 1.0
) -> HistogramMetricFamily:
    """A family of histograms, keyed by the tuple of their label values; bounds and sum are shown times `scale`."""
    family = HistogramMetricFamily(name, text, labels=labels.split())
    for values, histogram in by_labels.items():
        buckets = _buckets(histogram, scale)
        family.add_metric(values, buckets, histogram.sum * scale)
    return family


def _buckets(histogram: Histogram, scale: float) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Bound, cumulative count and, where there is one, the exemplar of each bucket."""
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for index, (bound, count) in enumerate(histogram.cumulative(scale)):
        exemplar = histogram.exemplars.get(index)
        if exemplar is None:
            buckets.append((bound, count))
        else:
            shown = Exemplar({"trace_id": exemplar.trace_id}, exemplar.value * scale, exemplar.time)
            buckets.append((bound, count, shown))
    return buckets
