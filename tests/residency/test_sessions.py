"""Conversations: which prompt belongs to which, what is learned of their gaps, and that none of it grows without end."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.residency.gaps import Gaps, Returns, score
from gateway.residency.sessions import MOST_ENTRIES, SESSION_BYTES, Sessions, weight


def go(sessions, subject, now=1.0, stage="", worker="a", held=0):
    session = sessions.find(subject, stage)
    sessions.sent(session, subject, worker, held, now)
    return session


def test_a_prompt_that_goes_on_from_a_known_one_is_its_next_turn(subject_of):
    sessions = Sessions(100, 1 << 20, 60.0)
    first = go(sessions, subject_of(1, 10))
    other = go(sessions, subject_of(2, 10))
    assert other is not first
    assert go(sessions, subject_of(1, 14)) is first
    assert go(sessions, subject_of(1, 14, rest=9)) is first, "a short turn that fills no block"
    assert go(sessions, subject_of(1, 12)) is not first, "an earlier state of it, edited: not its next turn"
    assert first.turns == 3
    assert len(sessions) == 3


def test_what_several_conversations_begin_with_does_not_make_them_one(subject_of):
    sessions = Sessions(100, 1 << 20, 60.0)
    assert len({go(sessions, subject_of(number, 20, common=15)).key for number in range(5)}) == 5
    assert go(sessions, subject_of(3, 30, common=15)).turns == 2


def test_a_name_wins_over_what_the_prompt_looks_like(subject_of):
    sessions = Sessions(100, 1 << 20, 60.0)
    one = go(sessions, subject_of(1, 10, "x"))
    assert go(sessions, subject_of(2, 3, "x")) is one
    assert go(sessions, subject_of(1, 12, "y")) is not one


def test_stages_of_a_conversation_have_prompts_of_their_own(subject_of):
    sessions = Sessions(100, 1 << 20, 60.0)
    planner = go(sessions, subject_of(1, 10, "x"), stage="planner")
    generator = go(sessions, subject_of(2, 30, "x"), stage="generator")
    assert planner is not generator
    assert sessions.get("x", "generator") is generator
    assert set(sessions.named("x")) == {planner, generator}


def test_prompts_too_short_for_a_block_are_conversations_that_nobody_finds_again(subject_of):
    sessions = Sessions(100, 1 << 20, 60.0)
    assert go(sessions, subject_of(1, 0)) is not go(sessions, subject_of(1, 0))


operations = st.lists(
    st.tuples(
        st.integers(0, 8),
        st.integers(0, 60),
        st.sampled_from(["", "n"]),
        st.sampled_from(["", "s"]),
        st.sampled_from(["go", "go", "go", "drop", "silent", "find"]),
    ),
    max_size=60,
)


@given(operations, st.integers(1, 6), st.integers(0, 12_000))
def test_conversations_stay_within_their_number_and_their_bytes(subject_of, history, most, most_bytes):
    sessions = Sessions(most, most_bytes, 60.0)
    found = []
    for now, (conversation, blocks, name, stage, what) in enumerate(history):
        subject = subject_of(conversation, blocks, name and f"{name}{conversation}")
        if what == "go":
            found.append(go(sessions, subject, float(now), stage))
        elif what == "find":
            # Found, and sent only after others have pushed it out.
            found.append(sessions.find(subject, stage))
        elif found and what == "drop":
            sessions.drop(found[-1])
        elif found:
            sessions.sent(found[0], subject, "a", 0, float(now))
        kept = list(sessions)
        assert len(kept) == len(sessions) <= most
        assert sessions.bytes == sum(each.bytes for each in kept)
        assert sessions.bytes == sum(
            SESSION_BYTES if each.subject is None else weight(each.subject) for each in kept
        ), "what is counted is what is held"
        assert sessions.bytes <= most_bytes or not kept
        full = list(sessions.silent_first)
        assert [each for each in full if each.subject is None] == []
        assert len(sessions._tails) <= len(full)
        assert set(sessions._tails.values()) <= set(full)


def test_beyond_the_bytes_prompts_go_before_what_is_known_of_gaps(subject_of):
    one = weight(subject_of(0, 50))
    sessions = Sessions(100, 3 * one, 60.0)
    for number in range(6):
        go(sessions, subject_of(number, 50, f"s{number}"), float(number))
    assert len(sessions) == 6
    assert [each.name for each in sessions.silent_first] == ["s4", "s5"]
    assert sessions.get("s0", "").worker == "a"


def test_hints_that_are_waited_for_are_few(subject_of):
    sessions = Sessions(100, 1 << 20, 60.0)
    session = go(sessions, subject_of(1, 10))
    for number in range(50):
        session.remember(number)
    assert session.entries == list(range(50 - MOST_ENTRIES, 50))


@given(st.lists(st.floats(0.0, 1e7), max_size=60), st.floats(0.01, 1.0))
def test_quantiles_of_gaps_rise_with_their_share_and_stay_finite(gaps, share):
    learned = Gaps()
    for gap in gaps:
        learned.saw(gap, share)
    quantiles = [learned.quantile(score(each)) for each in (0.1, 0.5, 0.9, 0.99)]
    assert all(low <= high for low, high in pairwise(quantiles))
    assert quantiles[0] > 0
    assert quantiles[-1] < float("inf")


def test_a_quantile_of_log_normal_gaps_is_learned(subject_of):
    from random import Random

    random = Random(5)
    learned = Gaps()
    for _ in range(3000):
        learned.saw(random.lognormvariate(3.0, 0.7), 0.01)
    late = [random.lognormvariate(3.0, 0.7) > learned.quantile(score(0.9)) for _ in range(5000)]
    assert 0.05 < sum(late) / len(late) < 0.17


def test_how_often_another_turn_comes_is_learned_apart_for_first_turns():
    returns = Returns()
    for _ in range(300):
        returns.saw(1, came=False)
        returns.saw(3, came=True)
    assert returns.odds(1) < 0.05
    assert returns.odds(2) > 0.95


@pytest.mark.parametrize("named", [True, False])
def test_a_conversation_that_was_forgotten_starts_anew(subject_of, named):
    sessions = Sessions(2, 1 << 20, 60.0)
    first = go(sessions, subject_of(1, 10, "x" if named else ""))
    for number in range(2, 4):
        go(sessions, subject_of(number, 10, f"o{number}"))
    again = go(sessions, subject_of(1, 14, "x" if named else ""))
    assert again is not first
    assert again.turns == 1
