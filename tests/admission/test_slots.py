"""Room at a worker: slots, limits, pacing."""

from math import inf

import pytest

from gateway.admission.slots import capacity, opens_at, paced, places, remaining, total
from gateway.config.schema import WorkerLimits


@pytest.mark.parametrize(
    ("slots", "limit", "expected"), [(4, None, 4), (4, 2, 2), (4, 9, 4), (None, 3, 3), (None, None, inf)]
)
def test_the_smaller_of_slots_and_limit_counts(worker, slots, limit, expected):
    one = worker("w0", slots)
    assert capacity(one, {"w0": WorkerLimits(max_concurrent=limit)}) == expected


def test_a_fleets_slots_are_those_of_workers_that_take_requests(worker):
    three = [worker(f"w{index}", 4) for index in range(3)]
    three[1].routable = False
    assert total(three, {}) == 8


def test_what_remains_of_the_prefill_under_way_shrinks_with_time_but_never_by_more_than_it(worker):
    one = worker("w0", 8)
    one.acquire(2000, now=10.0)
    one.acquire(1000, now=10.0)
    assert remaining(one, 10.0) == pytest.approx(3.0)
    assert remaining(one, 11.5) == pytest.approx(1.5)
    assert remaining(one, 50.0) == pytest.approx(1.0), "the second has not begun as far as we know"


def test_room_ends_with_the_slots_the_pace_or_the_worker(worker):
    one = worker("w0", 2)
    assert places(one, 10.0, inf, {}) == 2
    assert places(one, 10.0, 1.0, {}) == 1, "after it the answer may be another"
    assert places(one, 10.0, inf, {}, held=1) == 1
    lease = one.acquire(1500, now=10.0)
    assert places(one, 10.0, 1.0, {}) == 0
    assert places(one, 10.6, 1.0, {}) == 1
    lease.first_byte(11.5)
    one.acquire(0, now=12.0)
    assert places(one, 12.0, inf, {}) == 0
    lease.release(13.0)
    one.routable = False
    assert places(one, 13.0, inf, {}) == 0


def test_when_it_opens_is_told_where_time_alone_does_it(worker):
    one = worker("w0", 8)
    assert opens_at(one, 10.0, 1.0) == 10.0
    one.acquire(3000, now=10.0)
    assert opens_at(one, 10.0, 1.0) == pytest.approx(12.0)
    assert not paced(one, 11.9, 1.0)
    assert paced(one, 12.1, 1.0)
    one.acquire(3000, now=10.0)
    assert opens_at(one, 10.0, 1.0) == inf, "the first one's answer has to begin before"
