"""The waiting line: order, fairness, bounds, aging; nobody is lost."""

from collections import Counter
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.queue import AGED, State, Ticket, WaitingLine


def line(max_requests=1000, max_tokens=10**9, aging=inf):
    return WaitingLine(max_requests=max_requests, max_tokens=max_tokens, aging=aging)


def push(waiting, now=0.0, **fields):
    ticket = Ticket(now, **fields)
    assert waiting.push(ticket, now) == []
    return ticket


def drain(waiting, now=0.0):
    popped = []
    while (ticket := waiting.pop(now)) is not None:
        popped.append(ticket)
    return popped


def test_a_smaller_priority_comes_first_then_the_earlier_deadline_then_the_earlier_arrival():
    waiting = line()
    late, soon, urgent, first, second = (
        push(waiting, priority=0, deadline=9.0),
        push(waiting, priority=0, deadline=5.0),
        push(waiting, priority=-1, deadline=100.0),
        push(waiting, priority=1),
        push(waiting, priority=1),
    )
    assert drain(waiting) == [urgent, soon, late, first, second]


def test_one_that_left_is_gone():
    waiting = line()
    gone, stays = push(waiting, tokens=7), push(waiting, tokens=5)
    assert waiting.remove(gone)
    assert not waiting.remove(gone)
    assert (len(waiting), waiting.tokens, list(waiting)) == (1, 5, [stays])
    assert drain(waiting) == [stays]


def test_many_that_left_take_no_memory():
    waiting = line()
    stays = push(waiting, deadline=1e9)
    for index in range(5000):
        waiting.remove(push(waiting, deadline=float(index)))
    (lanes,) = waiting._classes.values()
    (lane,) = lanes.values()
    assert len(lane.heap) < 50
    assert len(waiting._latest) < 50
    assert drain(waiting) == [stays]


def test_tenants_take_turns_by_what_they_were_served_not_by_how_much_they_ask():
    waiting = line()
    for _ in range(50):
        push(waiting, tenant="flood", tokens=10)
    mine = [push(waiting, tenant="other", tokens=10) for _ in range(3)]
    order = [ticket.tenant for ticket in drain(waiting)]
    assert order[:6].count("other") == 3
    assert all(ticket.state is State.GRANTED for ticket in mine)


def test_a_tenant_that_paused_has_saved_nothing_up():
    waiting = line()
    for _ in range(100):
        push(waiting, tenant="busy", tokens=10)
    for _ in range(60):
        waiting.pop(0.0)
    for _ in range(40):
        push(waiting, tenant="back", tokens=10)
    assert abs(Counter(waiting.pop(0.0).tenant for _ in range(40))["back"] - 20) <= 1


@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.floats(0.5, 4), min_size=2, max_size=4),
    sizes=st.lists(st.integers(100, 300), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_token_shares_follow_the_weights_over_a_long_run(weights, sizes, seed):
    waiting = line()
    random, served = Random(seed), [0] * len(weights)
    names = {f"t{index}": index for index in range(len(weights))}

    def ask(index):
        push(waiting, tenant=f"t{index}", weight=weights[index], tokens=random.randint(1, sizes[index]))

    for index in range(len(weights)):
        for _ in range(4):
            ask(index)
    total = 0
    while total < 80_000 * len(weights):
        ticket = waiting.pop(0.0)
        index = names[ticket.tenant]
        served[index] += ticket.tokens
        total += ticket.tokens
        ask(index)
    for index, weight in enumerate(weights):
        assert served[index] / total == pytest.approx(weight / sum(weights), rel=0.05)


def test_what_an_answer_cost_counts_as_served_too():
    waiting = line()
    for _ in range(20):
        push(waiting, tenant="talks", tokens=1)
        push(waiting, tenant="brief", tokens=1)
    waiting.charge("talks", 1.0, 10)
    assert Counter(waiting.pop(0.0).tenant for _ in range(10))["brief"] >= 9


def test_nothing_starves_and_old_ones_take_no_more_than_their_share():
    waiting = line(aging=10.0)
    old = [push(waiting, 0.0, priority=5) for _ in range(3)]
    popped = []
    for turn in range(3 * AGED):
        push(waiting, 100.0, priority=0)
        popped.append(waiting.pop(100.0 + turn / 100))
    assert [ticket for ticket in popped if ticket in old] == old
    assert [index for index, ticket in enumerate(popped) if ticket in old] == [AGED - 1, 2 * AGED - 1, 3 * AGED - 1]


def test_a_full_line_refuses_and_lower_classes_make_room_latest_first():
    waiting = line(max_requests=3)
    first, second, third = (push(waiting, priority=priority) for priority in (1, 1, 0))
    equal = Ticket(0.0, priority=1)
    assert not waiting.accepts(equal)
    assert waiting.push(equal, 0.0) is None
    assert equal.state is State.NEW
    urgent = Ticket(0.0, priority=-1)
    assert waiting.push(urgent, 0.0) == [second]
    assert drain(waiting) == [urgent, third, first]


def test_a_flood_takes_nobodys_room():
    waiting = line(max_requests=4)
    flood = [push(waiting, tenant="flood") for _ in range(4)]
    assert waiting.push(Ticket(0.0, tenant="flood"), 0.0) is None
    assert waiting.push(Ticket(0.0, tenant="other"), 0.0) == [flood[3]]
    assert waiting.push(Ticket(0.0, tenant="other"), 0.0) == [flood[2]]
    assert waiting.push(Ticket(0.0, tenant="other"), 0.0) is None, "both have two now"
    assert waiting.push(Ticket(0.0, tenant="heavy", weight=3.0), 0.0) is not None


def test_tokens_are_bounded_but_one_long_prompt_may_wait_alone():
    waiting = line(max_tokens=100)
    assert waiting.push(Ticket(0.0, tokens=500), 0.0) == []
    assert waiting.push(Ticket(0.0, tokens=1), 0.0) is None
    drain(waiting)
    assert waiting.push(Ticket(0.0, tokens=60), 0.0) == []
    assert waiting.push(Ticket(0.0, tokens=41), 0.0) is None
    assert waiting.push(Ticket(0.0, tokens=40), 0.0) == []


def test_those_that_can_be_in_time_no_more_come_out():
    waiting = line()
    tickets = []
    for latest in (3.0, 1.0, 2.0):
        ticket = Ticket(0.0)
        ticket.latest = latest
        waiting.push(ticket, 0.0)
        tickets.append(ticket)
    assert waiting.next_expiry() == 1.0
    assert waiting.expired(2.5) == [tickets[1], tickets[2]]
    assert list(waiting) == [tickets[0]]


def test_only_groups_that_fit_come_out():
    waiting = line()
    blocked, free = push(waiting, group="a", priority=-5), push(waiting, group="b")
    assert waiting.pop(0.0, lambda group: group == "b") is free
    assert waiting.pop(0.0, lambda group: group == "b") is None
    assert list(waiting) == [blocked]


def test_one_that_comes_back_keeps_its_place():
    waiting = line()
    first, second = push(waiting, 1.0), push(waiting, 2.0)
    assert waiting.pop(3.0) is first
    assert waiting.push(first, 4.0) == []
    assert first.entered == 1.0
    assert drain(waiting) == [first, second]


@pytest.mark.parametrize(
    ("mine", "others", "ahead"),
    [(0, 50, 1), (1, 50, 3), (3, 2, 5)],
    ids=["a newcomer is behind one of the flood", "two turns, two of theirs", "no more of theirs than there are"],
)
def test_how_many_are_ahead_is_what_fairness_makes_of_it(mine, others, ahead):
    waiting = line()
    for _ in range(others):
        push(waiting, tenant="flood")
    for _ in range(mine):
        push(waiting, tenant="me")
    assert waiting.ahead(Ticket(0.0, tenant="me")) == ahead
    assert waiting.ahead(Ticket(0.0, tenant="me", priority=-1)) == 0
    assert waiting.ahead(Ticket(0.0, tenant="me", priority=1)) == mine + others


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 2), st.integers(0, 3), st.integers(1, 40), st.integers(0, 20)),
        st.tuples(st.just("pop"), st.sampled_from(["", "a"])),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("expire"), st.integers(0, 20)),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS)
def test_bounds_hold_and_every_ticket_is_in_one_place(operations):
    waiting = line(max_requests=8, max_tokens=120, aging=3.0)
    known, inside = [], set()
    for now, (what, *arguments) in enumerate(operations):
        if what == "push":
            priority, tenant, tokens, latest = arguments
            ticket = Ticket(
                float(now), tenant=f"t{tenant}", priority=priority, tokens=tokens, group="a" if tenant % 2 else ""
            )
            ticket.latest = now + latest
            known.append(ticket)
            losers = waiting.push(ticket, float(now))
            if losers is not None:
                assert all((loser.priority, loser.tenant) != (priority, ticket.tenant) for loser in losers)
                assert all(loser.priority >= priority for loser in losers)
                inside = (inside - set(losers)) | {ticket}
        elif what == "pop":
            fitting = [ticket for ticket in inside if ticket.group == arguments[0]]
            popped = waiting.pop(float(now), lambda group, wanted=arguments[0]: group == wanted)
            assert (popped is not None) == bool(fitting), "a turn is never wasted while somebody fits"
            inside.discard(popped)
        elif what == "leave" and arguments[0] < len(known):
            assert waiting.remove(known[arguments[0]]) == (known[arguments[0]] in inside)
            inside.discard(known[arguments[0]])
        elif what == "expire":
            gone = waiting.expired(float(arguments[0]))
            assert set(gone) == {ticket for ticket in inside if ticket.latest < arguments[0]}
            inside -= set(gone)
        assert set(waiting) == inside
        assert len(waiting) == len(inside) <= 8
        assert waiting.tokens == sum(ticket.tokens for ticket in inside) <= 120
    assert set(drain(waiting)) == inside
