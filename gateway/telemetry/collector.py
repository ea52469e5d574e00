"""What a scrape of ``/metrics`` shows: the counters of `Metrics` and readings taken at that moment."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector as BaseCollector

from gateway.telemetry import names
from gateway.telemetry.families import counter, gauge, histograms
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.hyperpod import hyperpod_families
from gateway.telemetry.overload import OverloadReading, overload_families
from gateway.telemetry.parity import parity_families
from gateway.telemetry.prefix import feed_families, map_families
from gateway.telemetry.residency import ResidencyReading, residency_families
from gateway.telemetry.resilience import ResilienceReading, resilience_families
from gateway.telemetry.tenants import TenantReading, tenant_families
from gateway.telemetry.truth import truth_families
from gateway.telemetry.workers import QueueReading, WorkerReading, fleet_families, worker_families, worker_rows

if TYPE_CHECKING:
    from gateway.prefix.feed_status import FeedStatus
    from gateway.prefix.map import PrefixMap
    from gateway.prefix.truth import WorkerTruth
    from gateway.prompt.parity_status import ParityStatus
    from gateway.telemetry.loop import LoopMonitor
    from gateway.telemetry.metrics import Metrics, RequestKey
    from gateway.telemetry.workers import WorkerRows

__all__ = ["Collector", "QueueReading", "Readings", "Snapshot", "WorkerReading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Callables that a scrape asks. Each must be quick and must not raise.

    Attributes:
        workers: all workers, each with its fleet's name.
        ejections: per worker id, how often it was left out because it failed.
        queues: requests that wait in the gateway, by model; models without any may be left out.
        upstream_sockets: per worker id, connections open and, of those, idle in the pool.
        client_connections: open client connections.
        policy_faults: per fleet's name, how often its policy misbehaved.
        resilience: panics, rests, budgets and second attempts, by fleet.
        dropped: per signal (``spans``, ``logs``), records lost because their queue was full or their sink away.
        loop: the event loop's monitor.
        feeds: how each worker's cache is known; empty when nobody wants to know.
        prefix_maps: by block size.
        parity: how every worker's tokens agree with ours, each with its fleet's name.
        truth: predicted against actual cached tokens, by worker.
        tenants: what each tenant has used, by its name.
        residencies: hints and what became of them, one reading for each fleet that has any.
        hint_latency: seconds of a hint's calls, by driver.
        overload: how near the process is to its limits.
    """

    workers: Callable[[], Iterable[tuple[str, WorkerReading]]] = tuple
    ejections: Callable[[], Mapping[str, int]] = dict
    queues: Callable[[], Mapping[str, QueueReading]] = dict
    upstream_sockets: Callable[[], Mapping[str, tuple[int, int]]] = dict
    client_connections: Callable[[], int] = int
    policy_faults: Callable[[], Mapping[str, int]] = dict
    resilience: Callable[[], Iterable[tuple[str, ResilienceReading]]] = tuple
    dropped: Callable[[], Mapping[str, int]] = dict
    loop: "LoopMonitor | None" = None
    feeds: "Callable[[], Iterable[FeedStatus]]" = tuple
    prefix_maps: "Callable[[], Mapping[int, PrefixMap]]" = dict
    parity: "Callable[[], Iterable[tuple[str, ParityStatus]]]" = tuple
    truth: "Callable[[], Iterable[tuple[str, WorkerTruth]]]" = tuple
    tenants: "Callable[[], Iterable[tuple[str, TenantReading]]]" = tuple
    residencies: Callable[[], Iterable[ResidencyReading]] = tuple
    hint_latency: Callable[[], Mapping[str, Histogram]] = dict
    overload: "OverloadReading | None" = None


class Snapshot(BaseCollector):
    """All families as they were at one moment: may be written out while the counters go on, in any thread."""

    def __init__(self, families: Sequence[Metric], later: Callable[[], Iterable[Metric]] = tuple) -> None:
        """`later` makes the rest of the families from copies of its own, in the thread that wants to see them."""
        self._families = families
        self._later = later

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return chain(self._families, self._later())

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type: text 0.0.4 unless `accept` asks for another that we have."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self), content_type


_K = TypeVar("_K")
_GENAI_LABELS = "gen_ai_request_model gen_ai_operation_name error_type"


class Collector:
    """Makes Prometheus families of a `Metrics`. They are in no registry: nothing about them is global."""

    def __init__(self, metrics: "Metrics", version: str) -> None:
        self._metrics = metrics
        self._version = version

    def snapshot(self) -> Snapshot:
        """All families now. Call it on the event loop's thread, where the counters are counted."""
        metrics = self._metrics
        readings = metrics.readings
        rows = worker_rows(
            metrics, readings.workers(), readings.ejections(), readings.upstream_sockets(), readings.queues()
        )
        series = [
            (key, one.count, one.bytes_out, one.duration.copy(), one.first_byte.copy())
            for key, one in metrics.requests.items()
        ]
        prefix = (
            *map_families(readings.prefix_maps()),
            *parity_families(readings.parity()),
            *truth_families(readings.truth(), rows.models()),
        )
        hints = residency_families(readings.residencies(), readings.hint_latency())
        tenants = tenant_families(readings.tenants())
        now = [*self._totals(), *self._decisions(), *prefix, *hints, *tenants, *self._process()]
        later = partial(_later, rows, _Requests(series), list(readings.feeds()), metrics.hyperpod)
        return Snapshot(now, later)

    def _totals(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield CounterMetricFamily(
            "warmroute_requests_accepted", "Requests whose head was read and accepted", value=metrics.accepted
        )
        yield GaugeMetricFamily("warmroute_requests_in_flight", "Accepted and not ended", value=metrics.in_flight)
        retries = counter("warmroute_retries", "Further attempts, by what happened to the one before", "reason")
        for reason, value in metrics.retries.items():
            retries.add_metric([reason], value)
        yield retries
        refused = counter("warmroute_refused", "Answers that the gateway gave itself, without a worker", "error_type")
        for error_type, value in metrics.refusals.items():
            refused.add_metric([error_type], value)
        yield refused
        reloads = counter("warmroute_config_reloads", "Configuration reloads", "result")
        reloads.add_metric(["ok"], metrics.reloads[True])
        reloads.add_metric(["failed"], metrics.reloads[False])
        yield reloads
        yield from resilience_families(metrics.readings.resilience())

    def _decisions(self) -> Iterator[Metric]:
        metrics = self._metrics
        decisions = counter("warmroute_decisions", "Decisions, by why they fell so", "model policy reason")
        overheads: dict[tuple[str], Histogram] = {}
        for (model, policy, reason), series in metrics.decisions.items():
            decisions.add_metric([model, policy, reason], series.overhead.count)
            overheads.setdefault((model,), Histogram(series.overhead.bounds)).add(series.overhead)
        yield decisions
        yield histograms(
            "warmroute_gateway_overhead_seconds",
            "What the gateway itself took, from a request's last byte to the decision where it goes, without queueing",
            "model",
            overheads,
        )
        faults = counter("warmroute_policy_faults", "Decisions in which a step of the policy misbehaved", "model")
        for model, value in metrics.readings.policy_faults().items():
            faults.add_metric([model], value)
        yield faults
        yield histograms(
            "gen_ai_server_time_per_output_token_seconds",
            "From a stream's first byte to its end, per token after the first",
            "gen_ai_request_model",
            {(model,): histogram for model, histogram in metrics.per_token.items()},
        )
        yield histograms(
            "warmroute_stream_longest_gap_seconds",
            "The longest silence between two reads of a stream",
            "model",
            {(model,): histogram for model, histogram in metrics.longest_gap.items()},
        )

    def _process(self) -> Iterator[Metric]:
        readings = self._metrics.readings
        yield GaugeMetricFamily(
            "warmroute_client_connections", "Open client connections", value=readings.client_connections()
        )
        dropped = counter("warmroute_telemetry_dropped", "Spans, log lines and the like that were lost", "signal")
        for signal, value in readings.dropped().items():
            dropped.add_metric([signal], value)
        yield dropped
        if readings.overload is not None:
            yield from overload_families(readings.overload)
        build = gauge("warmroute_build_info", "1, with the version as a label", "version")
        build.add_metric([self._version], 1)
        yield build
        if readings.loop is not None:
            loop = readings.loop
            yield GaugeMetricFamily(
                "warmroute_event_loop_lag_seconds", "How late the last timer was", value=loop.lag.last
            )
            yield GaugeMetricFamily(
                "warmroute_event_loop_lag_max_seconds", "The latest timer of the last minute", value=loop.lag.worst()
            )
            yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory", value=loop.rss())
            yield histograms(
                "warmroute_gc_pause_seconds",
                "Pauses of Python's cyclic garbage collector",
                "generation",
                {(str(generation),): pauses for generation, pauses in enumerate(loop.gc_pauses)},
            )


class _Requests:
    """Copies of finished requests' series, by the labels that each family wants."""

    def __init__(self, series: "Iterable[tuple[RequestKey, int, int, Histogram, Histogram]]") -> None:
        self._series = series

    def families(self) -> Iterator[Metric]:
        """Counts, bytes and the two histograms of the GenAI conventions."""
        ended = counter(
            "warmroute_requests",
            "Requests that have ended: accepted = completed + client_gone + failed + in flight",
            "model path status outcome error_type",
        )
        sent = counter("warmroute_response_bytes", "Answer bytes written to clients", "model path")
        sent_bytes: dict[tuple[str, str], int] = {}
        durations: dict[tuple[str, ...], Histogram] = {}
        first_bytes: dict[tuple[str, ...], Histogram] = {}
        for (model, path, status, outcome, error_type), count, bytes_out, duration, first_byte in self._series:
            error = error_type or ""
            ended.add_metric([model, path, str(status), outcome.value, error], count)
            sent_bytes[model, path] = sent_bytes.get((model, path), 0) + bytes_out
            key = (model, names.operation(path), error)
            _merge(durations, key, duration)
            _merge(first_bytes, key, first_byte)
        for labels, value in sent_bytes.items():
            sent.add_metric(labels, value)
        yield ended
        yield sent
        yield histograms(
            "gen_ai_server_request_duration_seconds", "From a request's head to its end", _GENAI_LABELS, durations
        )
        yield histograms(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's head to the first byte of its answer",
            _GENAI_LABELS,
            first_bytes,
        )

    def by_model(self) -> tuple[dict[str, Histogram], dict[str, Histogram]]:
        """Durations and times to the first byte of all requests, by model."""
        durations: dict[str, Histogram] = {}
        first_bytes: dict[str, Histogram] = {}
        for (model, *_), _, _, duration, first_byte in self._series:
            _merge(durations, model, duration)
            _merge(first_bytes, model, first_byte)
        return durations, first_bytes


def _merge(into: dict[_K, Histogram], key: _K, histogram: Histogram) -> None:
    into.setdefault(key, Histogram(histogram.bounds)).add(histogram)


def _later(
    rows: "WorkerRows", requests: _Requests, feeds: "Iterable[FeedStatus]", hyperpod: Mapping[str, str] | None
) -> Iterator[Metric]:
    """The families that cost most, from copies."""
    yield from requests.families()
    yield from worker_families(rows)
    yield from fleet_families(rows)
    yield from feed_families(feeds)
    if hyperpod is not None:
        yield from hyperpod_families(rows, *requests.by_model(), hyperpod)
