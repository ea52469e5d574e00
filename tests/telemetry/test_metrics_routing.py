"""Decisions, tokens, workers, exemplars and the second set of names on `/metrics`."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.config.schema import Capabilities
from gateway.fleet.worker import WorkerState
from gateway.telemetry.collector import QueueReading, Readings
from gateway.telemetry.histogram import DURATION_BOUNDS, Exemplar, Histogram
from gateway.telemetry.metrics import MAX_DECISIONS, Metrics, Outcome
from gateway.telemetry.reasons import Reason, reason_of
from policies.base import NO_MATCH, Candidate, Decision, Match

CHAT = "/v1/chat/completions"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@dataclass
class Reading:
    id: str
    state: WorkerState = WorkerState.READY
    in_flight: int = 0
    in_flight_tokens: int = 0
    pending: int = 0
    pending_tokens: int = 0
    weight: float = 1.0
    rate: float = 5000.0
    overhead: float = 0.02
    hold: float = 0.0
    capabilities: Capabilities = field(default_factory=Capabilities)


@pytest.fixture
def metrics():
    return Metrics(["m", "n"], [CHAT], ["w1", "w2"])


def fleet(metrics, *workers, **readings):
    metrics.readings = Readings(workers=lambda: [("m", worker) for worker in workers], **readings)


def samples(metrics, name, accept=None):
    """The values of one sample name by the values of its labels in alphabetical order of the labels' names."""
    body, content_type = metrics.render(accept)
    parse = parse_openmetrics if "openmetrics" in content_type else parse_text
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in parse(body.decode())
        for sample in family.samples
        if sample.name == name
    }


def exemplars(metrics, name, accept=OPENMETRICS):
    body, content_type = metrics.render(accept)
    parse = parse_openmetrics if "openmetrics" in content_type else parse_text
    return {
        sample.labels["le"]: (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in parse(body.decode())
        for sample in family.samples
        if sample.name == f"{name}_bucket" and sample.exemplar is not None
    }


def ended(metrics, duration, first_byte=None, trace_id=None, model="m"):
    metrics.request_started()
    metrics.request_ended(model, CHAT, 200, Outcome.COMPLETED, duration, first_byte, 10, None, trace_id)


# why


def decided(held, *others, attempt=0):
    """The reason of a decision for a worker that holds `held` tokens beside others; None: not even a candidate."""
    matches = {f"w{n}": Match(device=tokens) for n, tokens in enumerate((held, *others)) if tokens}
    candidates = [Candidate(None, matches.get(f"w{n}", NO_MATCH)) for n in range(1 + len(others))]
    return reason_of(Decision(candidates[0], candidates, (), "p"), matches, attempt)


@pytest.mark.parametrize(
    ("reason", "held", "others"),
    [
        (Reason.ONLY_ONE, 10, ()),
        (Reason.UNMATCHED, 0, (0, 0)),
        (Reason.HOLDS_MOST, 10, (5, 0)),
        (Reason.HOLDS_MOST, 10, (10, 0)),
        (Reason.HOLDS_LESS, 10, (0, 11)),
        (Reason.HOLDS_NONE, 0, (0, 1)),
    ],
)
def test_a_decision_has_one_reason(reason, held, others):
    assert decided(held, *others) is reason
    assert decided(held, *others, attempt=1) is Reason.RETRY


def test_tokens_in_any_tier_count_for_the_reason():
    matches = {"a": Match(device=5, l2=10), "b": Match(device=6, l1=8)}
    candidates = [Candidate(None, match) for match in matches.values()]
    assert reason_of(Decision(candidates[0], candidates, (), "p"), matches, 0) is Reason.HOLDS_MOST
    assert reason_of(Decision(candidates[1], candidates, (), "p"), matches, 0) is Reason.HOLDS_LESS


def test_decisions_are_counted_by_model_policy_and_reason_and_their_overhead_by_model(metrics):
    metrics.decided("m", "ttft", Reason.HOLDS_MOST, 0.0003)
    metrics.decided("m", "ttft", Reason.HOLDS_MOST, 0.03)
    metrics.decided("m", "kvaware", Reason.RETRY, 0.0001)
    metrics.decided("stranger", "ttft", Reason.UNMATCHED, 0.0001)
    assert samples(metrics, "warmroute_decisions_total") == {
        ("m", "ttft", "holds_most"): 2,
        ("m", "kvaware", "retry"): 1,
        ("_unknown", "ttft", "unmatched"): 1,
    }
    assert samples(metrics, "warmroute_gateway_overhead_seconds_count") == {("m",): 3, ("_unknown",): 1}
    buckets = samples(metrics, "warmroute_gateway_overhead_seconds_bucket")
    assert buckets["0.0005", "m"] == 2
    assert buckets["+Inf", "m"] == 3


def test_reloads_that_bring_new_policies_for_ever_do_not_grow_the_metrics_for_ever(metrics):
    for number in range(3 * MAX_DECISIONS):
        metrics.decided("m", f"policy{number}", Reason.UNMATCHED, 0.0001)
    assert len(metrics.decisions) <= MAX_DECISIONS + 1
    assert sum(samples(metrics, "warmroute_decisions_total").values()) == 3 * MAX_DECISIONS


# workers


def test_a_worker_has_the_tokens_and_waits_of_its_answers(metrics):
    fleet(metrics, Reading("w1"), Reading("w2"))
    metrics.answered("w1", 1000, 600, 50)
    metrics.answered("w1", 500, 0, 10)
    metrics.attempt_ended("w1", None, 0.25)
    metrics.attempt_ended("w1", None, 0.5)
    metrics.attempt_ended("w2", "upstream_connect")
    assert samples(metrics, "warmroute_worker_prompt_tokens_total") == {("m", "w1"): 1500}
    assert samples(metrics, "warmroute_worker_cached_tokens_total") == {("m", "w1"): 600}
    assert samples(metrics, "warmroute_worker_output_tokens_total") == {("m", "w1"): 60}
    assert samples(metrics, "warmroute_worker_time_to_first_byte_seconds_count") == {("m", "w1"): 2}
    assert samples(metrics, "warmroute_worker_time_to_first_byte_seconds_sum") == {("m", "w1"): 0.75}
    assert samples(metrics, "warmroute_attempts_total") == {
        ("", "m", "w1"): 2,
        ("upstream_connect", "m", "w2"): 1,
    }


def test_a_worker_that_goes_takes_its_series_with_it_and_leaves_its_sums(metrics):
    for number in range(300):
        worker = f"pod{number}"
        metrics.configured(["m"], [worker])
        fleet(metrics, Reading(worker), ejections=lambda worker=worker: {worker: 1})
        metrics.answered(worker, 10, 5, 2)
        metrics.attempt_ended(worker, None, 0.5)
    body, _ = metrics.render(None)
    assert {word for word in body.decode().replace('"', " ").split() if word.startswith("pod")} == {"pod299"}
    assert samples(metrics, "warmroute_worker_prompt_tokens_total") == {("", "_unknown"): 2990, ("m", "pod299"): 10}
    assert sum(samples(metrics, "warmroute_worker_time_to_first_byte_seconds_sum").values()) == 150


def test_slots_are_shown_where_they_are_known_and_never_more_taken_than_there_are(metrics):
    known = Capabilities(slots=4)
    fleet(
        metrics,
        Reading("w1", in_flight=9, capabilities=known),
        Reading("w2", in_flight=1, capabilities=known),
        Reading("w3", in_flight=5),
        Reading("w4", state=WorkerState.DRAINING, in_flight=2, capabilities=known),
    )
    assert samples(metrics, "warmroute_worker_slots") == {("m", "w1"): 4, ("m", "w2"): 4, ("m", "w4"): 4}
    assert samples(metrics, "warmroute_worker_slots_used") == {("m", "w1"): 4, ("m", "w2"): 1, ("m", "w4"): 2}
    assert samples(metrics, "warmroute_fleet_slots") == {("m",): 8}
    assert samples(metrics, "warmroute_fleet_slots_used") == {("m",): 5}


def test_a_fleet_of_unknown_slots_has_no_such_series_and_an_empty_queue_is_zero(metrics):
    fleet(metrics, Reading("w1", pending=2, pending_tokens=700))
    assert samples(metrics, "warmroute_fleet_slots") == {}
    assert samples(metrics, "warmroute_queue_requests") == {("m",): 0}
    assert samples(metrics, "warmroute_worker_requests_pending") == {("m", "w1"): 2}
    assert samples(metrics, "warmroute_worker_prompt_tokens_pending") == {("m", "w1"): 700}


def test_an_autoscaler_sees_queue_age_and_predicted_misses(metrics):
    fleet(metrics, Reading("w1"), queues=lambda: {"m": QueueReading(4, 7.5, 1)}, ejections=lambda: {"w1": 3})
    assert samples(metrics, "warmroute_queue_requests") == {("m",): 4}
    assert samples(metrics, "warmroute_queue_oldest_seconds") == {("m",): 7.5}
    assert samples(metrics, "warmroute_queue_deadline_misses") == {("m",): 1}
    assert samples(metrics, "warmroute_worker_ejections_total") == {("m", "w1"): 3}


def test_a_snapshot_does_not_move_with_what_it_was_taken_of(metrics):
    worker = Reading("w1", in_flight=1)
    fleet(metrics, worker)
    metrics.hyperpod = {}
    ended(metrics, 0.5, 0.1)
    metrics.attempt_ended("w1", None, 0.1)
    metrics.answered("w1", 10, 5, 2)
    metrics.decided("m", "p", Reason.UNMATCHED, 0.001)
    expected = metrics.render(OPENMETRICS)
    snapshot = metrics.snapshot()
    worker.in_flight = 7
    ended(metrics, 1.5, 0.1, trace_id="ab" * 16)
    metrics.attempt_ended("w1", None, 0.1)
    metrics.answered("w1", 10, 5, 2)
    metrics.decided("m", "p", Reason.UNMATCHED, 0.001)
    assert snapshot.render(OPENMETRICS) == expected


# pace


def test_the_pace_of_a_stream_leaves_its_first_token_out(metrics):
    metrics.streamed("m", 1.0, 11)
    metrics.streamed("m", 1.0, 1)
    metrics.streamed("m", 0.0, 0)
    assert samples(metrics, "gen_ai_server_time_per_output_token_seconds_count") == {("m",): 1}
    assert samples(metrics, "gen_ai_server_time_per_output_token_seconds_sum") == {("m",): 0.1}


def test_a_stream_is_counted_by_its_longest_silence(metrics):
    metrics.paused("m", 0.03)
    metrics.paused("m", 4.0)
    buckets = samples(metrics, "warmroute_stream_longest_gap_seconds_bucket")
    assert buckets["0.05", "m"] == 1
    assert buckets["5.0", "m"] == 2


def test_what_was_learned_of_a_worker_is_shown_and_its_hold_once_it_is_known(metrics):
    fleet(metrics, Reading("w1"), Reading("w2", rate=900.0, overhead=0.5, hold=4.0))
    assert samples(metrics, "warmroute_worker_prefill_rate") == {("m", "w1"): 5000.0, ("m", "w2"): 900.0}
    assert samples(metrics, "warmroute_worker_prefill_overhead_seconds") == {("m", "w1"): 0.02, ("m", "w2"): 0.5}
    assert samples(metrics, "warmroute_worker_slot_hold_seconds") == {("m", "w2"): 4.0}


# exemplars


def test_a_recorded_trace_is_an_exemplar_of_its_buckets(metrics):
    ended(metrics, 2.0, 0.3, trace_id="0a" * 16)
    ended(metrics, 100.0, 50.0)
    assert exemplars(metrics, "gen_ai_server_request_duration_seconds") == {"2.56": ("0a" * 16, 2.0)}
    assert exemplars(metrics, "gen_ai_server_time_to_first_token_seconds") == {"0.5": ("0a" * 16, 0.3)}


def test_exemplars_are_in_openmetrics_only(metrics):
    ended(metrics, 2.0, 0.3, trace_id="0a" * 16)
    assert b"0a0a" not in metrics.render(None)[0]
    assert samples(metrics, "gen_ai_server_request_duration_seconds_count") == {("", "chat", "m"): 1}


@given(st.lists(st.tuples(st.floats(0, 400), st.integers(0, 9)), max_size=40))
def test_a_bucket_keeps_the_latest_exemplar_that_lies_in_it_however_series_are_merged(values):
    halves = Histogram(DURATION_BOUNDS), Histogram(DURATION_BOUNDS)
    for index, (value, when) in enumerate(values):
        halves[index % 2].observe(value)
        halves[index % 2].keep(Exemplar(f"{index:032x}", value, when))
    merged = Histogram(DURATION_BOUNDS)
    for half in halves:
        merged.add(half)
    bounds = (*DURATION_BOUNDS, float("inf"))
    for index, exemplar in merged.exemplars.items():
        lower = bounds[index - 1] if index else -1.0
        assert lower < exemplar.value <= bounds[index]
        assert exemplar.time == max(when for value, when in values if lower < value <= bounds[index])
    assert {index for index, count in enumerate(merged.counts) if count} == set(merged.exemplars)


# HyperPod's names


def test_hyperpods_names_are_shown_only_when_wanted(metrics):
    fleet(metrics, Reading("w1"))
    assert b"model_invocations" not in metrics.render(None)[0]


def test_hyperpods_names_say_what_ours_say(metrics):
    fleet(metrics, Reading("w1", in_flight=2), Reading("w2"))
    metrics.hyperpod = {"cluster_name": "prod"}
    for error_type in (None, None, "upstream_reset", "503", "client_disconnect", "stale_connection"):
        metrics.attempt_ended("w1", error_type)
    ended(metrics, 2.0, 0.25)
    pods = ("prod", "reverse-proxy", "m")
    assert samples(metrics, "model_invocations_total") == {(*pods, "w1"): 8, (*pods, "w2"): 0}
    assert samples(metrics, "model_errors_total") == {(*pods, "w1"): 2, (*pods, "w2"): 0}
    assert samples(metrics, "model_concurrent_requests") == {(*pods, "w1"): 2, (*pods, "w2"): 0}
    assert samples(metrics, "model_latency_milliseconds_sum") == {pods: 2000.0}
    assert samples(metrics, "model_ttfb_milliseconds_sum") == {pods: 250.0}
    assert samples(metrics, "model_latency_milliseconds_bucket")["prod", "2560.0", "reverse-proxy", "m"] == 1
    assert samples(metrics, "model_latency_milliseconds_bucket")["prod", "1280.0", "reverse-proxy", "m"] == 0
