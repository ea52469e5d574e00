"""All rules together, whatever happens in whatever order; events, ticks and what is shown."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.hints.model import Action, Fate
from gateway.config.residency import (
    HotPrefixRule,
    ResidencyBudget,
    ResidencyConfig,
    ResidencyRules,
    SessionEnd,
    Throttle,
)
from gateway.residency.ledger import ENDS
from gateway.residency.residency import Asked
from gateway.residency.words import ClientWords
from policies.base import Match

EVERYTHING = ResidencyConfig(
    rules=ResidencyRules(
        hot_prefix=HotPrefixRule(up=1.0, down=0.2, min_tokens=64, sessions=1), session_end=SessionEnd(idle=20.0)
    ),
    budget=ResidencyBudget(hints_per_second=5.0),
    throttle=Throttle(of=5, one_in=3),
    sessions=6,
    memory=1024 * 1024,
)

WORDS = [
    None,
    None,
    ClientWords(breakpoints=((512, 300.0), (4000, 7200.0))),
    ClientWords(key="k", retention_seconds=86_400.0),
    ClientWords(session_end=True),
]

steps = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "turn", "wait", "lost", "tick", "end", "drain", "reserve", "event"]),
        st.integers(0, 8),
        st.integers(0, 2),
        st.integers(0, 80),
        st.sampled_from(WORDS),
        st.sampled_from([None, "planner", "generator"]),
        st.sampled_from(list(Fate)),
    ),
    max_size=60,
)


@settings(max_examples=40)
@given(steps, st.booleans())
def test_whatever_happens_hints_make_sense_and_each_ends_once(playing, subject_of, history, named):
    play = playing(EVERYTHING, "abc")
    core, ids, grown, now = play.core, set(), {}, 1.0
    for what, number, index, blocks, words, stage, fate in history:
        now += 0.7
        worker = play.workers[index]
        length = grown[number] = grown.get(number, 30) + blocks // 8
        subject = subject_of(number, length, f"s{number}" if named else "", common=20)
        match = Match(device=min(blocks, length) * 8, l1=blocks // 4 * 16, l2=blocks // 8 * 16)
        play.held[worker.id, 1] = match
        hints = []
        asked = Asked(subject, now, stage, words)
        if what in {"turn", "wait", "lost"}:
            if what != "turn":
                hints += core.waiting(asked, worker, match)
            hints += core.sent(asked, worker, match)
            if what != "lost":
                hints += core.answered(asked, worker.id, blocks * 16, now + 0.5)
        elif what == "tick":
            hints += core.tick(now)
            assert core.next_tick > now
        elif what == "end":
            hints += core.session_ended(f"s{number}", now)
        elif what == "drain":
            hints += core.draining(worker, [each for each in play.workers if each is not worker], now)
        elif what == "reserve":
            hints += core.reserved(asked, stage or "generator", worker, now)
        else:
            core.event(worker.id, "l1", subject.chains[16], blocks % 2 == 0, now)
        for hint in hints:
            assert 0 <= hint.start < hint.stop <= hint.subject.tokens
            assert 0 <= hint.priority <= 100
            assert hint.ttl >= 0
            assert hint.worker in {"a", "b", "c"}
            assert hint.peer != hint.worker
            assert hint.id not in ids
            ids.add(hint.id)
            if core.budget.allow(hint, 1000 if hint.action is Action.PREFETCH else 0, now):
                core.ledger.fate(hint, Fate.SENT, "", now)
                core.ledger.fate(hint, fate, "", now)
            else:
                core.ledger.fate(hint, Fate.SKIPPED, "over budget", now)
        assert core.ledger.offered == len(ids) == core.ledger.ended + len(core.ledger.open)
        assert len(core.sessions) <= 6
    ids.update(hint.id for hint in core.tick(now + 1e6))
    assert core.tick(now + 2e6) == []
    assert not core.ledger.open
    assert not core.ledger.watched
    assert not core.budget.pins or all(not pin.until for pin in core.budget.pins.values())
    ended = sum(count for *_, fate, count in core.ledger.counts() if fate in {each.value for each in ENDS})
    assert ended == len(ids)
    json.dumps(core.snapshot())


def test_events_are_only_wanted_while_a_prefetch_is_open_and_confirm_it(playing, subject_of):
    play = playing(ResidencyConfig())
    assert not play.core.wants_events
    asked = Asked(subject_of(1, 100), 1.0)
    (hint,) = play.core.waiting(asked, play.workers[0], Match(l2=1600))
    assert play.core.wants_events
    entry = play.core.ledger.open[hint.id]
    play.core.ledger.fate(hint, Fate.SENT, "", 1.0)
    hashes = hint.subject.chains[16]
    play.core.event("a", "l1", hashes[:99], True, 2.0)
    play.core.event("a", "l1", hashes, False, 2.0)
    play.core.event("b", "l1", hashes, True, 2.0)
    assert entry.fate is Fate.SENT
    play.core.event("a", "l1", hashes, True, 2.0)
    assert entry.fate is Fate.CONFIRMED
    play.core.sent(asked, play.workers[0], Match(l1=1600))
    play.core.answered(asked, "a", 1600, 3.0)
    assert entry.fate is Fate.USEFUL
    assert not play.core.wants_events


def test_a_request_that_nobody_answered_leaves_what_was_kept_for_it_to_be_judged_by_the_next(playing, subject_of):
    play = playing(ResidencyConfig(rules=ResidencyRules(queued_next=False, retain=True)))
    (first,), _ = play.turn(subject_of(1, 100, "x"), 1.0)
    entry = play.core.ledger.open[first.id]
    asked = Asked(subject_of(1, 110, "x"), 2.0)
    play.core.sent(asked, play.workers[0], Match(device=1600))
    assert play.core.answered(asked, "", 0, 3.0) == []
    assert not entry.ended
    play.turn(subject_of(1, 110, "x"), 4.0, cached=1600)
    assert entry.fate is Fate.USEFUL


def test_there_is_nothing_to_tick_for_before_anything_has_happened(playing, subject_of):
    play = playing(ResidencyConfig())
    assert play.core.next_tick == float("inf")
    play.turn(subject_of(1, 100), 5.0)
    assert play.core.next_tick < 10
    play.core.tick(7.0)
    assert play.core.next_tick == 8.0


def test_a_rule_that_is_held_back_shows_in_what_is_degraded_and_in_the_snapshot(playing, subject_of):
    play = playing(ResidencyConfig(rules=ResidencyRules(retain=True), throttle=Throttle(of=10)))
    for number in range(30):
        play.turn(subject_of(1, 100 + number, "x"), 1.0 + number, cached=0)
    (text,) = play.core.degraded()
    assert "retain" in text
    shown = play.core.snapshot()
    assert shown["degraded"] == [text]
    assert shown["rules"]["retain"]["throttled"]
    assert shown["rules"]["retain"]["held_back"] > 10
    assert shown["rules"]["drain"] == {}
