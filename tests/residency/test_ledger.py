"""The books of hints: each ends exactly once, sums are what happened, useless rules are held back."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.hints.model import Action, Fate, Hint, Subject
from gateway.config.residency import Throttle
from gateway.residency import ledger as ledger_module
from gateway.residency.ledger import ENDS, OFFERED, Ledger

SUBJECT = Subject("m", 100, {16: [1, 2, 3]})
SAID = [Fate.SENT, Fate.ACCEPTED, Fate.CONFIRMED]


def hint(number, action=Action.RETAIN, rule="retain", ttl=10.0, created=0.0, worker="a", target="device"):
    return Hint(
        id=number,
        action=action,
        rule=rule,
        worker=worker,
        subject=SUBJECT,
        stop=96,
        ttl=ttl,
        created=created,
        target=target,
    )


def sums(ledger):
    found = Counter()
    for _, _, _, fate, count in ledger.counts():
        found[fate] += count
    return found


steps = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.sampled_from(Action), st.floats(0.0, 50.0)),
        st.tuples(st.just("fate"), st.integers(1, 40), st.sampled_from(Fate)),
        st.tuples(st.just("pass"), st.floats(0.0, 100.0), st.none()),
    ),
    max_size=120,
)


@given(steps, st.integers(1, 12))
def test_every_hint_ends_exactly_once_whatever_is_told_of_it(history, most):
    ends = Counter()
    books = Ledger(Throttle(), lambda entry: ends.update([entry.id]))
    kept, ledger_module.MOST_OPEN = ledger_module.MOST_OPEN, most
    try:
        now, made = 0.0, {}
        for kind, one, other in history:
            if kind == "offer":
                made[len(made) + 1] = hint(len(made) + 1, one, ttl=other, created=now)
                books.offer(made[len(made)])
            elif kind == "fate" and one in made:
                books.fate(made[one], other, "", now)
            elif kind == "pass":
                now += one
                books.expire(now)
            counted = sums(books)
            assert books.offered == counted[OFFERED] == len(made) == len(books.open) + books.ended
            assert sum(counted[fate.value] for fate in ENDS) == books.ended == sum(ends.values())
            assert len(books.open) <= most
            assert not ends or max(ends.values()) == 1
        books.expire(now + 1e6)
        assert not books.open
        assert set(ends) == set(made)
    finally:
        ledger_module.MOST_OPEN = kept


@given(st.lists(st.sampled_from(Fate), max_size=10))
def test_a_fate_never_moves_backward_and_the_first_end_stands(fates):
    books = Ledger(Throttle())
    one = hint(1)
    entry = books.offer(one)
    rank = {None: 0, Fate.SENT: 1, Fate.ACCEPTED: 2, Fate.CONFIRMED: 3} | dict.fromkeys(ENDS, 4)
    for fate in fates:
        before, was = rank[entry.fate], entry.fate
        news = books.fate(one, fate, "", 1.0)
        assert rank[entry.fate] >= before
        assert news == (entry.fate is not was)
        if was in ENDS:
            assert entry.fate is was


@pytest.mark.parametrize(
    ("action", "said", "end"),
    [
        (Action.RETAIN, True, Fate.WASTED),
        (Action.PREFETCH, True, Fate.WASTED),
        (Action.DEMOTE, True, Fate.USEFUL),
        (Action.RETAIN, False, Fate.SKIPPED),
        (Action.DEMOTE, False, Fate.SKIPPED),
    ],
)
def test_what_nobody_asked_for_in_time_was_wasted_unless_it_was_to_go(action, said, end):
    books = Ledger(Throttle())
    one = hint(1, action, ttl=5.0)
    entry = books.offer(one)
    if said:
        books.fate(one, Fate.SENT, "", 0.0)
    books.expire(4.9)
    assert not entry.ended
    books.expire(5.0)
    assert entry.fate is end


def test_taking_a_pin_back_is_done_when_it_is_accepted():
    books = Ledger(Throttle())
    one = hint(1, Action.UNPIN)
    books.offer(one)
    books.fate(one, Fate.SENT, "", 0.0)
    assert books.open
    books.fate(one, Fate.ACCEPTED, "", 0.0)
    assert not books.open
    assert sums(books)["useful"] == 1
    assert books.rules == {}


def test_an_event_of_its_last_block_in_the_wished_memory_confirms_a_prefetch_that_was_said():
    books = Ledger(Throttle())
    one = hint(1, Action.PREFETCH, target="l1")
    entry = books.offer(one, mark=3)
    books.event("a", "l1", 3, 1.0)
    assert entry.fate is None, "not said yet"
    books.fate(one, Fate.SENT, "", 1.0)
    books.event("a", "device", 3, 1.0)
    books.event("b", "l1", 3, 1.0)
    assert entry.fate is Fate.SENT
    books.event("a", "l1", 3, 1.0)
    assert entry.fate is Fate.CONFIRMED
    books.fate(one, Fate.ACCEPTED, "", 1.0)
    assert entry.fate is Fate.CONFIRMED
    books.fate(one, Fate.USEFUL, "", 2.0)
    assert not books.watched


def resolve(books, number, useful, rule="retain"):
    one = hint(number, rule=rule)
    books.offer(one)
    books.fate(one, Fate.SENT, "", 0.0)
    books.fate(one, Fate.USEFUL if useful else Fate.WASTED, "", 0.0)


def test_a_rule_that_is_mostly_wrong_is_held_back_but_for_one_in_twenty_and_says_so_once():
    books = Ledger(Throttle())
    for number in range(49):
        resolve(books, number, useful=False)
    assert books.passes("retain")
    assert not books.throttled()
    for number in range(49, 80):
        resolve(books, number, useful=False)
    (text,) = books.throttled()
    assert "retain" in text
    assert books.news == [text]
    assert sum(books.passes("retain") for _ in range(200)) == 10
    assert books.rules["retain"].held == 190
    assert books.passes("drain"), "other rules are not concerned"
    for number in range(100, 130):
        resolve(books, number, useful=True)
    assert not books.throttled()
    assert len(books.news) == 2
    assert all(books.passes("retain") for _ in range(30))


@given(st.lists(st.booleans(), max_size=400), st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.integers(1, 60))
def test_a_rule_is_let_go_only_at_a_higher_share_than_it_is_held_at(outcomes, below, more, of):
    until = below + more
    books = Ledger(Throttle(below=below, until=until, of=of))
    for number, useful in enumerate(outcomes):
        record = books.rules.get("retain")
        before = record is not None and record.throttled
        resolve(books, number, useful)
        record = books.rules["retain"]
        latest = outcomes[max(0, number + 1 - of) : number + 1]
        assert record.useful == sum(latest)
        if record.throttled != before:
            share = sum(latest) / of
            assert len(latest) == of
            assert share < below if record.throttled else share >= until


def test_hints_that_were_not_sent_do_not_speak_for_or_against_their_rule():
    books = Ledger(Throttle(of=1))
    for number, fate in enumerate([Fate.SKIPPED, Fate.REFUSED, Fate.FAILED]):
        one = hint(number)
        books.offer(one)
        books.fate(one, fate, "", 0.0)
    assert books.rules == {}


def test_the_latest_hints_are_shown_without_their_prompts():
    books = Ledger(Throttle())
    for number in range(300):
        books.offer(hint(number))
    rows = books.rows()
    assert len(rows) == 200
    assert rows[0]["id"] == 299
    assert "subject" not in rows[0]
    assert rows[0]["fate"] == "offered"


def test_workers_that_come_and_go_do_not_make_the_sums_grow_without_end(monkeypatch):
    monkeypatch.setattr(ledger_module, "MOST_SUMS", 10)
    books = Ledger(Throttle())
    for number in range(100):
        books.offer(hint(number, worker=f"w{number}"))
    assert len(list(books.counts())) == 11
    assert sums(books)[OFFERED] == 100
