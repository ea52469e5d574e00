"""What is kept of requests, for how long, and what is told of them."""

import asyncio
import gc
import weakref

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.registry import driver_named
from gateway.config.schema import Decisions
from gateway.fleet.worker import Worker
from gateway.http.usage import Usage
from gateway.prompt.prompt import How
from gateway.telemetry.decisions import DecisionLog
from gateway.telemetry.pace import Gaps
from gateway.telemetry.record import stripped
from gateway.telemetry.spans import Trace
from policies.base import Match, RouteRequest

KEYS = {
    *("id", "trace_id", "span_id", "sampled", "time", "model", "path", "stream", "tenant", "stage", "policy"),
    *("prompt", "timings", "candidates", "chosen", "reason", "attempts", "predicted", "actual", "gaps", "hints"),
    *("bytes_in", "bytes_out", "status", "outcome", "error"),
}


@pytest.fixture
def workers():
    made = [
        Worker(url=f"http://10.0.0.{n}:8000", driver=driver_named("vllm"), model="m", worker_id=f"w{n}")
        for n in (1, 2, 3)
    ]
    for worker in made:
        worker.routable = True
    return made


@pytest.fixture
def log():
    return DecisionLog(Decisions(count=8, bytes=1 << 20, slow=2.0))


def test_a_document_has_every_member_and_is_json(finished, decided, workers):
    record = finished(
        Trace(7, 8, 3),
        [
            {"worker": workers[0], "error": "upstream_connect"},
            {"worker": workers[1], "status": 200, "first_byte": 0.05},
        ],
        decisions=[decided(workers), decided(workers[1:])],
        usage=Usage(100, 20, 64),
        gaps=Gaps(0.02, 0.03, 0.5, 19),
        prompt_tokens=100,
        how=How.EXACT,
    )
    document = record.document()
    assert document.keys() == KEYS | {"earlier"}
    assert orjson.loads(orjson.dumps(document)) == document
    assert document["trace_id"] == f"{7:032x}"
    assert document["span_id"] == f"{8:016x}"
    assert document["sampled"] is True
    assert [row["worker"] for row in document["candidates"]] == ["w2", "w3"]
    assert [attempt["error"] for attempt in document["attempts"]] == ["upstream_connect", None]
    assert document["actual"] == {"ttft": None, "cached_tokens": 64, "prompt_tokens": 100, "output_tokens": 20}
    assert document["gaps"] == {"p50": 0.02, "p95": 0.03, "max": 0.5, "count": 19}
    assert document["prompt"] == {"tokens": 100, "how": "exact", "why": None, "seconds": 0.0, "where": "loop"}
    assert document["earlier"][0]["chosen"] in {"w1", "w2", "w3"}


def test_a_request_that_never_got_anywhere_has_the_same_members(finished):
    record = finished(None, [], model="", policy="", read=0.0, status=404, error_type="model_not_found")
    document = record.document()
    assert document.keys() == KEYS
    assert document["candidates"] == []
    assert document["timings"]["read"] is document["timings"]["decide"] is document["timings"]["connect"] is None
    assert document["error"] == {"type": "model_not_found", "message": None}


def test_the_table_shows_the_load_and_the_costs_of_then(finished, decided, workers):
    workers[0].acquire(500)
    workers[0].acquire(700)
    workers[1].acquire(100)
    record = finished(None, decisions=[decided(workers)])
    for worker in workers:
        for _ in range(5):
            worker.acquire(9000)
        worker.routable = False
    rows = {row["worker"]: row for row in record.document()["candidates"]}
    assert [rows[name]["load"]["in_flight"] for name in ("w1", "w2", "w3")] == [2, 1, 0]
    assert [rows[name]["load"]["pending_tokens"] for name in ("w1", "w2", "w3")] == [1200, 100, 0]
    assert [rows[name]["cost"] for name in ("w1", "w2", "w3")] == [2.0, 1.0, 0.0]
    assert [rows[name]["chosen"] for name in ("w1", "w2", "w3")] == [False, False, True]
    assert all(sum(row["terms"].values()) == row["cost"] for row in rows.values())


def test_a_worker_that_a_filter_dropped_is_in_the_table_with_the_filters_name(finished, decided, workers):
    workers[1].routable = False
    document = finished(None, decisions=[decided(workers)]).document()
    assert [row["rejected_by"] for row in document["candidates"]] == [None, "healthy", None]
    assert document["candidates"][1]["cost"] is None


def test_a_decision_that_found_nobody_says_whom_it_asked_and_why_not(finished, decided, workers):
    for worker in workers:
        worker.routable = False
    document = finished(None, [], decisions=[decided(workers)]).document()
    assert document["chosen"] is None
    assert [row["rejected_by"] for row in document["candidates"]] == ["healthy"] * 3
    assert document["reason"].startswith("None of 3 workers")


def test_matches_and_predicted_hits_are_those_of_the_decision(finished, decided, workers):
    match = Match(device=64, l1=32, source="event")
    decisions = [decided(workers, "kvaware", 200, {"w2": match})]
    document = finished(None, decisions=decisions, prompt_tokens=200, how=How.EXACT).document()
    assert document["candidates"][1]["match"] == {"device": 64, "l1": 32, "l2": 0, "source": "event"}
    assert document["chosen"] == "w2"
    assert document["predicted"]["cached_tokens"] == 96


def test_a_policy_whose_turn_has_moved_on_does_not_change_what_was_decided(finished, decided, workers):
    noted = decided(workers, "roundrobin")
    chosen = noted.decision.chosen.worker.id
    noted.policy.decide(noted.request, noted.candidates)
    document = finished(None, decisions=[noted]).document()
    assert document["chosen"] == chosen
    assert chosen in document["reason"]
    assert dict(zip(("w1", "w2", "w3"), noted.decision.costs, strict=True)) == {
        row["worker"]: row["cost"] for row in document["candidates"]
    }


def test_a_policy_that_cannot_explain_itself_leaves_a_table_without_terms(finished, decided, workers):
    noted = decided(workers)

    class Plain:
        name = "plain"

        def decide(self, request, candidates):
            raise AssertionError

    noted.policy = Plain()
    document = finished(None, decisions=[noted]).document()
    assert [row["cost"] for row in document["candidates"]] == [0.0, 0.0, 0.0]
    assert all(row["terms"] == {} for row in document["candidates"])
    assert "3 candidates" in document["reason"]


def test_nothing_big_or_private_of_a_request_is_kept():
    class Text(str):
        __slots__ = ("__weakref__",)

    prompt = Text("secret " * 1000)
    alive = weakref.ref(prompt)
    body = {"model": "m", "prompt": prompt, "user": "u" * 5000, "session_id": "s", "max_tokens": 5, "tools": [1]}
    headers = {"authorization": "Bearer k", "cookie": "session_id=c", "x-session-id": "s1"}
    request = RouteRequest(model="m", body=body, headers=headers)
    stripped(request)
    del body, prompt
    gc.collect()
    assert alive() is None
    assert request.body == {"model": "m", "session_id": "s", "max_tokens": 5}
    assert request.headers == {"x-session-id": "s1"}


def test_errors_and_slow_ones_outlive_the_others(log, finished):
    broken = finished(None, request_id=b"broken", error_type="upstream_reset")
    slow = finished(None, request_id=b"slow")
    slow.first_byte = slow.start + 2.5
    log.add(broken)
    log.add(slow)
    for number in range(100):
        log.add(finished(None, request_id=b"%d" % number))
    assert [record.id for record in log.recent(100)] == [*map(str, reversed(range(92, 100))), "slow", "broken"]
    assert log.get("broken") is broken
    assert log.get("5") is None


def test_a_ring_without_room_keeps_nothing(finished):
    log = DecisionLog(Decisions(count=0))
    log.add(finished(None))
    assert log.recent(10) == []


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=60),
    errors=st.sets(st.integers(0, 59)),
    count=st.integers(0, 20),
    room=st.integers(0, 60_000),
)
def test_the_rings_stay_within_number_and_bytes(sizes, errors, count, room):
    log = DecisionLog(Decisions(count=count, bytes=room))
    records = [_Sized(2000 + 100 * size, number in errors) for number, size in enumerate(sizes)]
    for record in records:
        log.add(record)
        for ring, limit, most in ((log._recent, room, count), (log._kept, room // 4, count // 4)):
            assert len(ring.records) <= most
            assert sum(each.size for each in ring.records) <= limit
    found = [id(record) for record in log.recent(1000)]
    assert len(set(found)) == len(found)


class _Sized:
    def __init__(self, size, error):
        self.size = size
        self.error_type = "e" if error else None
        self.start = self.end = 1.0
        self.first_byte = 0.0
        self.kept_bytes = 0


def test_requests_are_found_by_what_they_were(log, finished, workers):
    first = finished(Trace(7, 8, 3), [{"worker": workers[0]}], request_id=b"1", model="a")
    second = finished(None, [{"worker": workers[0]}, {"worker": workers[1]}], request_id=b"2", model="b")
    third = finished(None, [], request_id=b"3", model="a", error_type="model_not_found", stage="planner")
    second.first_byte = second.start + 0.9
    first.first_byte = first.start + 0.1
    for record in (first, second, third):
        log.add(record)
    assert log.recent(2) == [third, second]
    assert log.recent(9, error=True) == log.recent(9, error="model_not_found") == [third]
    assert log.recent(9, error=False) == [second, first]
    assert log.recent(9, worker="w2") == [second]
    assert log.recent(9, model="a") == [third, first]
    assert log.recent(9, stage="planner") == [third]
    assert log.recent(9, slower_than=0.5) == [third, second]
    assert log.recent(9, trace_id=f"{7:032x}") == [first]


async def test_a_subscriber_gets_records_as_they_end(log, finished):
    first, second = finished(None), finished(None)
    with log.subscribe() as records:
        log.add(first)
        asyncio.get_running_loop().call_soon(log.add, second)
        assert await anext(records) is first
        assert await asyncio.wait_for(anext(records), 5) is second
    log.add(first)
    assert records.dropped == 0
    assert not records._records


async def test_a_subscriber_that_does_not_read_loses_the_oldest_and_is_told(log, finished):
    with log.subscribe() as records:
        for number in range(1005):
            log.add(finished(None, request_id=b"%d" % number))
        assert records.dropped == 5
        assert (await anext(records)).id == "5"


def test_of_more_requests_than_can_be_looked_at_a_sample_is_kept():
    log = DecisionLog(Decisions(count=10, per_second=4))
    assert sum(log.wants(0.1, None, 100.0) for _ in range(50)) == 10
    assert sum(log.wants(0.1, None, 100.0 + number / 100) for number in range(1, 501)) == 20
    assert log.passed == 520


def test_errors_and_slow_requests_are_always_kept():
    log = DecisionLog(Decisions(count=1, per_second=1, slow=2.0))
    assert log.wants(0.1, None, 100.0)
    assert not log.wants(0.1, None, 100.0)
    assert log.wants(0.1, "upstream_reset", 100.0)
    assert log.wants(2.5, None, 100.0)


def test_without_a_rate_every_request_is_kept():
    log = DecisionLog(Decisions(count=1, per_second=0))
    assert all(log.wants(0.0, None, 5.0) for _ in range(1000))
