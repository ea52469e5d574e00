"""What a scrape of ``/metrics`` shows: the counters of `Metrics` and readings taken at that moment."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector as BaseCollector

from gateway.fleet.worker import WorkerState
from gateway.telemetry import names
from gateway.telemetry.histogram import DURATION_BOUNDS, FIRST_TOKEN_BOUNDS, Histogram
from gateway.telemetry.parity import parity_families
from gateway.telemetry.prefix import feed_families, map_families
from gateway.telemetry.truth import truth_families

if TYPE_CHECKING:
    from gateway.prefix.feed_status import FeedStatus
    from gateway.prefix.map import PrefixMap
    from gateway.prefix.truth import WorkerTruth
    from gateway.prompt.parity_status import ParityStatus
    from gateway.telemetry.loop import LoopMonitor
    from gateway.telemetry.metrics import Metrics


class WorkerReading(Protocol):
    """What is shown of a worker. `gateway.fleet.worker.Worker` is one."""

    @property
    def id(self) -> str:
        """Unique among all workers."""

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""

    @property
    def in_flight(self) -> int:
        """Requests sent there that have not ended."""

    @property
    def in_flight_tokens(self) -> int:
        """Prompt tokens of those requests, where known."""

    @property
    def weight(self) -> float:
        """Share of a full load it should take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Callables that a scrape asks. Each must be quick and must not raise.

    Attributes:
        workers: all workers, each with its fleet's name.
        upstream_sockets: per worker id, connections open and, of those, idle in the pool.
        client_connections: open client connections.
        policy_faults: per fleet's name, how often its policy misbehaved.
        dropped: per signal (``spans``, ``logs``), records lost because their queue was full or their sink away.
        loop: the event loop's monitor.
        feeds: how each worker's cache is known; empty when nobody wants to know.
        prefix_maps: by block size.
        parity: how every worker's tokens agree with ours, each with its fleet's name.
        truth: predicted against actual cached tokens, by worker.
    """

    workers: Callable[[], Iterable[tuple[str, WorkerReading]]] = tuple
    upstream_sockets: Callable[[], Mapping[str, tuple[int, int]]] = dict
    client_connections: Callable[[], int] = int
    policy_faults: Callable[[], Mapping[str, int]] = dict
    dropped: Callable[[], Mapping[str, int]] = dict
    loop: "LoopMonitor | None" = None
    feeds: "Callable[[], Iterable[FeedStatus]]" = tuple
    prefix_maps: "Callable[[], Mapping[int, PrefixMap]]" = dict
    parity: "Callable[[], Iterable[tuple[str, ParityStatus]]]" = tuple
    truth: "Callable[[], Iterable[tuple[str, WorkerTruth]]]" = tuple


class Snapshot(BaseCollector):
    """All families as they were at one moment: may be written out while the counters go on, in any thread."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type: text 0.0.4 unless `accept` asks for another that we have."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self), content_type


class Collector:
    """Makes Prometheus families of a `Metrics`. They are in no registry: nothing about them is global."""

    def __init__(self, metrics: "Metrics", version: str) -> None:
        self._metrics = metrics
        self._version = version

    def snapshot(self) -> Snapshot:
        """All families now. Call it on the event loop's thread, where the counters are counted."""
        readings = self._metrics.readings
        prefix = (
            *feed_families(readings.feeds()),
            *map_families(readings.prefix_maps()),
            *parity_families(readings.parity()),
            *truth_families(readings.truth()),
        )
        return Snapshot([*self._requests(), *self._attempts(), *self._fleet(), *prefix, *self._process()])

    def _requests(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield CounterMetricFamily(
            "warmroute_requests_accepted", "Requests whose head was read and accepted", value=metrics.accepted
        )
        yield GaugeMetricFamily("warmroute_requests_in_flight", "Accepted and not ended", value=metrics.in_flight)
        ended = _counter(
            "warmroute_requests",
            "Requests that have ended: accepted = completed + client_gone + failed + in flight",
            "model path status outcome error_type",
        )
        sent = _counter("warmroute_response_bytes", "Answer bytes written to clients", "model path")
        sent_bytes: dict[tuple[str, str], int] = {}
        durations: dict[tuple[str, str, str], Histogram] = {}
        first_bytes: dict[tuple[str, str, str], Histogram] = {}
        for (model, path, status, outcome, error_type), series in metrics.requests.items():
            error = error_type or ""
            ended.add_metric([model, path, str(status), outcome.value, error], series.count)
            sent_bytes[model, path] = sent_bytes.get((model, path), 0) + series.bytes_out
            key = (model, names.operation(path), error)
            durations.setdefault(key, Histogram(DURATION_BOUNDS)).add(series.duration)
            first_bytes.setdefault(key, Histogram(FIRST_TOKEN_BOUNDS)).add(series.first_byte)
        for labels, value in sent_bytes.items():
            sent.add_metric(labels, value)
        yield ended
        yield sent
        yield _histogram(
            "gen_ai_server_request_duration_seconds", "From a request's head to its end", _GENAI_LABELS, durations
        )
        yield _histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's head to the first byte of its answer",
            _GENAI_LABELS,
            first_bytes,
        )

    def _attempts(self) -> Iterator[Metric]:
        metrics = self._metrics
        attempts = _counter(
            "warmroute_attempts",
            "Finished attempts on a worker; error_type is empty for good ones",
            "worker error_type",
        )
        for (worker, error_type), value in metrics.attempts.items():
            attempts.add_metric([worker, error_type or ""], value)
        yield attempts
        retries = _counter("warmroute_retries", "Further attempts, by what happened to the one before", "reason")
        for reason, value in metrics.retries.items():
            retries.add_metric([reason], value)
        yield retries
        refused = _counter("warmroute_refused", "Answers that the gateway gave itself, without a worker", "error_type")
        for error_type, value in metrics.refusals.items():
            refused.add_metric([error_type], value)
        yield refused
        reloads = _counter("warmroute_config_reloads", "Configuration reloads", "result")
        reloads.add_metric(["ok"], metrics.reloads[True])
        reloads.add_metric(["failed"], metrics.reloads[False])
        yield reloads

    def _fleet(self) -> Iterator[Metric]:
        readings = self._metrics.readings
        in_flight = _gauge("warmroute_worker_requests_in_flight", "Requests sent there and not ended", "worker model")
        tokens = _gauge("warmroute_worker_prompt_tokens_in_flight", "Their prompt tokens, where known", "worker model")
        weight = _gauge("warmroute_worker_weight", "Share of a full load; below 1 during slow start", "worker model")
        state = _gauge("warmroute_worker_state", "1 for the state it is in, 0 for the others", "worker model state")
        for fleet, worker in readings.workers():
            labels = [worker.id, fleet]
            in_flight.add_metric(labels, worker.in_flight)
            tokens.add_metric(labels, worker.in_flight_tokens)
            weight.add_metric(labels, worker.weight)
            for one in WorkerState:
                state.add_metric([*labels, one.value], float(worker.state is one))
        yield from (in_flight, tokens, weight, state)
        faults = _counter("warmroute_policy_faults", "Decisions in which a step of the policy misbehaved", "model")
        for model, value in readings.policy_faults().items():
            faults.add_metric([model], value)
        yield faults
        sockets = _gauge("warmroute_upstream_connections", "Connections to a worker", "worker state")
        for worker_id, (opened, idle) in readings.upstream_sockets().items():
            sockets.add_metric([worker_id, "active"], opened - idle)
            sockets.add_metric([worker_id, "idle"], idle)
        yield sockets
        yield GaugeMetricFamily(
            "warmroute_client_connections", "Open client connections", value=readings.client_connections()
        )

    def _process(self) -> Iterator[Metric]:
        readings = self._metrics.readings
        dropped = _counter("warmroute_telemetry_dropped", "Spans and log lines that were lost", "signal")
        for signal, value in readings.dropped().items():
            dropped.add_metric([signal], value)
        yield dropped
        build = _gauge("warmroute_build_info", "1, with the version as a label", "version")
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
            yield _histogram(
                "warmroute_gc_pause_seconds",
                "Pauses of Python's cyclic garbage collector",
                "generation",
                {(str(generation),): pauses for generation, pauses in enumerate(loop.gc_pauses)},
            )


_GENAI_LABELS = "gen_ai_request_model gen_ai_operation_name error_type"


def _counter(name: str, text: str, labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels.split())


def _gauge(name: str, text: str, labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels.split())


def _histogram(name: str, text: str, labels: str, histograms: Mapping[Any, Histogram]) -> HistogramMetricFamily:
    """One family of histograms, keyed by the tuple of their label values."""
    family = HistogramMetricFamily(name, text, labels=labels.split())
    for values, histogram in histograms.items():
        family.add_metric(values, histogram.cumulative(), histogram.sum)
    return family
