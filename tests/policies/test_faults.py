"""A third-party step that misbehaves costs quality, never a request."""

from random import Random

import pytest

from policies.base import NO_MATCH, Candidate, RouteRequest
from policies.filters.healthy import Healthy
from policies.pickers.lowest_cost import LowestCost
from policies.pipeline import FAULT_LENGTH, Pipeline
from policies.scorers.in_flight import InFlight

REQUEST = RouteRequest(model="m")


class BadTextError(Exception):
    def __str__(self):
        raise RuntimeError("not even a text")


class Step:
    """Filter, scorer and picker in one, made of a function."""

    def __init__(self, do):
        self.do = do

    def filter(self, request, candidates):
        return self.do(candidates)

    def score(self, request, candidates):
        return self.do(candidates)

    def pick(self, request, candidates, costs):
        return self.do(candidates)


def raises(error):
    def do(candidates):
        raise error

    return Step(do)


def stranger(candidates):
    return Candidate(candidates[0].worker, NO_MATCH)


FILTERS = {
    "raises": raises(ValueError("no")),
    "returns None": Step(lambda _c: None),
    "returns a number": Step(lambda _c: 7),
    "returns a stranger": Step(lambda c: [c[0], stranger(c)]),
    "returns one twice": Step(lambda c: [c[0], c[0]]),
    "returns workers": Step(lambda c: [each.worker.id for each in c]),
    "changes what it was given": Step(lambda c: c.clear()),
    "raises without a text": raises(BadTextError()),
}
SCORERS = {
    "raises": raises(ZeroDivisionError("division by zero")),
    "returns None": Step(lambda _c: None),
    "too few": Step(lambda _c: [1.0]),
    "too many": Step(lambda c: [1.0] * (len(c) + 1)),
    "nan": Step(lambda c: [float("nan")] + [1.0] * (len(c) - 1)),
    "infinite": Step(lambda c: [float("inf")] + [1.0] * (len(c) - 1)),
    "both infinities": Step(lambda c: [float("inf"), float("-inf"), *[1.0] * (len(c) - 2)]),
    "text": Step(lambda c: ["1"] * len(c)),
    "nothing inside": Step(lambda c: [None] * len(c)),
}
PICKERS = {
    "raises": raises(KeyError("x")),
    "too high": Step(len),
    "negative": Step(lambda _c: -1),
    "None": Step(lambda _c: None),
    "a fraction": Step(lambda _c: 0.0),
    "a candidate": Step(lambda c: c[0]),
}


def decide(candidates, filters=(), scorers=(), picker=None):
    policy = Pipeline("p", filters, scorers, picker or LowestCost(rng=Random(1)), Random(1))
    return policy, policy.decide(REQUEST, candidates)


@pytest.mark.parametrize("name", FILTERS)
def test_after_a_bad_filter_the_least_loaded_of_what_the_other_filters_let_through_is_taken(name, fleet):
    candidates = fleet([3, 0, 1, 2])
    candidates[1].worker.routable = False
    policy, decision = decide(candidates, [FILTERS[name], Healthy()], [(InFlight(), -1.0)])
    assert decision.chosen is candidates[2]
    assert list(decision.candidates) == [candidates[0], candidates[2], candidates[3]]
    assert policy.faults == 1
    assert policy.last_fault.startswith("Step: ")


@pytest.mark.parametrize("more", [[], [(InFlight(), 1.0)]], ids=["alone", "in a sum"])
@pytest.mark.parametrize("name", SCORERS)
def test_after_a_bad_scorer_the_least_loaded_is_taken(name, more, fleet):
    candidates = fleet([3, 2, 0, 1])
    policy, decision = decide(candidates, scorers=[*more, (SCORERS[name], 1.0)])
    assert decision.chosen is candidates[2]
    assert policy.faults == 1
    assert policy.last_fault.startswith("Step: ")


@pytest.mark.parametrize("name", PICKERS)
def test_after_a_bad_picker_the_least_loaded_is_taken(name, fleet):
    candidates = fleet([3, 2, 0, 1])
    policy, decision = decide(candidates, scorers=[(InFlight(), -1.0)], picker=PICKERS[name])
    assert decision.chosen is candidates[2]
    assert policy.faults == 1


def test_a_bad_observer_changes_nothing_but_the_count(fleet):
    class Bad(InFlight):
        def observe(self, request, decision):
            raise OSError("disk full")

    candidates = fleet([1, 0])
    policy, decision = decide(candidates, scorers=[(Bad(), 1.0)])
    assert decision.chosen is candidates[1]
    assert policy.faults == 1
    assert policy.last_fault.endswith("OSError: disk full")


def test_after_a_fault_ties_are_broken_at_random(fleet, served):
    policy = Pipeline("p", [], [], PICKERS["too high"], Random(5))
    counts = served(policy, fleet(4), 4000)
    assert all(900 < count < 1100 for count in counts.values())
    assert policy.faults == 4000


def test_a_filter_that_fails_does_not_undo_that_another_refused_the_request(fleet):
    policy, decision = decide(fleet(2), [FILTERS["raises"], Step(lambda _c: [])])
    assert decision is None
    assert policy.faults == 1


def test_a_fault_s_text_has_a_limit(fleet):
    policy, _ = decide(fleet(2), [raises(ValueError("x" * 100_000))])
    assert len(policy.last_fault) == FAULT_LENGTH


def test_huge_costs_are_not_mistaken_for_infinite_ones(fleet):
    candidates = fleet(2)
    policy, decision = decide(candidates, scorers=[(Step(lambda _c: [1.7e308, 1.6e308]), 1.0)])
    assert decision.chosen is candidates[1]
    assert policy.faults == 0


def test_a_weight_that_makes_a_finite_cost_overflow_is_a_fault_too(fleet):
    policy, decision = decide(fleet([0, 0, 1]), scorers=[(Step(lambda _c: [1e308, 1e308, 1.0]), 100.0)])
    assert policy.faults == 1
    assert decision.chosen.worker.in_flight == 0


def test_what_is_not_an_exception_of_the_step_passes(fleet):
    with pytest.raises(KeyboardInterrupt):
        decide(fleet(2), [raises(KeyboardInterrupt())])
