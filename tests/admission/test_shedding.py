"""Predictions: what requests take, how fast a line moves, what a refusal says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.shedding import Estimate, Speed, refusal, retry_after
from gateway.errors import Source


def test_what_answers_take_is_learned_and_followed():
    estimate = Estimate()
    for _ in range(100):
        estimate.took(0.1, 0.2)
    assert estimate.needs(None, "ttft") == pytest.approx(0.1)
    assert estimate.needs(0.5, "completion") == pytest.approx(0.7)
    for _ in range(300):
        estimate.took(0.1, 2.0)
    assert estimate.needs(0.5, "completion") == pytest.approx(2.5, rel=0.02)


@given(misses=st.lists(st.floats(-1, 1), min_size=128, max_size=200))
def test_the_margin_covers_all_but_the_worst_few_of_the_latest_misses(misses):
    estimate = Estimate()
    for miss in misses:
        estimate.missed(miss, 1.0)
    while len(misses) % 16:
        misses.append(0.0)
        estimate.missed(0.0, 1.0)
    latest = misses[-128:]
    assert estimate.margin >= 0
    assert sum(miss > estimate.margin for miss in latest) <= 0.02 * len(latest)


def test_predictions_that_were_too_long_take_no_margin():
    estimate = Estimate()
    for _ in range(64):
        estimate.missed(-0.5, 1.0)
    assert estimate.margin == 0.0


def test_a_stop_of_seconds_is_forgotten_soon_after_even_if_hardly_anybody_is_let_through():
    estimate, now = Estimate(), 0.0
    estimate.most = 0.15
    for _ in range(200):
        now += 0.1
        estimate.took(0.05, 0.1)
        estimate.missed(0.01, now)
    usual = estimate.needs(0.05, "completion")
    for _ in range(20):  # all that were under way
        estimate.took(0.05, 4.0)
        estimate.missed(4.0, now)
    assert estimate.margin <= 0.15
    for _ in range(70):  # 14 seconds, five a second
        now += 0.2
        estimate.took(0.05, 0.1)
        estimate.missed(0.01, now)
    assert estimate.needs(0.05, "completion") <= usual + 0.1


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200), st.floats(0.01, 5))
def test_the_margin_never_takes_more_than_its_share_of_the_deadline(misses, most):
    estimate = Estimate()
    estimate.most = most
    for number, miss in enumerate(misses):
        estimate.missed(miss, float(number))
        assert 0 <= estimate.margin <= most


def test_the_speed_of_a_line_is_that_of_its_turns():
    speed = Speed()
    assert speed.rate(0.0, prior=7.0) == 7.0
    for index in range(200):
        speed.turn(100.0 + index * 0.1)
    assert speed.rate(119.9, prior=7.0) == pytest.approx(10.0, rel=0.05)


def test_pauses_do_not_make_it_slower_but_a_stop_does():
    speed = Speed()
    for start in (100.0, 1000.0):
        for index in range(100):
            speed.turn(start + index * 0.1)
        speed.pause()
    assert speed.rate(5000.0, prior=1.0) == pytest.approx(10.0, rel=0.1)
    for index in range(100):
        speed.turn(6000.0 + index * 0.1)
    assert speed.rate(6070.0, prior=1.0) < 1.0


@given(wait=st.floats(-10, 1e9))
def test_a_client_is_never_told_to_come_back_at_once_or_never(wait):
    assert 1 <= retry_after(wait) <= 60


def test_a_refusal_is_the_clients_429_or_as_the_worker_is_configured():
    error = refusal("queue_full", 3.2)
    assert (error.status, error.code, error.retry_after, error.source) == (429, "queue_full", 4, Source.CLIENT)
    assert refusal("queue_full", 3.2, status=503).source is Source.GATEWAY
