"""Gaps between the reads of a stream."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.telemetry.pace import KEPT, Pace


def pace_of(gaps):
    pace = Pace()
    now = 1000.0
    pace.stamps.append(now)
    for gap in gaps:
        now += gap
        pace.stamps.append(now)
        if len(pace.stamps) > KEPT:
            pace.fold()
    return pace


def rank(gaps, share):
    """The value that `share` of all are not above."""
    return next(value for value in sorted(gaps) if sum(other <= value for other in gaps) >= share * len(gaps))


@pytest.mark.parametrize("reads", [0, 1])
def test_a_stream_without_two_reads_has_no_gaps(reads):
    pace = Pace()
    pace.stamps.extend([1.0] * reads)
    assert pace.gaps() is None


@settings(deadline=None)
@given(st.lists(st.floats(0, 60), min_size=1, max_size=200))
def test_short_streams_are_measured_exactly(gaps):
    found = pace_of(gaps).gaps()
    assert found.count == len(gaps)
    for value, expected in ((found.p50, rank(gaps, 0.5)), (found.p95, rank(gaps, 0.95)), (found.max, max(gaps))):
        assert value == pytest.approx(expected, abs=1e-9)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(KEPT, 4 * KEPT))
def test_long_streams_are_measured_within_a_twentieth_and_take_no_more_memory(seed, count):
    rng = Random(seed)
    gaps = [rng.lognormvariate(-4, 1) for _ in range(count)]
    pace = pace_of(gaps)
    assert len(pace.stamps) <= KEPT
    found = pace.gaps()
    assert found.count == count
    assert found.max == pytest.approx(max(gaps), abs=1e-9)
    ordered = sorted(gaps)
    assert found.p50 == pytest.approx(ordered[(count + 1) // 2 - 1], rel=0.05)
    assert found.p95 == pytest.approx(ordered[-(-count * 95 // 100) - 1], rel=0.05)
