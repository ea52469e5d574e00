"""How many seconds of prefill are before a new request, and what requests teach of a worker's speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import Capabilities
from gateway.fleet.worker import Worker
from policies.base import Match


def make(**section):
    section = {"prefill_rate": 1000.0, "overhead": 0.5, "prefill": "exclusive"} | section
    return Worker(url="http://127.0.0.1:1", driver=None, model="m", capabilities=Capabilities(**section))


def wait(worker, now):
    """Seconds until a new prompt would start, as policies reckon."""
    return worker.backlog - min(now - worker.prefill_since, worker.head) if worker.backlog else 0.0


def test_prompts_are_computed_one_after_another_and_time_passes():
    worker = make()
    first, second = worker.acquire(1000, now=10.0), worker.acquire(2000, 500, now=10.5)
    assert worker.backlog == pytest.approx(1.5 + 1.0)
    assert wait(worker, 11.0) == pytest.approx(1.5)
    assert wait(worker, 99.0) == pytest.approx(1.0)  # the first one is late; the second has not begun
    first.first_byte(12.0)
    assert (worker.backlog, worker.prefill_since) == (pytest.approx(1.0), 12.0)
    second.release(13.0)
    first.release(20.0)
    assert (worker.backlog, worker.prefill_since, worker.pending_padded) == (0.0, 0.0, 0)


def test_what_is_padded_and_loaded_counts():
    worker = make(prefill_buckets=(1024, 2048), block_size=32, kv_bytes_per_token=1_000_000)
    worker.acquire(3000, match=Match(device=1500), now=1.0)
    assert worker.pending_padded == 2048
    assert worker.backlog == pytest.approx(0.5 + 2.048)
    worker = make()
    worker.acquire(1000, match=Match(l1=900), now=1.0)
    assert worker.backlog == pytest.approx(0.5 + 0.1 + worker.capabilities.load_seconds(900, 0))


def test_an_answer_that_is_no_stream_is_not_waited_for():
    worker = make()
    worker.acquire(1000, now=10.0, streamed=False)
    worker.acquire(1000, now=10.0, streamed=False)
    assert wait(worker, 10.5) == pytest.approx(2.5)
    assert wait(worker, 14.0) == 0.0
    worker.acquire(1000, now=20.0, streamed=False)
    assert wait(worker, 20.5) == pytest.approx(1.0)
    last = worker.acquire(1000, now=20.5)
    last.first_byte(22.0)
    assert worker.backlog == 0.0


@given(st.lists(st.tuples(st.sampled_from("abf"), st.integers(0, 5), st.booleans(), st.floats(0, 3)), max_size=60))
def test_whatever_happens_the_count_is_that_of_what_is_left(steps):
    worker = make()
    leases, now = [], 1.0
    for kind, which, streamed, seconds in steps:
        now += seconds
        if kind == "a" or not leases:
            leases.append(worker.acquire(1000 * which, now=now, streamed=streamed))
        elif kind == "f":
            leases[which % len(leases)].first_byte(now)
        else:
            leases.pop(which % len(leases)).release(now)
        assert worker.backlog >= worker.head - 1e-9 >= -1e-9
        assert wait(worker, now) >= -1e-9
    for lease in leases:
        lease.release(now)
    assert (worker.in_flight, worker.pending, worker.pending_padded) == (0, 0, 0)
    assert (worker.backlog, worker.head, worker.prefill_since) == (0.0, 0.0, 0.0)


def serve(worker, prompts, rate, now=100.0, stream=1.0):
    """Prompts one by one, each prefilled at `rate` after half a second."""
    for prompt in prompts:
        lease = worker.acquire(prompt, now=now)
        now += 0.5 + prompt / rate
        lease.first_byte(now)
        now += stream
        lease.release(now)
    return now


def test_a_worker_s_speed_is_learned_and_forgotten_when_it_restarts():
    worker = make()
    serve(worker, range(1000, 9000, 200), 4000.0)
    assert worker.rate == pytest.approx(4000, rel=0.01)
    assert worker.overhead == pytest.approx(0.5, rel=0.05)
    assert worker.hold == pytest.approx(0.5 + 1.0 + 5000 / 4000, rel=0.3)
    worker.restarted()
    assert (worker.rate, worker.overhead, worker.hold) == (1000.0, 0.5, 0.0)


def test_other_capabilities_with_the_same_speed_forget_nothing():
    worker = make()
    serve(worker, range(1000, 9000, 200), 4000.0)
    learned = worker.rate
    worker.adopt(
        worker.capabilities.configured(Capabilities(prefill_rate=1000.0, overhead=0.5, prefill="exclusive", slots=7))
    )
    assert worker.rate == learned
    worker.adopt(worker.capabilities.configured(Capabilities(prefill_rate=2000.0, overhead=0.5)))
    assert worker.rate == 2000.0


def test_whole_answers_and_unknown_times_teach_no_speed():
    worker = make()
    serve(worker, range(1000, 9000, 200), 4000.0, stream=0.0)
    assert (worker.rate, worker.overhead) == (1000.0, 0.5)
    for _ in range(20):
        lease = worker.acquire(1000)
        lease.first_byte()
        lease.release()
    assert (worker.rate, worker.overhead, worker.prefill_since) == (1000.0, 0.5, 0.0)


def test_a_snapshot_stays_as_it_was_and_is_taken_once():
    worker = make()
    before = worker.snapshot()
    assert worker.snapshot() is before
    lease = worker.acquire(1000, now=1.0)
    assert (before.in_flight, worker.snapshot().in_flight) == (0, 1)
    assert worker.snapshot().backlog == worker.backlog
    for change in (lambda: lease.first_byte(2.0), lambda: lease.release(3.0)):
        last = worker.snapshot()
        change()
        assert worker.snapshot() is not last
    for name, value in (("routable", True), ("weight", 0.5)):
        setattr(worker, name, value)
        assert getattr(worker.snapshot(), name) == value
