"""Runs are the list that they stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workloads.runs import Ids, Runs

ranges = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 9)).map(lambda pair: range(pair[0], sum(pair))), max_size=6
)


@given(ranges, st.integers(-70, 70), st.integers(-70, 70), st.sampled_from([None, 1, 2, -1]))
def test_runs_answer_as_a_list_does(given_ranges, start, stop, step):
    runs, plain = Runs(given_ranges), [x for run in given_ranges for x in run]
    assert list(runs) == plain
    assert len(runs) == len(plain)
    assert list(runs[start:stop:step]) == plain[start:stop:step]
    assert list(reversed(runs)) == plain[::-1]
    if -len(plain) <= start < len(plain):
        assert runs[start] == plain[start]
    else:
        with pytest.raises(IndexError):
            runs[start]


@given(ranges)
def test_runs_of_the_same_ids_are_equal_however_they_were_cut(given_ranges):
    singles = [range(x, x + 1) for run in given_ranges for x in run]
    assert Runs(singles) == Runs(given_ranges)
    assert hash(Runs(singles)) == hash(Runs(given_ranges))


def test_ids_are_handed_out_once():
    ids = Ids(5)
    assert (ids.fresh(3), ids.fresh(0), ids.fresh(2)) == (range(5, 8), range(8, 8), range(8, 10))
