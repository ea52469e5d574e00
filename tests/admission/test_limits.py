"""Allowances hold over every stretch of time, whatever comes; no clock is needed to see it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.limits import NEVER, Account, Bucket, in_words
from gateway.config.schema import Tenant

amounts = st.floats(1, 1e6)
bursts = st.floats(0, 600)
steps = st.lists(st.tuples(st.floats(0, 120), st.integers(1, 2000)), max_size=60)


def most_over(taken, rate, capacity):
    """By how much the worst stretch of time goes over ``capacity + rate * t``; taken: (time, amount) in order."""
    worst = -math.inf
    for first in range(len(taken)):
        total = 0
        for at, amount in taken[first:]:
            total += amount
            worst = max(worst, total - capacity - rate * (at - taken[first][0]))
    return worst


@given(amounts, bursts, steps)
def test_no_stretch_of_time_gets_more_than_the_burst_and_what_flows_in(amount, burst, steps):
    bucket = Bucket(amount, burst, 0.0)
    now, taken = 0.0, []
    for gap, wanted in steps:
        now += gap
        if bucket.has(wanted, now):
            bucket.take(wanted, now)
            taken.append((now, wanted))
    assert most_over(taken, bucket.rate, bucket.capacity) <= 1e-6 * max(1.0, bucket.capacity, amount)


@given(amounts, bursts, steps, st.data())
def test_what_is_settled_afterwards_is_paid_for_by_those_who_come_later(amount, burst, steps, data):
    """Prompts are taken when there; answers are, whatever is there. In the long run both together keep to the limit."""
    bucket = Bucket(amount, burst, 0.0)
    now, everything = 0.0, 0
    for gap, wanted in steps:
        now += gap
        before = everything
        if bucket.has(wanted, now):
            bucket.take(wanted, now)
            # At the moment something is let in, all before it has been paid for.
            assert before + wanted <= bucket.capacity + bucket.rate * now + 1e-6 * max(1.0, amount, everything)
            everything += wanted
            output = data.draw(st.integers(0, 5000))
            bucket.take(output, now)
            everything += output


@given(amounts, bursts, steps, st.floats(0.01, 1))
def test_after_the_wait_that_was_named_it_is_there_and_shortly_before_it_is_not(amount, burst, steps, early):
    bucket = Bucket(amount, burst, 0.0)
    now = 0.0
    for gap, wanted in steps:
        now += gap
        bucket.take(wanted, now)
    wanted = bucket.capacity / 2
    wait = bucket.wait(wanted, now)
    if wait > 0:
        assert not bucket.has(wanted, now + wait * (1 - early) - 1e-9)
    assert bucket.has(wanted * (1 - 1e-6) - 1e-6, now + wait)


def test_what_can_never_be_there_is_said_to_be_never():
    assert Bucket(60, 10, 0.0).wait(11, 0.0) == NEVER


def test_a_clock_that_stands_still_or_goes_back_gives_nothing():
    bucket = Bucket(60, 10, 100.0)
    bucket.take(10, 100.0)
    assert bucket.level(100.0) == bucket.level(50.0) == 0
    assert bucket.level(101.0) == pytest.approx(1)


def test_other_limits_neither_refill_a_bucket_nor_forgive_a_debt():
    bucket = Bucket(60, 60, 0.0)
    bucket.take(80, 0.0)
    bucket.configure(6000, 60, 0.0)
    assert bucket.level(0.0) == -20
    assert bucket.level(1.0) == 80
    bucket.configure(6, 60, 1.0)
    assert bucket.level(1.0) == 6


def test_even_without_burst_one_request_at_a_time_passes():
    bucket = Bucket(6, 0, 0.0)
    assert bucket.has(1, 0.0)
    bucket.take(1, 0.0)
    assert not bucket.has(1, 9.0)
    assert bucket.has(1, 10.0)


limits = st.builds(
    Tenant,
    requests_per_minute=st.none() | st.floats(1, 100),
    tokens_per_minute=st.none() | st.floats(1, 10_000),
    concurrency=st.none() | st.integers(1, 5),
    burst=st.floats(0, 60),
)


@given(
    limits, limits, st.lists(st.tuples(st.sampled_from(["enter", "leave", "reload"]), st.floats(0, 30)), max_size=80)
)
def test_requests_at_once_are_counted_in_and_out_through_reloads(first, second, steps):
    account = Account()
    account.configure(first, 0.0)
    concurrency, under_way, now = first.concurrency, [], 0.0
    for what, gap in steps:
        now += gap
        if what == "enter":
            before = account.in_flight
            refusal = account.enter(now)
            if refusal is None:
                assert concurrency is None or before < concurrency
                under_way.append(0 if account.charge(50, now) else 50)
            else:
                assert account.in_flight == before
                assert refusal.wait >= 0
        elif what == "leave" and under_way:
            charged = under_way.pop(0)
            account.leave(charged, charged, 20, now)
        elif what == "reload":
            account.configure(second, now)
            concurrency = second.concurrency
        assert account.in_flight == len(under_way)


def test_a_request_that_is_refused_uses_nothing():
    account = Account()
    account.configure(Tenant(requests_per_minute=2, concurrency=1), 0.0)
    assert account.enter(0.0) is None
    for _ in range(5):
        assert account.enter(0.0).limit == "concurrency"
    account.leave(0, 0, 0, 0.0)
    assert account.enter(0.0) is None
    account.leave(0, 0, 0, 0.0)
    assert account.enter(0.0) == ("requests", pytest.approx(30))
    assert account.refused == {"concurrency": 5, "requests": 1}


def test_a_flood_is_refused_before_its_prompts_are_counted_once_the_tokens_are_gone():
    account = Account()
    account.configure(Tenant(tokens_per_minute=60), 0.0)
    account.enter(0.0)
    assert account.charge(60, 0.0) is None
    assert account.enter(0.0) == ("tokens", pytest.approx(1))


def test_tokens_are_settled_by_what_they_really_came_to():
    account = Account()
    account.configure(Tenant(tokens_per_minute=600), 0.0)
    account.enter(0.0)
    account.charge(100, 0.0)
    account.leave(100, 80, 30, 0.0)
    assert account.tokens.level(0.0) == 600 - 110
    assert (account.prompt_tokens, account.output_tokens) == (80, 30)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0s"),
        (0.0201, "21ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9994, "1m0s"),
        (360, "6m0s"),
        (72.05, "1m12.05s"),
        (3600, "1h0m0s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds, words):
    assert in_words(seconds) == words
