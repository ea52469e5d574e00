"""session and chwbl: who gets which key, what moves when workers come and go, and what a hot key may do."""

from collections import Counter
from fractions import Fraction
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Policy, Step
from policies.base import RouteRequest
from policies.hashing import REMEMBERED, Rendezvous, bounded_costs
from policies.registry import Registry

SESSIONS = 2000


def of_session(name):
    return RouteRequest(model="m", headers={"x-session-id": f"session-{name}"})


def of_prompt(text):
    return RouteRequest(model="m", body={"prompt": text})


@pytest.fixture(scope="session")
def owners(build):
    """Which worker each session goes to, in a fleet where nothing else is in flight."""

    def find(candidates, sessions=SESSIONS):
        policy = build("session")
        return [policy.decide(of_session(n), candidates).chosen.worker.id for n in range(sessions)]

    return find


def test_a_session_stays_with_its_worker(build, fleet):
    policy, candidates = build("session"), fleet([1, 1, 1, 1])
    assert len({policy.decide(of_session("a"), candidates).chosen for _ in range(50)}) == 1


def test_gateways_agree_about_every_session_whatever_their_order_of_workers(build, fleet):
    candidates = fleet(7)
    shuffled = Random(1).sample(candidates, 7)
    for n in range(200):
        one = build("session", seed=1).decide(of_session(n), candidates).chosen
        assert one is build("session", seed=2).decide(of_session(n), shuffled).chosen


def test_sessions_spread_evenly(owners, fleet):
    counts = Counter(owners(fleet(8)))
    assert len(counts) == 8
    assert all(SESSIONS / 8 * 0.8 < count < SESSIONS / 8 * 1.2 for count in counts.values())


@settings(max_examples=15, deadline=None)
@given(size=st.integers(2, 24), data=st.data())
def test_one_worker_that_leaves_moves_its_own_sessions_and_no_others(size, data, owners, fleet):
    candidates = fleet(size)
    gone = data.draw(st.integers(0, size - 1))
    before = owners(candidates, 400)
    after = owners(candidates[:gone] + candidates[gone + 1 :], 400)
    leaver = candidates[gone].worker.id
    assert all(old == new for old, new in zip(before, after, strict=True) if old != leaver)
    assert leaver not in after


@pytest.mark.parametrize("size", [2, 5, 10, 20])
def test_one_worker_that_joins_takes_its_share_and_moves_nothing_between_the_others(size, owners, fleet):
    candidates = fleet(size)
    before, after = owners(candidates[:-1]), owners(candidates)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {candidates[-1].worker.id}
    assert len(moved) == pytest.approx(SESSIONS / size, rel=0.25)


def test_the_sessions_of_a_worker_that_left_spread_over_all_others(owners, fleet):
    candidates = fleet(6)
    before, after = owners(candidates), owners(candidates[1:])
    heirs = Counter(new for old, new in zip(before, after, strict=True) if old == candidates[0].worker.id)
    assert len(heirs) == 5
    assert max(heirs.values()) < 2 * min(heirs.values())


def test_requests_without_a_session_go_by_load_and_not_all_to_one_worker(build, fleet, served):
    candidates = fleet([3, 3, 3, 1])
    assert build("session").decide(RouteRequest(model="m"), candidates).chosen is candidates[3]
    counts = served(build("session"), fleet(4), 400, hold=True)
    assert set(counts.values()) == {100}


@pytest.mark.parametrize("make_request", [lambda _n: of_session("hot"), lambda _n: of_prompt("the same for all")])
@pytest.mark.parametrize(("preset", "factor"), [("session", Fraction(4)), ("chwbl", Fraction(5, 4))])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_one_hot_key_never_puts_more_on_a_worker_than_the_bound(make_request, preset, factor, size, build, fleet):
    policy, candidates = build(preset), fleet(size)
    for n in range(200):
        chosen = policy.decide(make_request(n), candidates).chosen.worker
        chosen.in_flight += 1
        assert chosen.in_flight <= ceil(factor * (n + 1) / size)


def test_what_a_full_worker_cannot_take_goes_to_the_next_in_the_key_s_order(build, fleet):
    policy, candidates = build("session"), fleet([4] * 6)
    first = policy.decide(of_session("a"), candidates).chosen
    second = policy.decide(of_session("a"), [each for each in candidates if each is not first]).chosen
    first.worker.in_flight = 400
    assert policy.decide(of_session("a"), candidates).chosen is second


@given(
    loads=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1.0, 0.5, 0.25])), min_size=1, max_size=12),
    quarters=st.integers(4, 12),
    data=st.data(),
)
def test_the_first_in_order_that_is_within_the_bound_costs_nothing(loads, quarters, data, candidate):
    candidates = [candidate(str(n), in_flight=load, weight=weight) for n, (load, weight) in enumerate(loads)]
    order = data.draw(st.permutations(range(len(loads))))
    total, weights = sum(load for load, _ in loads), sum(Fraction(weight) for _, weight in loads)
    limits = [ceil(Fraction(quarters, 4) * (total + 1) * Fraction(weight) / weights) for _, weight in loads]
    within = [index for index in order if loads[index][0] + 1 <= limits[index]]
    costs = bounded_costs(list(order), candidates, quarters / 4)
    assert costs[within[0]] == 0
    assert sorted(range(len(loads)), key=costs.__getitem__)[: len(within)] == within
    assert all(0.5 <= cost < 1 for index, cost in enumerate(costs) if index != within[0])


def test_prompts_that_begin_alike_go_to_one_worker_and_others_elsewhere(build, fleet):
    policy, candidates = build("chwbl"), fleet([2] * 8)
    head = "You are a helpful assistant. " * 20
    alike = {policy.decide(of_prompt(head + str(n)), candidates).chosen.worker.id for n in range(50)}
    others = {policy.decide(of_prompt(f"{n} {head}"), candidates).chosen.worker.id for n in range(50)}
    assert len(alike) == 1
    assert len(others) > 5


def test_requests_without_text_go_by_load_under_chwbl(build, fleet):
    candidates = fleet([2, 0, 2])
    assert build("chwbl").decide(RouteRequest(model="m", body={"file": 1}), candidates).chosen is candidates[1]


def test_ten_thousand_workers_that_came_and_went_leave_nothing_behind(candidate):
    rendezvous = Rendezvous()
    for n in range(10_000):
        rendezvous.order(b"key", [candidate(f"pod-{n + k}") for k in range(3)])
    assert len(rendezvous._digests) <= REMEMBERED + 4 * 3 + 3


def test_in_a_weighted_sum_a_session_leaves_its_worker_only_for_a_clearly_shorter_queue(fleet):
    session = Step(type="session", weight=4, parameters={"max_load_factor": 100})
    section = Policy(scorers=(session, Step(type="in-flight")))
    policy, candidates = Registry.default().build("mine", {"mine": section}), fleet(4)
    home = policy.decide(of_session("a"), candidates).chosen
    home.worker.in_flight = 2
    assert policy.decide(of_session("a"), candidates).chosen is home
    home.worker.in_flight = 5
    assert policy.decide(of_session("a"), candidates).chosen is not home
