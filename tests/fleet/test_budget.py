"""A budget of attempts, in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.budget import SLICES, Budget


def test_a_share_of_the_windows_requests_may_be_spent():
    budget = Budget(0.2, 0, 10.0)
    for _ in range(20):
        budget.asked(100.0)
    assert [budget.spend(100.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert (budget.spent, budget.refused) == (4, 2)


def test_the_floor_may_be_spent_without_any_request():
    budget = Budget(0.2, 3, 10.0)
    assert [budget.spend(5.0) for _ in range(4)] == [True, True, True, False]


def test_what_was_spent_comes_back_when_the_window_is_over():
    budget = Budget(0.0, 2, 10.0)
    assert budget.spend(100.0)
    assert budget.spend(108.0)
    assert not budget.spend(109.0)
    assert budget.spend(111.0), "the first is out of the window"
    assert not budget.spend(112.0)
    assert budget.spend(150.0)


def test_requests_leave_the_window_too():
    budget = Budget(0.5, 0, 10.0)
    for _ in range(10):
        budget.asked(100.0)
    assert not budget.spend(120.0)


def test_that_it_was_exhausted_is_said_for_a_window():
    budget = Budget(0.0, 0, 10.0)
    assert not budget.exhausted(100.0)
    budget.spend(100.0)
    assert budget.exhausted(109.9)
    assert not budget.exhausted(110.0)


@given(
    share=st.floats(0, 1),
    floor=st.integers(0, 5),
    events=st.lists(st.tuples(st.floats(0, 6), st.booleans()), max_size=200),
)
def test_never_more_than_the_share_of_a_window_and_the_floor_is_spent(share, floor, events):
    budget = Budget(share, floor, 10.0)
    now, asked, spent = 50.0, [], []
    for pause, ask in events:
        now += pause
        if ask:
            budget.asked(now)
            asked.append(now)
        elif budget.spend(now):
            spent.append(now)
            # What counts is the present slice and the nine before it: between 9 and 10 seconds.
            least, most = 10.0 - 10.0 / SLICES, 10.0
            within = sum(at > now - least for at in spent)
            assert within <= max(floor, share * sum(at > now - most for at in asked)) + 1e-6


@pytest.mark.parametrize("gap", [0.0, 0.99, 9.99, 10.0, 1e6])
def test_time_may_jump_by_any_amount(gap):
    budget = Budget(1.0, 0, 10.0)
    budget.asked(1.0)
    assert budget.left(1.0 + gap) is (gap < 10.0)
