"""Each rule by what it wishes, when, and what it leaves alone."""

import pytest

from backends.hints.model import Action, Fate
from gateway.config.residency import ClientWordsRule, QueuedNext, ResidencyConfig, ResidencyRules, SessionEnd
from gateway.residency.residency import Asked
from gateway.residency.words import ClientWords
from policies.base import NO_MATCH, Match

BLOCK = 16


def only(**rules):
    """A configuration with these rules and no other."""
    off = dict.fromkeys(ResidencyRules.__struct_fields__, False)
    return ResidencyConfig(rules=ResidencyRules(**(off | rules)))


def said(hints):
    return [(hint.action, hint.worker, hint.start, hint.stop, hint.source, hint.target, hint.peer) for hint in hints]


# queued-next


def test_what_a_waiting_request_has_in_slower_memory_comes_one_memory_nearer(playing, subject_of):
    play = playing(only(queued_next=True))
    subject = subject_of(1, 300)
    match = Match(device=1600, l1=800, l2=1600, source="event")
    hints = play.core.waiting(Asked(subject, 1.0), play.workers[0], match)
    assert said(hints) == [
        (Action.PREFETCH, "a", 1600, 2400, "l1", "device", None),
        (Action.PREFETCH, "a", 2400, 4000, "l2", "l1", None),
    ]
    assert all(hint.subject is subject for hint in hints)


def test_a_request_that_waits_on_is_spoken_of_once_per_worker(playing, subject_of):
    play = playing(only(queued_next=True))
    asked, match = Asked(subject_of(1, 300), 1.0), Match(l1=1600)
    assert play.core.waiting(asked, play.workers[0], match)
    assert not play.core.waiting(asked, play.workers[0], match)
    assert play.core.waiting(asked, play.workers[1], match)


def test_parts_that_are_too_short_stay_where_they_are(playing, subject_of):
    play = playing(only(queued_next=QueuedNext(min_tokens=800)))
    assert play.core.waiting(Asked(subject_of(1, 300), 1.0), play.workers[0], Match(l1=784, l2=1600)) != []
    assert play.core.waiting(Asked(subject_of(2, 300), 1.0), play.workers[0], Match(l1=784, l2=784)) == []
    assert play.core.waiting(Asked(subject_of(3, 40), 1.0), play.workers[0], Match(l1=640)) == []


@pytest.mark.parametrize("peers", [True, False])
def test_what_only_another_worker_has_is_fetched_from_there(playing, subject_of, peers):
    play = playing(only(queued_next=QueuedNext(peers=peers)))
    subject = subject_of(1, 300)
    play.held["b", subject.chains[BLOCK][-1]] = Match(device=3200, l1=640)
    hints = play.core.waiting(Asked(subject, 1.0), play.workers[0], Match(device=1600))
    assert said(hints) == ([(Action.PREFETCH, "a", 1600, 3840, "l1", "device", "b")] if peers else [])


def test_a_prefetch_is_judged_by_the_request_that_it_was_for(playing, subject_of):
    play = playing(only(queued_next=True))
    for number, (worker, cached, fate) in enumerate(
        [(0, 4000, Fate.USEFUL), (0, 100, Fate.WASTED), (1, 4000, Fate.ACCEPTED)]
    ):
        asked = Asked(subject_of(number, 300, f"s{number}"), 1.0)
        (hint,) = play.core.waiting(asked, play.workers[0], Match(device=160, l1=3840))
        play.core.ledger.fate(hint, Fate.ACCEPTED, "", 1.0)
        entry = play.core.ledger.open[hint.id]
        play.core.sent(asked, play.workers[worker], NO_MATCH)
        play.core.answered(asked, "ab"[worker], cached, 3.0)
        assert entry.fate is fate


def test_a_prefetch_that_nobody_said_before_its_request_came_was_overtaken(playing, subject_of):
    play = playing(only(queued_next=True))
    asked = Asked(subject_of(1, 300), 1.0)
    (hint,) = play.core.waiting(asked, play.workers[0], Match(l1=3840))
    play.core.sent(asked, play.workers[0], NO_MATCH)
    play.core.answered(asked, "a", 3840, 3.0)
    assert not play.core.budget.allow(hint, 1, 3.0)
    assert play.core.ledger.rows()[0]["fate"] == "skipped"


# retain


def test_conversations_that_take_longer_to_come_back_are_kept_for_longer_and_none_firmer_than_others(
    playing, subject_of
):
    play = playing(only(retain=True))
    slow, quick = [], []
    for number in range(12):
        slow, _ = play.turn(subject_of(2, 100 + number, "slow"), 1000.0 + 120 * number, cached=1600)
    for number in range(60):
        quick, _ = play.turn(subject_of(1, 100 + number, "quick"), 4000.0 + 2 * number, cached=1600)
    slow, _ = play.turn(subject_of(2, 120, "slow"), 4120.0, cached=1600)
    (quick, slow) = quick[0], slow[0]
    assert quick.action is slow.action is Action.RETAIN
    assert quick.priority == slow.priority > 50
    assert quick.ttl < slow.ttl
    assert slow.ttl > 120
    assert (quick.start, quick.stop, quick.answer) == (0, quick.subject.tokens, True)


def test_what_is_kept_for_a_new_conversation_follows_from_the_gaps_of_all(playing, subject_of):
    times = []
    for gap in (2.0, 200.0):
        play = playing(only(retain=True))
        for number in range(200):
            play.turn(subject_of(1, 100 + number, "x"), 1.0 + gap * number, cached=16 * (100 + number))
        (hint,), _ = play.turn(subject_of(2, 100, "new"), 1e6)
        times.append(hint.ttl)
    assert times[0] < 20 < times[1]


def test_what_never_comes_back_is_not_spoken_of_any_more(playing, subject_of):
    play = playing(only(retain=True, session_end=SessionEnd(idle=100.0)))
    spoken = []
    for number in range(200):
        hints, _ = play.turn(subject_of(number, 100), 200.0 * number)
        spoken.append(any(hint.rule == "retain" for hint in hints))
        play.core.tick(200.0 * number + 150)
    assert spoken[0]
    assert not any(spoken[100:])
    # A conversation that goes on is another matter.
    play.turn(subject_of(5000, 100, "x"), 50_000.0)
    assert play.turn(subject_of(5000, 110, "x"), 50_001.0)[0]


def test_times_are_within_their_limits_whatever_is_learned(playing, subject_of):
    play = playing(only(retain=True))
    for gap in (0.001, 1e6):
        for number in range(20):
            hints, _ = play.turn(subject_of(1, 100 + number, f"s{gap}"), 1.0 + gap * number)
            assert all(5.0 <= hint.ttl <= 1800.0 and 50 < hint.priority <= 80 for hint in hints)


def test_a_retention_is_of_use_when_the_next_turn_finds_it(playing, subject_of):
    play = playing(only(retain=True))
    (first,), _ = play.turn(subject_of(1, 100), 1.0)
    entry = play.core.ledger.open[first.id]
    (second,), _ = play.turn(subject_of(1, 110), 11.0, cached=1600)
    assert entry.fate is Fate.USEFUL
    entry = play.core.ledger.open[second.id]
    play.turn(subject_of(1, 120), 21.0, cached=96)
    assert entry.fate is Fate.WASTED


def test_a_turn_that_goes_elsewhere_says_nothing_about_what_was_kept(playing, subject_of):
    play = playing(only(retain=True))
    (first,), _ = play.turn(subject_of(1, 100), 1.0)
    entry = play.core.ledger.open[first.id]
    play.turn(subject_of(1, 110), 3.0, worker=1)
    assert not entry.ended
    play.turn(subject_of(1, 120), 5.0, cached=1600)
    assert entry.fate is Fate.USEFUL


# session-end


def test_the_last_request_of_a_conversation_says_so_of_all_but_what_others_share(playing, subject_of):
    play = playing(only(retain=True, session_end=True))
    play.turn(subject_of(1, 100, "x", common=40), 1.0, match=Match(device=640))
    last, _ = play.turn(subject_of(1, 110, "x", common=40), 9.0, cached=1600, words=ClientWords(session_end=True))
    assert said(last) == [(Action.DEMOTE, "a", 640, 110 * BLOCK + 3, None, "device", None)]
    assert play.core.session_ended("x", 10.0) == [], "it is over already"


def test_a_client_may_end_all_stages_of_a_conversation(playing, subject_of):
    play = playing(only(session_end=True))
    play.turn(subject_of(1, 100, "x"), 1.0, stage="planner")
    play.turn(subject_of(2, 50, "x"), 2.0, worker=1, stage="generator")
    play.turn(subject_of(3, 50, "y"), 2.0)
    hints = play.core.session_ended("x", 3.0)
    assert {(hint.action, hint.worker, hint.stop) for hint in hints} == {
        (Action.DEMOTE, "a", 1603),
        (Action.DEMOTE, "b", 803),
    }
    assert play.core.session_ended("x", 3.0) == []
    assert play.core.session_ended("never heard of", 3.0) == []


def test_a_conversation_that_is_silent_for_long_is_over_and_its_prompt_forgotten(playing, subject_of):
    play = playing(only(session_end=SessionEnd(idle=60.0)))
    play.turn(subject_of(1, 100, "x"), 1.0)
    play.turn(subject_of(2, 100, "y"), 50.0)
    assert play.core.tick(60.9) == []
    (hint,) = play.core.tick(61.1)
    assert (hint.action, hint.subject.session) == (Action.DEMOTE, "x")
    assert play.core.tick(62.0) == []
    assert [each.name for each in play.core.sessions.silent_first] == ["y"]


def test_a_demotion_was_wrong_if_it_is_asked_for_again_and_right_if_not(playing, subject_of):
    play = playing(only(session_end=True))
    for name in "xy":
        play.turn(subject_of(ord(name), 100, name), 1.0)
        for hint in play.core.session_ended(name, 2.0):
            play.core.ledger.fate(hint, Fate.ACCEPTED, "", 2.0)
    play.turn(subject_of(ord("x"), 110, "x"), 3.0, cached=1600)
    play.core.tick(500.0)
    assert {row["session"]: row["fate"] for row in play.core.ledger.rows()} == {"x": "wasted", "y": "useful"}


# client-words


def test_breakpoints_are_kept_up_to_where_they_stand_and_for_as_long_as_they_say(playing, subject_of):
    play = playing(only(client_words=True))
    words = ClientWords(breakpoints=((640, 300.0), (100_000, 3600.0), (32, 300.0)))
    hints, _ = play.turn(subject_of(1, 100), 1.0, words=words)
    assert [(hint.action, hint.stop, hint.ttl, hint.priority) for hint in hints] == [
        (Action.RETAIN, 640, 300.0, 85),
        (Action.RETAIN, 1603, 3600.0, 85),
    ]


def test_what_is_wanted_for_long_is_pinned_in_storage_once_and_again_when_it_has_grown(playing, subject_of):
    play = playing(only(client_words=True, session_end=True))
    words = ClientWords(retention_seconds=86_400.0)
    _, first = play.turn(subject_of(1, 100, "x"), 1.0, words=words)
    assert said(first) == [(Action.PIN, "a", 0, 1603, None, "l2", None)]
    assert first[0].ttl == 86_400.0
    _, again = play.turn(subject_of(1, 105, "x"), 5.0, words=words)
    assert again == []
    _, grown = play.turn(subject_of(1, 140, "x"), 9.0, worker=1, words=words)
    assert said(grown) == [
        (Action.UNPIN, "a", 0, 1603, None, "l2", None),
        (Action.PIN, "b", 0, 2243, None, "l2", None),
    ]
    over = play.core.session_ended("x", 10.0)
    assert [(hint.action, hint.worker, hint.target) for hint in over] == [
        (Action.DEMOTE, "b", "device"),
        (Action.UNPIN, "b", "l2"),
    ]


def test_short_wishes_are_not_pinned_and_long_ones_have_a_limit(playing, subject_of):
    play = playing(only(client_words=ClientWordsRule(pin=900.0, longest=1000.0)))
    sent, answered = play.turn(subject_of(1, 100), 1.0, words=ClientWords(breakpoints=((1600, 300.0),)))
    assert len(sent) == 1
    assert answered == []
    _, answered = play.turn(subject_of(2, 100), 1.0, words=ClientWords(retention_seconds=86_400.0))
    assert [hint.ttl for hint in answered] == [1000.0]


# planner


def test_a_reservation_brings_what_the_stage_had_in_this_conversation(playing, subject_of):
    play = playing(only(planner=True))
    subject = subject_of(1, 100, "x")
    play.turn(subject, 1.0, stage="generator")
    play.held["a", subject.chains[BLOCK][-1]] = Match(device=0, l1=1600)
    hints = play.core.reserved("x", "generator", play.workers[0], 5.0)
    assert said(hints) == [(Action.PREFETCH, "a", 0, 1600, "l1", "device", None)]
    hints = play.core.reserved("x", "generator", play.workers[1], 5.0)
    assert said(hints) == [(Action.PREFETCH, "b", 0, 1600, "l1", "device", "a")]


def test_for_a_new_conversation_it_brings_what_all_of_the_stage_have_in_common(playing, subject_of):
    play = playing(only(planner=True))
    for number in range(3):
        play.turn(subject_of(number, 100, f"s{number}", common=60), 1.0, stage="generator")
    play.held["a", 1] = Match(device=1600)
    hints = play.core.reserved("new", "generator", play.workers[1], 5.0)
    assert said(hints) == [(Action.PREFETCH, "b", 0, 960, "device", "device", "a")]
    play.core.ledger.fate(hints[0], Fate.ACCEPTED, "", 5.0)
    entry = play.core.ledger.open[hints[0].id]
    play.turn(subject_of(9, 100, "new", common=60), 6.0, worker=1, cached=960, stage="generator")
    assert entry.fate is Fate.USEFUL


def test_nothing_is_brought_for_a_stage_that_nobody_has_seen(playing, subject_of):
    play = playing(only(planner=True))
    assert play.core.reserved("x", "generator", play.workers[0], 1.0) == []
    play.turn(subject_of(1, 100, "x"), 1.0, stage="generator")
    assert play.core.reserved("y", "generator", play.workers[0], 1.0) == [], (
        "one prompt has nothing in common with others"
    )


# drain


def test_live_conversations_of_a_leaving_worker_are_spread_over_the_others(playing, subject_of):
    play = playing(only(drain=True), "abc")
    for number in range(4):
        subject = subject_of(number, 100, f"s{number}")
        play.turn(subject, 100.0 + number)
        play.held["a", subject.chains[BLOCK][-1]] = Match(device=1600)
    play.turn(subject_of(50, 100, "elsewhere"), 104.0, worker=1)
    leaving, *others = play.workers
    hints = play.core.draining(leaving, others, 110.0)
    assert {hint.subject.session for hint in hints} == {"s0", "s1", "s2", "s3"}
    assert sorted(hint.worker for hint in hints) == ["b", "b", "c", "c"]
    assert {(hint.peer, hint.source, hint.target, hint.stop) for hint in hints} == {("a", "device", "device", 1600)}


def test_a_conversation_goes_where_most_of_it_is_and_comes_from_storage_where_it_is_there(playing, subject_of):
    play = playing(only(drain=True), "abc")
    one, two = subject_of(1, 100, "one"), subject_of(2, 100, "two")
    play.turn(one, 1.0)
    play.turn(two, 2.0)
    play.held["a", one.chains[BLOCK][-1]] = Match(device=1600)
    play.held["c", one.chains[BLOCK][-1]] = Match(device=960)
    for name in "abc":
        play.held[name, two.chains[BLOCK][-1]] = Match(l2=1600)
    leaving, *others = play.workers
    assert said(play.core.draining(leaving, others, 5.0)) == [
        (Action.PREFETCH, "b", 0, 1600, "l2", "l1", None),
        (Action.PREFETCH, "c", 960, 1600, "device", "device", "a"),
    ]


def test_the_silent_the_ended_and_the_lonely_stay_behind(playing, subject_of):
    play = playing(only(drain=True, session_end=True))
    for name, at in (("old", 1.0), ("over", 999.0)):
        subject = subject_of(ord(name[1]), 100, name)
        play.turn(subject, at)
        play.held["a", subject.chains[BLOCK][-1]] = Match(device=1600)
    play.core.session_ended("over", 999.5)
    leaving, *others = play.workers
    assert play.core.draining(leaving, others, 1000.0) == []
    assert play.core.draining(leaving, [], 1000.0) == []


def test_rules_that_are_off_say_nothing(playing, subject_of):
    play = playing(only())
    asked = Asked(subject_of(1, 300), 1.0, words=ClientWords(retention_seconds=9e4, session_end=True))
    assert play.core.rules == []
    assert play.core.waiting(asked, play.workers[0], Match(l1=1600, l2=1600)) == []
    assert play.core.sent(asked, play.workers[0], NO_MATCH) == []
    assert play.core.answered(asked, "a", 0, 2.0) == []
    assert play.core.tick(1e6) == []


def test_what_many_begin_with_and_only_a_leaving_worker_has_is_handed_over_too(playing, subject_of):
    play = playing(only(drain=True))
    for number in range(10):
        play.turn(subject_of(number, 120, f"s{number}", common=100), float(number), match=Match(device=1600))
    play.core.sessions.drop(play.core.sessions.get("s0", ""))
    play.held["a", 1] = Match(device=1600)
    leaving, *others = play.workers
    # Their conversations have been silent for too long, but new ones keep coming.
    hints = [hint for hint in play.core.draining(leaving, others, 20.0) if hint.reason.startswith("many")]
    assert said(hints) == [(Action.PREFETCH, "b", 0, 1600, "device", "device", "a")]
    play.core.ledger.fate(hints[0], Fate.ACCEPTED, "", 20.0)
    entry = play.core.ledger.open[hints[0].id]
    play.turn(subject_of(77, 120, "new", common=100), 21.0, worker=1, cached=1600)
    assert entry.fate is Fate.USEFUL
    play.held["b", 1] = Match(device=1600)
    hints = [hint for hint in play.core.draining(leaving, others, 20.0) if hint.reason.startswith("many")]
    assert hints == []


def test_prompts_with_one_cache_key_have_what_they_share_kept(playing, subject_of):
    play = playing(only(client_words=True))
    words = ClientWords(key="agents")
    spoken = [
        play.turn(subject_of(number, 120, f"s{number}", common=100), float(number), words=words)[0]
        for number in range(3)
    ]
    assert [said(hints) for hints in spoken] == [
        [],
        [(Action.RETAIN, "a", 0, 1600, None, "device", None)],
        [(Action.RETAIN, "a", 0, 1600, None, "device", None)],
    ]
    entry = play.core.ledger.open[spoken[2][0].id]
    play.turn(subject_of(3, 120, "s3", common=100), 3.0, cached=1600, words=words)
    assert entry.fate is Fate.USEFUL
    assert play.turn(subject_of(9, 120, "s9", common=100), 4.0, words=ClientWords(key="others"))[0] == []
