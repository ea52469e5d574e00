import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.config.schema import Capabilities
from gateway.fleet.worker import WorkerState
from gateway.tasks import TaskGroup
from gateway.telemetry.collector import Readings
from gateway.telemetry.histogram import DURATION_BOUNDS, FIRST_TOKEN_BOUNDS, Histogram
from gateway.telemetry.loop import LoopMonitor
from gateway.telemetry.metrics import MAX_VALUES, Metrics, Outcome

CHAT = "/v1/chat/completions"
OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5"


def scraped(metrics, accept=None):
    """Samples of a scrape: (name, labels as a frozenset of pairs) → value."""
    body, content_type = metrics.render(accept)
    parse = parse_openmetrics if "openmetrics" in content_type else parse_text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(body.decode())
        for sample in family.samples
    }


def value(samples, name, **labels):
    """The sample with exactly these labels, apart from empty ones."""
    (found,) = [
        one for (sample, pairs), one in samples.items() if sample == name and {k: v for k, v in pairs if v} == labels
    ]
    return found


def total(samples, name, **labels):
    """The sum of the samples that have at least these labels."""
    return sum(
        one for (sample, pairs), one in samples.items() if sample == name and labels.items() <= dict(pairs).items()
    )


def ended(
    metrics,
    *,
    model="m",
    path=CHAT,
    status=200,
    outcome=Outcome.COMPLETED,
    duration=0.5,
    first_byte=0.1,
    error_type=None,
):
    metrics.request_ended(model, path, status, outcome, duration, first_byte, 100, error_type)


@pytest.fixture
def metrics():
    return Metrics(["m", "n"], [CHAT, "/v1/embeddings"], ["w1", "w2"], "1.2.3")


class Conservation(RuleBasedStateMachine):
    """Requests that start and end in any order, with any labels, beside a model that is a list."""

    def __init__(self):
        super().__init__()
        self.metrics = Metrics(["m", "n"], [CHAT], ["w1"])
        self.started = 0
        self.requests = []
        self.attempts = []

    @rule()
    def start(self):
        self.metrics.request_started()
        self.started += 1

    @precondition(lambda self: self.started > len(self.requests))
    @rule(
        model=st.sampled_from(["m", "n", "stranger"]),
        path=st.sampled_from([CHAT, "/evil"]),
        status=st.sampled_from([0, 200, 404, 503, 9999, -1]),
        outcome=st.sampled_from(Outcome),
        duration=st.floats(0, 1000),
        first_byte=st.none() | st.floats(0, 1000),
        bytes_out=st.integers(0, 10**9),
        error_type=st.none() | st.sampled_from(["upstream_connect", "client_disconnect"]),
    )
    def end(self, **request):
        self.metrics.request_ended(**request)
        self.requests.append(request)

    @rule(worker=st.sampled_from(["w1", "stranger"]), error_type=st.none() | st.just("upstream_connect"))
    def attempt(self, worker, error_type):
        self.metrics.attempt_ended(worker, error_type)
        self.attempts.append((worker if worker == "w1" else "_unknown", error_type or ""))

    @invariant()
    def what_a_scrape_shows_is_what_happened(self):
        samples = scraped(self.metrics)
        by_outcome = {one: total(samples, "warmroute_requests_total", outcome=one.value) for one in Outcome}
        in_flight = value(samples, "warmroute_requests_in_flight")
        assert value(samples, "warmroute_requests_accepted_total") == self.started
        assert self.started == sum(by_outcome.values()) + in_flight
        assert by_outcome == {one: sum(r["outcome"] is one for r in self.requests) for one in Outcome}
        sizes = Counter()
        for request in self.requests:
            sizes[request["model"] if request["model"] in "mn" else "_unknown"] += request["bytes_out"]
        for model, size in sizes.items():
            assert total(samples, "warmroute_response_bytes_total", model=model) == size
        durations = "gen_ai_server_request_duration_seconds"
        assert total(samples, f"{durations}_count") == len(self.requests)
        assert total(samples, f"{durations}_sum") == pytest.approx(sum(r["duration"] for r in self.requests))
        first = [r["first_byte"] for r in self.requests if r["first_byte"] is not None]
        assert total(samples, "gen_ai_server_time_to_first_token_seconds_count") == len(first)
        assert total(samples, "gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(sum(first))
        for bound in (0.01, 1.28, 300.0):
            below = sum(r["duration"] <= bound for r in self.requests)
            assert total(samples, f"{durations}_bucket", le=str(bound)) == below
        for (worker, error_type), count in Counter(self.attempts).items():
            assert total(samples, "warmroute_attempts_total", worker=worker, error_type=error_type) == count


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@given(values=st.lists(st.floats(0, 400) | st.sampled_from(DURATION_BOUNDS), max_size=50))
def test_a_bucket_counts_the_values_up_to_its_bound(values):
    histogram = Histogram(DURATION_BOUNDS)
    for one in values:
        histogram.observe(one)
    assert histogram.cumulative() == [
        *((repr(bound), sum(one <= bound for one in values)) for bound in DURATION_BOUNDS),
        ("+Inf", len(values)),
    ]


def test_the_buckets_reach_from_milliseconds_to_five_minutes():
    for bounds in (DURATION_BOUNDS, FIRST_TOKEN_BOUNDS):
        assert list(bounds) == sorted(set(bounds))
        assert bounds[0] <= 0.01
        assert bounds[-1] == 300.0


def test_what_a_client_chooses_never_becomes_a_label(metrics):
    for number in range(1000):
        metrics.request_started()
        ended(metrics, model=f"evil{number}", path=f"/evil/{number}", status=10_000 + number)
        metrics.attempt_ended(f"worker{number}", None)
    assert len(metrics.requests) == len(metrics.attempts) == 1
    samples = scraped(metrics)
    labels = {"model": "_unknown", "path": "_other", "status": "0", "outcome": "completed"}
    assert value(samples, "warmroute_requests_total", **labels) == 1000
    assert value(samples, "warmroute_attempts_total", worker="_unknown") == 1000


def test_error_types_and_reasons_stay_few_though_somebody_put_data_in_them(metrics):
    for number in range(10 * MAX_VALUES):
        metrics.request_started()
        ended(metrics, outcome=Outcome.FAILED, error_type=f"oops{number}")
        metrics.attempt_ended("w1", f"oops{number}")
        metrics.retry(f"oops{number}")
        metrics.refused(f"oops{number}")
    for series in (metrics.requests, metrics.attempts, metrics.retries, metrics.refusals):
        assert len(series) <= MAX_VALUES + 1
    samples = scraped(metrics)
    for name in ("requests", "attempts", "retries", "refused"):
        assert total(samples, f"warmroute_{name}_total") == 10 * MAX_VALUES


def test_workers_that_come_and_go_leave_their_total_but_no_label(metrics):
    for number in range(500):
        metrics.configured(["m"], [f"pod{number}"])
        metrics.attempt_ended(f"pod{number}", None)
    assert len(metrics.attempts) <= 2
    assert total(scraped(metrics), "warmroute_attempts_total") == 500


def test_a_new_configuration_keeps_what_was_counted(metrics):
    metrics.request_started()
    ended(metrics, model="n")
    metrics.configured(["m", "new"], ["w1"])
    metrics.request_started()
    ended(metrics, model="new")
    samples = scraped(metrics)
    for model in ("n", "new"):
        assert total(samples, "warmroute_requests_total", model=model) == 1


def test_retries_refusals_and_reloads_are_counted(metrics):
    metrics.retry("upstream_connect")
    metrics.retry("upstream_connect")
    metrics.refused("model_not_found")
    metrics.reloads = {True: 1, False: 2}
    samples = scraped(metrics)
    assert value(samples, "warmroute_retries_total", reason="upstream_connect") == 2
    assert value(samples, "warmroute_refused_total", error_type="model_not_found") == 1
    assert value(samples, "warmroute_config_reloads_total", result="ok") == 1
    assert value(samples, "warmroute_config_reloads_total", result="failed") == 2


def test_a_request_is_in_the_genai_histograms_under_its_operation(metrics):
    metrics.request_started()
    ended(metrics, duration=2.0, first_byte=0.3)
    metrics.request_started()
    ended(metrics, path="/v1/embeddings", duration=0.005, first_byte=None)
    samples = scraped(metrics)
    labels = {"gen_ai_request_model": "m", "gen_ai_operation_name": "chat"}
    assert value(samples, "gen_ai_server_request_duration_seconds_bucket", le="1.28", **labels) == 0
    assert value(samples, "gen_ai_server_request_duration_seconds_bucket", le="2.56", **labels) == 1
    assert value(samples, "gen_ai_server_time_to_first_token_seconds_sum", **labels) == 0.3
    labels["gen_ai_operation_name"] = "embeddings"
    assert value(samples, "gen_ai_server_request_duration_seconds_bucket", le="0.01", **labels) == 1
    assert value(samples, "gen_ai_server_time_to_first_token_seconds_count", **labels) == 0


@dataclass
class Reading:
    id: str
    state: WorkerState
    in_flight: int = 0
    in_flight_tokens: int = 0
    weight: float = 1.0
    pending: int = 0
    pending_tokens: int = 0
    rate: float = 5000.0
    overhead: float = 0.02
    hold: float = 0.0
    capabilities: Capabilities = field(default_factory=Capabilities)


def test_readings_are_taken_at_the_scrape(metrics):
    workers = [("m", Reading("w1", WorkerState.READY, 3, 4000)), ("m", Reading("w2", WorkerState.EJECTED, weight=0.5))]
    loop = LoopMonitor()
    loop.lag.add(0.2)
    loop.lag.add(0.1)
    loop.gc_pauses[2].observe(0.02)
    metrics.readings = Readings(
        workers=lambda: workers,
        upstream_sockets=lambda: {"w1": (5, 2)},
        client_connections=lambda: 17,
        dropped=lambda: {"spans": 4, "logs": 5},
        loop=loop,
    )
    samples = scraped(metrics)
    assert value(samples, "warmroute_worker_requests_in_flight", worker="w1", model="m") == 3
    assert value(samples, "warmroute_worker_prompt_tokens_in_flight", worker="w1", model="m") == 4000
    assert value(samples, "warmroute_worker_weight", worker="w2", model="m") == 0.5
    assert value(samples, "warmroute_upstream_connections", worker="w1", state="active") == 3
    assert value(samples, "warmroute_upstream_connections", worker="w1", state="idle") == 2
    assert value(samples, "warmroute_client_connections") == 17
    assert value(samples, "warmroute_telemetry_dropped_total", signal="spans") == 4
    assert value(samples, "warmroute_telemetry_dropped_total", signal="logs") == 5
    assert value(samples, "warmroute_event_loop_lag_seconds") == 0.1
    assert value(samples, "warmroute_event_loop_lag_max_seconds") == 0.2
    assert value(samples, "warmroute_gc_pause_seconds_sum", generation="2") == 0.02
    assert value(samples, "process_resident_memory_bytes") > 10_000_000
    assert value(samples, "warmroute_build_info", version="1.2.3") == 1
    workers[0][1].in_flight = 0
    assert value(scraped(metrics), "warmroute_worker_requests_in_flight", worker="w1", model="m") == 0


def test_a_worker_is_in_exactly_one_state(metrics):
    metrics.readings = Readings(workers=lambda: [("m", Reading(one.name, one)) for one in WorkerState])
    samples = scraped(metrics)
    for worker in WorkerState:
        for state in WorkerState:
            labels = {"worker": worker.name, "model": "m", "state": state.value}
            assert value(samples, "warmroute_worker_state", **labels) == (worker is state)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4; charset=utf-8"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"),
    ],
)
def test_the_format_is_what_the_scraper_accepts(metrics, accept, content_type):
    assert metrics.render(accept)[1] == content_type


def test_both_formats_say_the_same(metrics):
    metrics.request_started()
    ended(metrics)
    metrics.request_started()
    assert scraped(metrics) == scraped(metrics, OPENMETRICS)
    assert metrics.render(OPENMETRICS)[0].endswith(b"# EOF\n")


def test_two_processes_parts_share_nothing_and_the_global_registry_stays_empty_of_us(metrics):
    other = Metrics(["m"], [CHAT])
    metrics.request_started()
    assert value(scraped(other), "warmroute_requests_accepted_total") == 0
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("warmroute")]


async def test_a_scrape_shows_one_moment_though_its_text_is_made_later_in_a_thread(metrics):
    loop = asyncio.get_running_loop()
    free = threading.Event()
    tasks = TaskGroup("test")
    with ThreadPoolExecutor(1) as executor:
        loop.set_default_executor(executor)
        executor.submit(free.wait, 10)
        metrics.request_started()
        expected = metrics.render(None)
        scrape = tasks.spawn("scrape", metrics.scrape(None))
        await asyncio.sleep(0)
        for _ in range(100):
            metrics.request_started()
            ended(metrics)
        free.set()
        assert await scrape == expected
    assert metrics.render(None) != expected
