"""What is learned of a worker's speed."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.calibration import BOUND, MAX_OVERHEAD, Calibration

RATES = st.floats(1e3, 1e5)
OVERHEADS = st.floats(0.0, 0.1)


@given(RATES, OVERHEADS, st.floats(0.1, 10.0), st.integers(0, 2**32))
def test_a_fifth_of_garbage_does_not_keep_it_from_the_truth(rate, overhead, factor, seed):
    random = Random(seed)
    learned = Calibration(rate * factor, 0.05)
    for n in range(50):
        padded = random.randrange(2000, 40_000)
        seconds = (overhead + padded / rate) * random.uniform(0.99, 1.01)
        learned.prefill(padded, seconds * 10 ** random.uniform(-1, 2) if n % 5 == 3 else seconds)
    for padded in (4000, 20_000, 40_000):
        assert learned.overhead + padded / learned.rate == pytest.approx(overhead + padded / rate, rel=0.1)
    if overhead * rate < 2000:  # else the rate is a small part of what was seen
        assert learned.rate == pytest.approx(rate, rel=0.1)


@given(RATES, OVERHEADS, st.lists(st.tuples(st.integers(-10, 10**6), st.floats(-1, 1e9)), max_size=200))
def test_nothing_moves_it_out_of_its_bounds(rate, overhead, samples):
    learned = Calibration(rate, overhead)
    for padded, seconds in samples:
        learned.prefill(padded, seconds)
        assert rate / BOUND * 0.999 <= learned.rate <= rate * BOUND * 1.001
        assert 0 <= learned.overhead <= overhead + MAX_OVERHEAD


def test_prompts_of_one_length_scale_overhead_and_rate_alike():
    learned = Calibration(10_000, 0.1)
    for _ in range(8):
        learned.prefill(1000, 0.4)
    assert (learned.rate, learned.overhead) == pytest.approx((5000, 0.2))


def test_a_worker_that_became_slower_is_followed():
    learned = Calibration(10_000, 0.0)
    for speed in (10_000, 2500):
        for n in range(100):
            learned.prefill(1000 + 100 * n, (1000 + 100 * n) / speed)
    assert learned.rate == pytest.approx(2500, rel=0.05)


def test_too_few_prefills_teach_nothing():
    learned = Calibration(10_000, 0.1)
    assert not any(learned.prefill(1000, 9.0) for _ in range(3))
    assert (learned.rate, learned.overhead) == (10_000, 0.1)


def test_the_mean_hold_forgets():
    learned = Calibration(1.0, 0.0)
    learned.held(10.0)
    assert learned.hold == 10.0
    for _ in range(300):
        learned.held(2.0)
    assert learned.hold == pytest.approx(2.0, abs=0.01)
