"""The same counters by OTLP: every `interval` the families of a scrape are sent to a collector.

The SDK's observable instruments have no histograms, and its own aggregation would be a second count of everything. So the families
of one `Snapshot` become the SDK's data classes, and the SDK's exporter does the rest; both in a thread.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway import __version__
from gateway.tasks import TaskGroup
from gateway.telemetry.recording import resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from prometheus_client import Metric as Family

    from gateway.config.schema import Telemetry
    from gateway.telemetry.collector import Snapshot

EXPORT_TIMEOUT: Final = 5.0
"""Seconds for one export with all its retries."""
LAST: Final = 2.0
"""Seconds that the last export may take."""
_GENAI: Final = {
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
}
"""What the conventions call the families whose Prometheus names were made from theirs."""
_GENAI_LABELS: Final = {
    "gen_ai_request_model": "gen_ai.request.model",
    "gen_ai_operation_name": "gen_ai.operation.name",
    "error_type": "error.type",
}

_log = structlog.get_logger(__name__)


class MetricsExporter:
    """Sends snapshots from `start` to `stop`. A collector that is away costs what was not sent, nothing else.

    Attributes:
        dropped: exports that failed.
    """

    def __init__(
        self, exporter: MetricExporter, snapshot: "Callable[[], Snapshot]", resource: "Resource", interval: float
    ) -> None:
        """`snapshot` is asked on the event loop's thread every `interval` seconds."""
        self._exporter = exporter
        self._snapshot = snapshot
        self._resource = resource
        self._interval = interval
        self._tasks = TaskGroup("otlp-metrics")
        self._began = time_ns()
        self._working = True
        self.dropped = 0

    @classmethod
    def from_config(cls, telemetry: "Telemetry", snapshot: "Callable[[], Snapshot]") -> Self:
        """As configured; `telemetry.metrics.exporter` must be ``otlp``."""
        section = telemetry.metrics
        exporter = OTLPMetricExporter(section.endpoint, headers=dict(section.headers), timeout=EXPORT_TIMEOUT)
        return cls(exporter, snapshot, resource_of(telemetry.service_name), section.interval)

    def start(self) -> None:
        """Begin, on the running loop."""
        self._tasks.spawn("export", self._run())

    async def stop(self) -> None:
        """Send what was counted since the last export, for at most `LAST` seconds, and end."""
        await self._tasks.cancel()
        try:
            async with asyncio.timeout(LAST):
                await self.export()
        except TimeoutError:
            self.dropped += 1
        await asyncio.to_thread(self._exporter.shutdown)

    async def export(self) -> None:
        """Send one snapshot."""
        ok = await asyncio.to_thread(self._send, self._snapshot())
        self.dropped += not ok
        if ok is not self._working:
            self._working = ok
            if ok:
                _log.info("metrics are exported again", lost=self.dropped)
            else:
                _log.warning("metrics cannot be exported")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.export()

    def _send(self, snapshot: "Snapshot") -> bool:
        try:
            data = metrics_data(snapshot.collect(), self._resource, self._began, time_ns())
            return self._exporter.export(data) is MetricExportResult.SUCCESS
        except Exception:  # noqa: BLE001 - a broken exporter loses an export, nothing else
            return False


def metrics_data(families: "Iterable[Family]", resource: "Resource", began: int, now: int) -> MetricsData:
    """Prometheus families as OTLP's data, cumulative since `began`; both times are Unix nanoseconds."""
    metrics = [metric for family in families for metric in _metrics(family, began, now)]
    scope = ScopeMetrics(InstrumentationScope("warmroute", __version__), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metrics(family: "Family", began: int, now: int) -> Iterator[Metric]:
    """One OTLP metric per family; of a summary its count and its sum, as two."""
    unit = "s" if family.name.endswith("_seconds") else "By" if family.name.endswith("_bytes") else "1"
    name = _GENAI.get(family.name, family.name)
    if not family.samples:
        return
    if family.type == "histogram":
        points = _histogram_points(family, began, now)
        yield Metric(name, family.documentation, unit, Histogram(points, AggregationTemporality.CUMULATIVE))
    elif family.type == "gauge":
        # All of them floats: a series that is an integer now and then is two to some collectors.
        numbers = [NumberDataPoint(_attributes(one.labels), now, now, float(one.value)) for one in family.samples]
        yield Metric(name, family.documentation, unit, Gauge(numbers))
    else:
        for suffix in ("_total", "_count", "_sum"):
            samples = [sample for sample in family.samples if sample.name == family.name + suffix]
            if samples:
                numbers = [NumberDataPoint(_attributes(one.labels), began, now, one.value) for one in samples]
                data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
                yield Metric(name + suffix.removesuffix("_total").replace("_", "."), family.documentation, unit, data)


def _histogram_points(family: "Family", began: int, now: int) -> list[HistogramDataPoint]:
    """The samples of each label set, in the order in which `histograms` writes them: buckets, count, sum."""
    points = []
    cumulative: list[float] = []
    bounds: list[float] = []
    count = 0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            cumulative.append(sample.value)
        elif sample.name.endswith("_count"):
            count = int(sample.value)
        else:
            each = [int(upper - lower) for lower, upper in zip([0.0, *cumulative], cumulative, strict=False)]
            attributes = _attributes(sample.labels)
            finite = [bound for bound in bounds if math.isfinite(bound)]
            # None: neither smallest nor largest value is known. The SDK's class does not say that they are optional in OTLP.
            unknown: Any = None
            point = HistogramDataPoint(attributes, began, now, count, sample.value, each, finite, unknown, unknown)
            points.append(point)
            cumulative, bounds = [], []
    return points


def _attributes(labels: dict[str, str]) -> dict[str, str]:
    return {_GENAI_LABELS.get(name, name): value for name, value in labels.items() if value}
