"""`hot-prefix`: heat, how many workers should hold a prefix, and that this number does not flutter."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.hints.model import Action, Fate
from gateway.config.residency import HotPrefixRule, ResidencyConfig, ResidencyRules
from gateway.residency.heat import HALF_LIFE, Heat
from policies.base import NO_MATCH, Match

BLOCK, COMMON = 16, 100


def config(**numbers):
    off = dict.fromkeys(ResidencyRules.__struct_fields__, False)
    return ResidencyConfig(rules=ResidencyRules(**(off | {"hot_prefix": HotPrefixRule(**numbers)})))


def settle(heat, now, *, up=30.0, down=10.0, replicas=4, sessions=3, most=16):
    return heat.settle(now, up=up, down=down, replicas=replicas, sessions=sessions, most=most)


def test_a_steady_stream_is_as_hot_as_it_is_frequent(subject_of):
    heat = Heat()
    prefix = None
    for number in range(1200):
        prefix = heat.saw(subject_of(number, 120, common=COMMON), 1600, 0.5 * number)
    assert prefix.heat(600.0) == pytest.approx(120, rel=0.02)
    assert prefix.heat(600.0 + HALF_LIFE) == pytest.approx(60, rel=0.02)
    assert prefix.tokens == 1600
    assert len(heat) == 1


@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans()), max_size=200),
    st.floats(1.0, 60.0),
    st.floats(0.1, 60.0),
    st.integers(1, 5),
)
def test_how_many_hold_it_follows_the_heat_one_by_one_and_turns_back_only_after_half_of_it(
    subject_of, history, up, down, replicas
):
    heat, now, subject = Heat(), 0.0, subject_of(1, 120, common=COMMON)
    changes = []
    for wait, asked in history:
        now += wait
        if asked:
            heat.saw(subject, 1600, now)
        for prefix, before in settle(heat, now, up=up, down=down, replicas=replicas):
            assert abs(prefix.wanted - before) == 1
            assert 0 <= prefix.wanted <= replicas
            changes.append((prefix.wanted - before, max(prefix.wanted, before), prefix.heat(now)))
    for (way, level, heat_then), (back, level_back, heat_now) in pairwise(changes):
        if way == 1 and back == -1:
            assert level == level_back
            # What made it rise, against what made it fall: the first step up needs `up`, the n-th up x (n-1).
            assert heat_now < level * min(down, up / 2)
            assert heat_then >= up * max(1, level - 1)
            assert heat_now < heat_then


def test_only_so_many_prefixes_are_cared_for_and_counted(subject_of):
    heat = Heat(kept=8)
    for number in range(100):
        for _ in range(5):
            heat.saw(subject_of(number, 120), 1600, float(number))
        settle(heat, float(number), up=0.1, down=0.01, most=3)
        assert len(heat) <= 32
        assert len(heat.cared) <= 3
        assert all(each.wanted for each in heat.cared)


def warm(play, subject_of, now, count=40, worker=0, cached=1600):
    hints = []
    for number in range(count):
        name = f"{now}-{number}-{worker}"
        hints = play.turn(
            subject_of(hash(name) % 10**9, 120, name, common=COMMON),
            now + 0.1 * number,
            worker=worker,
            match=Match(device=1600, source="event"),
            cached=cached,
        )[0]
    return hints


def test_a_hot_prefix_comes_to_a_second_worker_and_one_copy_goes_as_it_cools(playing, subject_of):
    play = playing(config(up=20.0, down=5.0, replicas=2))
    play.held["a", 1] = Match(device=1600)
    assert warm(play, subject_of, 0.0) == []
    assert play.core.tick(4.0) == [], "the first step: it is cared for, and one worker has it"
    (hint,) = play.core.tick(5.0)
    assert (hint.action, hint.worker, hint.peer, hint.stop) == (Action.PREFETCH, "b", "a", 1600)
    play.core.ledger.fate(hint, Fate.ACCEPTED, "", 5.0)
    entry = play.core.ledger.open[hint.id]
    assert play.core.tick(6.0) == [], "it is on its way"
    play.held["b", 1] = Match(device=1600)
    (kept,) = warm(play, subject_of, 7.0, 1, worker=1)
    assert (kept.action, kept.worker, kept.start, kept.stop, kept.priority) == (Action.RETAIN, "b", 0, 1600, 90)
    assert entry.fate is Fate.USEFUL
    gone = [hint for second in range(8, 600) for hint in play.core.tick(float(second))]
    assert [(hint.action, hint.stop) for hint in gone] == [(Action.DEMOTE, 1600)]


def test_a_copy_that_was_not_there_when_it_was_asked_for_was_wasted(playing, subject_of):
    play = playing(config(up=20.0, down=5.0))
    play.held["a", 1] = Match(device=1600)
    warm(play, subject_of, 0.0)
    play.core.tick(4.0)
    (hint,) = play.core.tick(5.0)
    play.core.ledger.fate(hint, Fate.ACCEPTED, "", 5.0)
    entry = play.core.ledger.open[hint.id]
    warm(play, subject_of, 6.0, 1, worker=1, cached=0)
    assert entry.fate is Fate.WASTED


def test_later_turns_of_one_conversation_do_not_make_its_prompt_hot(playing, subject_of):
    play = playing(config(up=1.0, down=0.1))
    play.held["a", 1] = Match(device=1600)
    for number in range(60):
        play.turn(subject_of(1, 120 + number, "x", common=COMMON), 0.1 * number, match=Match(device=1600))
    assert [play.core.tick(7.0 + number) for number in range(5)] == [[]] * 5


def test_what_nobody_holds_any_more_is_not_brought_from_nowhere(playing, subject_of):
    play = playing(config(up=20.0, down=5.0))
    warm(play, subject_of, 0.0)
    assert [play.core.tick(4.0 + number) for number in range(5)] == [[]] * 5
    play.held["a", 1] = NO_MATCH
    assert play.core.tick(10.0) == []
