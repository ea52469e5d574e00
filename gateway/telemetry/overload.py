"""How near the process is to its limits, as Prometheus families."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.telemetry.families import counter, gauge


class OverloadReading(Protocol):
    """What is read of `gateway.overload.guard.Guard`."""

    @property
    def step(self) -> int:
        """0 while nothing is refused, 3 when all is."""

    @property
    def pressures(self) -> Mapping[str, float]:
        """Use divided by limit, of each resource that is watched."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Requests that were refused, by the resource that was short."""

    @property
    def turned_away(self) -> int:
        """Connections that were refused."""


def overload_families(reading: OverloadReading) -> Iterator[Metric]:
    """The step in force, pressures, and what was refused."""
    yield GaugeMetricFamily(
        "warmroute_overload_step",
        "0: nothing is refused; 1: the lowest class of requests; 2: all but the highest; 3: all new ones",
        value=reading.step,
    )
    pressures = gauge(
        "warmroute_overload_pressure", "Use divided by limit; all new requests are refused at 1", "resource"
    )
    for resource, pressure in reading.pressures.items():
        pressures.add_metric([resource], pressure)
    yield pressures
    refused = counter("warmroute_overload_refused", "New requests refused because a resource was short", "resource")
    for resource, count in reading.refused.items():
        refused.add_metric([resource], count)
    yield refused
    yield CounterMetricFamily(
        "warmroute_connections_refused", "Connections answered 503 for lack of descriptors", value=reading.turned_away
    )
