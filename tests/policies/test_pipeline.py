from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import RouteRequest
from policies.pickers.lowest_cost import LowestCost
from policies.pipeline import Pipeline

REQUEST = RouteRequest(model="m")


class Fixed:
    """Costs as given, and a count of the calls."""

    def __init__(self, *costs):
        self.costs = costs
        self.calls = 0

    def score(self, request, candidates):
        self.calls += 1
        return list(self.costs[: len(candidates)])


class Keep:
    """Lets through the candidates at these places of what it is given."""

    def __init__(self, *places):
        self.places = places
        self.saw = None

    def filter(self, request, candidates):
        self.saw = candidates
        return [candidates[place] for place in self.places]


def pipeline(filters=(), scorers=(), picker=None, seed=1):
    return Pipeline("p", filters, scorers, picker or LowestCost(rng=Random(seed)), Random(seed))


def test_the_cheapest_candidate_is_chosen_and_the_decision_says_why(fleet):
    candidates = fleet(3)
    decision = pipeline(scorers=[(Fixed(3.0, 1.0, 2.0), 1.0)]).decide(REQUEST, candidates)
    assert decision.chosen is candidates[1]
    assert list(decision.candidates) == candidates
    assert list(decision.costs) == [3.0, 1.0, 2.0]
    assert decision.policy == "p"


def test_costs_are_the_weighted_sum_of_the_scorers(fleet):
    scorers = [(Fixed(1.0, 2.0), 0.5), (Fixed(10.0, 1.0), 2.0)]
    assert list(pipeline(scorers=scorers).decide(REQUEST, fleet(2)).costs) == [20.5, 3.0]


def test_filters_work_in_order_each_on_what_the_one_before_let_through(fleet):
    candidates = fleet(4)
    last = Keep(1, 0)
    decision = pipeline([Keep(1, 2, 3), last], [(Fixed(1.0, 0.0), 1.0)]).decide(REQUEST, candidates)
    assert list(last.saw) == candidates[1:]
    assert list(decision.candidates) == [candidates[2], candidates[1]]
    assert decision.chosen is candidates[1]


def test_a_filter_that_lets_nothing_through_refuses_the_request_without_scoring(fleet):
    scorer = Fixed(1.0, 2.0)
    assert pipeline([Keep()], [(scorer, 1.0)]).decide(REQUEST, fleet(2)) is None
    assert scorer.calls == 0


def test_no_candidates_no_decision():
    assert pipeline().decide(REQUEST, []) is None


def test_a_single_candidate_is_taken_without_scoring(fleet):
    scorer = Fixed(1.0)
    policy = pipeline(scorers=[(scorer, 1.0)])
    decision = policy.decide(REQUEST, candidates := fleet(1))
    assert decision.chosen is candidates[0]
    assert decision.costs == ()
    assert scorer.calls == 0


def test_without_scorers_all_candidates_are_equally_likely(fleet, served):
    counts = served(pipeline(), fleet(4), 4000)
    assert all(900 < count < 1100 for count in counts.values())


def test_a_scorer_of_weight_zero_is_not_asked(fleet):
    silent = Fixed(float("nan"), 0.0)
    policy = pipeline(scorers=[(silent, 0.0), (Fixed(1.0, 0.0), 2.0)])
    assert list(policy.decide(REQUEST, fleet(2)).costs) == [2.0, 0.0]
    assert silent.calls == 0
    assert policy.faults == 0


@given(
    costs=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=2, max_size=9),
    weight=st.floats(0.1, 10),
)
def test_the_fast_path_of_one_scorer_decides_as_the_general_one_does(fleet, costs, weight):
    first, second = [a for a, _ in costs], [b for _, b in costs]
    candidates = fleet(len(costs))
    fast = pipeline(scorers=[(Fixed(*first), 1.0)]).decide(REQUEST, candidates)
    general = pipeline(scorers=[(Fixed(*first), 1.0), (Fixed(*[0.0] * len(costs)), weight)]).decide(REQUEST, candidates)
    assert list(fast.costs) == list(general.costs) == first
    assert fast.chosen is general.chosen
    both = pipeline(scorers=[(Fixed(*first), 1.0), (Fixed(*second), weight)]).decide(REQUEST, candidates)
    assert list(both.costs) == pytest.approx([a + weight * b for a, b in costs])
    assert both.costs[candidates.index(both.chosen)] == min(both.costs)


def test_the_caller_s_list_stays_as_it_was_and_the_decision_keeps_its_own(fleet):
    candidates = fleet([1, 0])
    costs = [5.0, 1.0]

    class Reuses:
        def score(self, request, candidates):
            return costs

    decision = pipeline(scorers=[(Reuses(), 1.0)]).decide(REQUEST, candidates)
    costs[0] = 99.0
    candidates.clear()
    assert list(decision.costs) == [5.0, 1.0]
    assert len(decision.candidates) == 2


def test_an_observer_is_told_of_every_decision_even_of_one_without_choice(fleet):
    class Watching(Fixed):
        def __init__(self):
            super().__init__(0.0, 1.0)
            self.told = []

        def observe(self, request, decision):
            self.told.append(decision)

    watching = Watching()
    policy = pipeline(scorers=[(watching, 1.0)])
    decisions = [policy.decide(REQUEST, fleet(2)), policy.decide(REQUEST, fleet(1))]
    assert watching.told == decisions


@pytest.mark.parametrize("preset", ["roundrobin", "leastload", "p2c", "session", "chwbl"])
def test_the_same_seed_makes_the_same_choices(preset, build, fleet):
    def choices(seed):
        policy, candidates = build(preset, seed=seed), fleet([0, 1, 0, 0, 2, 0])
        return [policy.decide(REQUEST, candidates).chosen.worker.id for _ in range(60)]

    assert choices(3) == choices(3)
    assert choices(3) != choices(4)
