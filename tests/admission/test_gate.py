"""The gate: who goes, who waits, who is refused; a slot never idles while somebody fits, and nothing is lost."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.queue import State
from gateway.errors import GatewayError


def refusal(call):
    with pytest.raises(GatewayError) as caught:
        call()
    return caught.value


def test_an_idle_fleet_lets_everybody_through_with_all_its_candidates(fleet):
    many = fleet(3, 4)
    for index in range(12):
        ticket = many.ticket(0.0)
        candidates = [each.candidate for each in many.workers]
        if index < 9:
            assert many.gate.select(ticket, None, candidates, 0.0) is candidates
        many.ask(ticket, 0.0)
    assert [worker.in_flight for worker in many.workers] == [4, 4, 4]
    assert not many.gate.line


def test_a_worker_gets_no_more_than_its_slots(fleet):
    one = fleet(1, 2)
    tickets = [one.comes(0.0) for _ in range(5)]
    assert one.workers[0].in_flight == 2
    assert len(one.gate.line) == 3
    one.ends(tickets[0], 1.0)
    assert one.workers[0].in_flight == 2
    assert tickets[2].state is State.RUNNING
    assert tickets[2].waited == 1.0


def test_workers_whose_slots_nobody_knows_make_nobody_wait(fleet):
    one = fleet(1, None, prefill="chunked")
    for _ in range(50):
        one.comes(0.0)
    assert one.workers[0].in_flight == 50


def test_limits_count_where_they_are_below_the_slots(fleet):
    one = fleet(2, 4, limits={"w0": {"max_concurrent": 1}})
    for _ in range(9):
        one.comes(0.0)
    assert [worker.in_flight for worker in one.workers] == [1, 4]


def test_prefill_is_paced_on_workers_that_compute_one_prompt_at_a_time(fleet):
    one = fleet(1, 8, settings={"prefill_ahead": 1.0})
    first, second, third = (one.comes(0.0, tokens=800) for _ in range(3))
    assert one.sent == [first, second], "0.8 s are before the second, 1.6 s would be before the third"
    one.prefilled(first, 0.8)
    assert one.sent == [first, second, third]


def test_pacing_opens_by_time_where_no_event_tells(fleet):
    one = fleet(1, 8, settings={"prefill_ahead": 1.0})
    first = one.comes(1.0, tokens=3000)
    second = one.comes(1.0, tokens=10)
    assert one.gate.wake(1.0) == 1.25, "looked at now and then in any case"
    assert one.gate.wake(2.9) == pytest.approx(3.0)
    one.gate.advance(2.9)
    one.turns(2.9)
    assert one.sent == [first]
    one.gate.advance(3.05)
    one.turns(3.05)
    assert one.sent == [first, second]


def test_chunked_workers_are_not_paced(fleet):
    one = fleet(1, 8, settings={"prefill_ahead": 0.1}, prefill="chunked")
    for _ in range(8):
        one.comes(0.0, tokens=10_000)
    assert one.workers[0].in_flight == 8


def test_a_worker_that_takes_no_requests_has_no_room_and_none_at_all_is_the_policys_business(fleet):
    two = fleet(2, 1)
    two.workers[0].routable = False
    two.comes(0.0)
    waits = two.comes(0.0)
    assert [worker.in_flight for worker in two.workers] == [0, 1]
    assert len(two.gate.line) == 1
    two.workers[1].routable = False
    two.gate.advance(1.0)
    assert two.told == [(waits, None)]
    everybody = [each.candidate for each in two.workers]
    assert two.gate.select(waits, None, everybody, 1.0) is everybody


def test_a_newcomer_does_not_overtake_those_who_wait(fleet):
    one = fleet(1, 1)
    first = one.comes(0.0)
    second = one.comes(0.1)
    one.leases.pop(first).release(1.0)  # the slot is free, and nobody has told the gate yet
    third = one.ticket(1.0)
    one.ask(third, 1.0)
    one.turns(1.0)
    assert second.state is State.RUNNING
    assert third.state is State.WAITING


def test_one_whose_turn_has_come_has_its_place_until_it_is_decided(fleet):
    one = fleet(1, 1)
    first, second = one.comes(0.0), one.comes(0.1)
    one.leases.pop(first).release(1.0)
    one.gate.close(first, 1.0)
    assert one.told == [(second, None)]
    assert not one.ask(one.ticket(1.0), 1.0), "it would take the place of the second"
    one.turns(1.1)
    assert second.state is State.RUNNING


def test_one_that_leaves_when_its_turn_has_come_gives_its_place_to_the_next(fleet):
    one = fleet(1, 1)
    first, second, third = (one.comes(0.1 * index) for index in range(3))
    one.leases.pop(first).release(1.0)
    one.gate.close(first, 1.0)
    one.told.clear()
    one.gate.close(second, 1.0)
    assert one.told == [(third, None)]


# Deadlines.

STAGES = {
    "planner": {"kind": "completion", "deadline": 0.3, "priority": -10},
    "generator": {"deadline": 1.0},
}


def test_a_prediction_that_misses_the_deadline_is_refused_at_once_with_a_reason(fleet):
    two = fleet(1, 4, stages=STAGES)
    two.comes(1.0, "generator", tokens=900)
    error = refusal(lambda: two.comes(1.0, "generator", tokens=500))
    assert (error.status, error.code) == (429, "deadline_unreachable")
    assert error.retry_after == 1
    assert two.gate.refused == {"deadline_unreachable": 1}
    two.comes(1.9, "generator", tokens=500)
    assert two.workers[0].in_flight == 2


def test_only_candidates_that_are_in_time_are_decided_among(fleet):
    two = fleet(2, 4, stages=STAGES)
    two.comes(0.0, "generator", tokens=900)
    chosen = []
    for _ in range(2):
        ticket = two.comes(0.0, "generator", tokens=400)
        chosen.append(two.leases[ticket].worker.id)
    assert chosen == ["w1", "w1"]


def test_what_answers_take_is_learned_for_stages_that_promise_a_whole_one(fleet):
    one = fleet(1, 4, stages=STAGES)
    for index in range(10):
        ticket = one.comes(index, "planner", tokens=100)
        one.leases.pop(ticket).release(index + 0.4)
        one.gate.close(ticket, index + 0.4, index + 0.1, completed=True)
    one.comes(20.0, "generator", tokens=1)  # somebody else's
    one.comes(20.0, "planner", tokens=100)  # none of its stage is there: one is tried
    error = refusal(lambda: one.comes(20.0, "planner", tokens=100))
    assert error.code == "deadline_unreachable"


def test_the_line_alone_makes_it_late_before_anybody_looks_at_the_prompt(fleet):
    one = fleet(1, 1, stages=STAGES)
    one.workers[0].hold = 2.0
    one.comes(1.0, "generator", deadline=1e9)
    for _ in range(3):
        one.comes(1.1)
    error = refusal(lambda: one.gate.arrive(one.ticket(1.2, "generator"), 1.2))
    assert error.code == "deadline_unreachable"
    assert error.retry_after == 7, "four turns of two seconds, less the one second that it has"
    one.gate.arrive(one.ticket(1.2, "generator", priority=-1, deadline=5.0), 1.2)


def test_lower_classes_are_shed_first(fleet):
    one = fleet(1, 1, settings={"max_requests": 2, "prefill_ahead": 1e9})
    one.comes(0.0)
    batch = [one.comes(0.1, priority=10) for _ in range(2)]
    urgent = one.comes(0.2, priority=0)
    ((shed, error),) = one.told
    assert shed is batch[1]
    assert error.code == "shed"
    assert urgent.state is State.WAITING
    full = refusal(lambda: one.comes(0.3, priority=10))
    assert (full.code, full.status) == ("queue_full", 429)


# Stages.


def test_a_pool_serves_its_stage_only_and_the_stage_only_it(fleet):
    three = fleet(3, 1, stages={"planner": {"workers": ["w0"], "priority": -1}})
    planner = three.comes(0.0, "planner")
    assert three.leases[planner].worker.id == "w0"
    waits = three.comes(0.0, "planner")
    others = [three.comes(0.0) for _ in range(3)]
    assert sorted(three.leases[each].worker.id for each in others[:2]) == ["w1", "w2"]
    assert others[2].state is waits.state is State.WAITING
    three.ends(others[0], 1.0)
    assert waits.state is State.WAITING
    assert others[2].state is State.RUNNING


def test_slots_that_a_stage_has_reserved_are_left_free_for_it(fleet):
    four = fleet(1, 4, stages={"planner": {"reserve": 0.5}})
    others = [four.comes(0.0) for _ in range(3)]
    assert [each.state for each in others] == [State.RUNNING, State.RUNNING, State.WAITING]
    planners = [four.comes(0.1, "planner") for _ in range(2)]
    assert all(each.state is State.RUNNING for each in planners)
    four.ends(planners[0], 1.0)
    assert others[2].state is State.WAITING
    four.ends(others[0], 2.0)
    assert others[2].state is State.RUNNING


def test_a_stage_takes_no_more_than_its_share(fleet):
    four = fleet(1, 4, stages={"batch": {"max_share": 0.5}})
    batch = [four.comes(0.0, "batch") for _ in range(3)]
    assert [each.state for each in batch] == [State.RUNNING, State.RUNNING, State.WAITING]
    assert four.comes(0.1).state is State.RUNNING


def test_when_a_planner_starts_a_slot_is_kept_for_its_generator(fleet):
    two = fleet(2, 1, stages={"planner": {"workers": ["w0"]}, "generator": {"after": "planner", "hold": 2.0}})
    warmed = []
    two.gate.reservations.warm = lambda session, stage, worker: warmed.append((session, stage.name, worker.id))
    two.comes(0.0, "planner", session="s")
    assert warmed == [("s", "generator", "w1")]
    stranger = two.comes(0.1)
    assert stranger.state is State.WAITING
    generator = two.comes(0.2, "generator", session="s")
    assert generator.state is State.RUNNING
    assert len(two.gate.reservations) == 0


def test_a_reservation_that_nobody_claims_expires(fleet):
    two = fleet(2, 1, stages={"planner": {"workers": ["w0"]}, "generator": {"after": "planner", "hold": 2.0}})
    two.comes(0.0, "planner", session="s")
    waits = two.comes(0.1)
    two.gate.advance(1.9)
    assert two.told == []
    two.gate.advance(2.1)
    two.turns(2.1)
    assert waits.state is State.RUNNING


def test_a_tenant_that_has_its_share_leaves_headroom_to_the_others(fleet):
    ten = fleet(1, 10, settings={"headroom": 0.2, "prefill_ahead": 1e9})
    other = ten.comes(100.0, tenant="other")
    ten.ends(other, 101.0)
    flood = [ten.comes(102.0, tenant="flood") for _ in range(12)]
    assert ten.workers[0].in_flight == 8
    assert ten.comes(102.5, tenant="other").state is State.RUNNING
    ten.ends(flood[0], 103.0)
    assert ten.workers[0].in_flight == 8, "two slots are the others'"
    assert ten.comes(104.0, tenant="other").state is State.RUNNING


def test_the_only_tenant_gets_every_slot(fleet):
    ten = fleet(1, 10, settings={"headroom": 0.2, "prefill_ahead": 1e9})
    for _ in range(12):
        ten.comes(100.0, tenant="flood")
    assert ten.workers[0].in_flight == 10


# Whatever happens.


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_slots_are_never_exceeded_never_idle_and_nobody_is_lost(fleet, data):
    count, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    one = fleet(
        count, slots, settings={"max_requests": 6, "prefill_ahead": 1e9, "aging": 2.0, "max_wait": 0, "headroom": 0}
    )
    now, known = 0.0, []
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from([0.0, 0.1, 1.0]))
        what = data.draw(st.sampled_from(["come", "come", "end", "leave", "look"]))
        running = [ticket for ticket in known if ticket.state is State.RUNNING]
        waiting = [ticket for ticket in known if ticket.state is State.WAITING]
        if what == "come":
            ticket = one.ticket(now, tenant=data.draw(st.sampled_from("ab")), priority=data.draw(st.integers(0, 2)))
            known.append(ticket)
            try:
                one.ask(ticket, now)
            except GatewayError:
                one.gate.close(ticket, now)
        elif what == "end" and running:
            one.ends(data.draw(st.sampled_from(running)), now)
        elif what == "leave" and waiting:
            one.gate.close(data.draw(st.sampled_from(waiting)), now)
        else:
            one.gate.advance(now)
        one.turns(now)
        assert all(worker.in_flight <= slots for worker in one.workers)
        if one.gate.line:
            assert all(worker.in_flight == slots for worker in one.workers), "somebody waits and a slot idles"
        assert {ticket.state for ticket in known} <= {State.RUNNING, State.WAITING, State.ENDED}
    for round_ in itertools.count():
        running = [ticket for ticket in known if ticket.state is State.RUNNING]
        if not running:
            break
        assert round_ < 100
        one.ends(running[0], now)
    assert all(ticket.state is State.ENDED for ticket in known)
    assert not any(one.gate.room.granted.values())
    assert not any(one.gate.room.running.values())
