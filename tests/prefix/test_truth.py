"""Scores of predictions against a list of them all, and what makes a worker be followed anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix.truth import QUIET, WINDOW, WRONG, Truth, WorkerTruth
from policies.base import NO_MATCH, Match

BLOCK = 16


def event(tokens):
    return Match(device=tokens, source="event")


def wrong(score, times, now=100.0, source="event"):
    return [score.compare(Match(device=320, source=source), 0, 400, BLOCK, now) for _ in range(times)]


def test_sums_say_how_far_off_predictions_were_in_each_direction():
    score = WorkerTruth()
    for predicted, cached in ((160, 160), (160, 96), (0, 32)):
        score.compare(event(predicted), cached, 200, BLOCK, 1.0)
    assert (score.answers, score.prompt_tokens) == (3, 600)
    assert (score.predicted_tokens, score.cached_tokens) == (320, 288)
    assert (score.over_tokens, score.under_tokens) == (64, 32)


def test_a_match_longer_than_the_prompt_predicts_the_whole_prompt():
    score = WorkerTruth()
    score.compare(event(320), 300, 300, BLOCK, 1.0)
    assert (score.predicted_tokens, score.over_tokens) == (300, 0)


def test_tokens_of_every_tier_are_predicted():
    score = WorkerTruth()
    score.compare(Match(device=16, l1=32, l2=64, source="event"), 112, 200, BLOCK, 1.0)
    assert (score.predicted_tokens, score.over_tokens, score.under_tokens) == (112, 0, 0)


def test_a_worker_that_is_wrong_again_and_again_is_followed_anew():
    assert wrong(WorkerTruth(), WRONG) == [False] * (WRONG - 1) + [True]


def test_right_answers_in_between_do_not_hide_wrong_ones_unless_there_are_many():
    score = WorkerTruth()
    for _ in range(WRONG - 1):
        wrong(score, 1)
        score.compare(event(320), 320, 400, BLOCK, 100.0)
    assert wrong(score, 1) == [True]
    score = WorkerTruth()
    for _ in range(20):
        assert wrong(score, 1) == [False]
        for _ in range(WINDOW // (WRONG - 1)):
            score.compare(event(320), 320, 400, BLOCK, 100.0)


def test_a_block_too_many_is_no_error():
    score = WorkerTruth()
    assert not any(score.compare(event(96 + BLOCK), 96, 200, BLOCK, 100.0) for _ in range(50))
    assert score.over_tokens == 50 * BLOCK


def test_too_few_tokens_are_no_reason_to_follow_anew():
    score = WorkerTruth()
    assert not any(score.compare(event(0), 320, 400, BLOCK, 100.0) for _ in range(50))


@pytest.mark.parametrize("source", ["expected", "history", ""])
def test_what_no_event_said_cannot_be_the_events_fault(source):
    assert not any(wrong(WorkerTruth(), 50, source=source))


def test_following_anew_takes_a_while_and_begins_a_new_count():
    score = WorkerTruth()
    wrong(score, WRONG, now=100.0)
    assert not any(wrong(score, 50, now=100.0 + QUIET - 0.1))
    assert wrong(score, 1, now=100.0 + QUIET) == [True]
    assert wrong(score, WRONG, now=200.0) == [False] * (WRONG - 1) + [True]
    assert score.resyncs == 3


def test_scores_of_workers_that_are_gone_are_forgotten():
    truth = Truth()
    truth.of("a").compare(NO_MATCH, 0, 10, BLOCK, 1.0)
    assert truth.of("a").answers == 1
    truth.of("b")
    truth.keep({"b", "c"})
    assert [name for name, _ in truth] == ["b"]
    assert truth.of("a").answers == 0


@st.composite
def answers(draw):
    prompt = draw(st.integers(1, 600))
    match = Match(
        device=draw(st.integers(0, 700)),
        l1=draw(st.sampled_from([0, 0, 16])),
        source=draw(st.sampled_from(["event", "event", "event", "expected", "history", ""])),
    )
    return match, draw(st.integers(0, prompt)), prompt, draw(st.floats(0, 4))


@given(st.lists(answers(), max_size=120))
def test_any_answers_are_counted_as_a_list_of_them_would_be(given_answers):
    score = WorkerTruth()
    now, last, judged, resyncs = 50.0, -QUIET, [], 0
    for match, cached, prompt, pause in given_answers:
        now += pause
        if match.source == "event":
            judged.append(min(match.tokens, prompt) > cached + BLOCK)
        due = match.source == "event" and sum(judged[-WINDOW:]) >= WRONG and now - last >= QUIET
        assert score.compare(match, cached, prompt, BLOCK, now) is due
        if due:
            judged, last, resyncs = [], now, resyncs + 1
    predictions = [min(match.tokens, prompt) for match, _, prompt, _ in given_answers]
    actual = [cached for _, cached, _, _ in given_answers]
    assert score.answers == len(given_answers)
    assert score.prompt_tokens == sum(prompt for _, _, prompt, _ in given_answers)
    assert score.predicted_tokens == sum(predictions)
    assert score.cached_tokens == sum(actual)
    assert score.over_tokens + score.under_tokens == sum(
        abs(one - other) for one, other in zip(predictions, actual, strict=True)
    )
    assert score.predicted_tokens - score.over_tokens + score.under_tokens == score.cached_tokens
    assert score.resyncs == resyncs
