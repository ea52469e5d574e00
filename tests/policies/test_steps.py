"""Built-in filters, pickers and the scorers without state."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import RouteRequest
from policies.filters.healthy import Healthy
from policies.filters.model import Model
from policies.filters.untried import Untried
from policies.pickers.lowest_cost import LowestCost
from policies.pickers.power_of_two import PowerOfTwo
from policies.scorers.in_flight import InFlight
from policies.scorers.uniform import Uniform

REQUEST = RouteRequest(model="m")


@pytest.mark.parametrize("step", [Healthy(), Model(), Untried()])
def test_a_filter_with_nothing_to_drop_returns_what_it_was_given(step, fleet):
    candidates = fleet(3)
    assert step.filter(REQUEST, candidates) is candidates


def test_healthy_drops_workers_that_are_not_routable(fleet):
    candidates = fleet(4)
    candidates[0].worker.routable = candidates[2].worker.routable = False
    assert list(Healthy().filter(REQUEST, candidates)) == [candidates[1], candidates[3]]


def test_model_keeps_the_workers_of_the_request_s_model_out_of_several_fleets(candidate):
    mixed = [candidate("a", model="m"), candidate("b", model="other"), candidate("c", model="m-fp8")]
    assert list(Model().filter(REQUEST, mixed)) == [mixed[0]]
    assert list(Model(also=["m-fp8"]).filter(REQUEST, mixed)) == [mixed[0], mixed[2]]
    assert list(Model().filter(RouteRequest(model="none"), mixed)) == []


def test_untried_sends_a_retry_elsewhere(fleet):
    candidates = fleet(3)
    again = RouteRequest(model="m", attempt=1, tried=[candidates[1].worker.id])
    assert list(Untried().filter(again, candidates)) == [candidates[0], candidates[2]]


def test_untried_lets_all_through_when_all_were_tried(fleet):
    candidates = fleet(2)
    again = RouteRequest(model="m", attempt=2, tried=[each.worker.id for each in candidates])
    assert Untried().filter(again, candidates) is candidates


def test_in_flight_is_requests_with_this_one_divided_by_weight_less_one(candidate):
    idle = candidate("d", weight=0.1)
    candidates = [candidate("a", in_flight=4), candidate("b", in_flight=1, weight=0.1), candidate("c"), idle]
    assert list(InFlight().score(REQUEST, candidates)) == pytest.approx([4.0, 19.0, 0.0, 9.0])


def test_random_costs_are_uniform_shares(fleet):
    scorer, candidates = Uniform(rng=Random(2)), fleet(8)
    drawn = [cost for _ in range(1000) for cost in scorer.score(REQUEST, candidates)]
    assert all(0 <= cost < 1 for cost in drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.02)


@given(costs=st.lists(st.integers(0, 4).map(float), min_size=1, max_size=20), seed=st.integers())
def test_lowest_cost_never_picks_one_that_costs_more(costs, seed, fleet):
    index = LowestCost(rng=Random(seed)).pick(REQUEST, fleet(len(costs)), tuple(costs))
    assert costs[index] == min(costs)


@pytest.mark.parametrize(
    ("costs", "ties"), [((1.0, 1.0, 1.0), [0, 1, 2]), ((2.0, 1.0, 3.0, 1.0, 1.0), [1, 3, 4]), ((2.0, 1.0), [1])]
)
def test_each_of_the_cheapest_is_as_likely_as_the_others(costs, ties, fleet):
    picker, candidates = LowestCost(rng=Random(3)), fleet(len(costs))
    picked = [picker.pick(REQUEST, candidates, costs) for _ in range(3000)]
    assert set(picked) == set(ties)
    assert all(abs(picked.count(tie) - 3000 / len(ties)) < 110 for tie in ties)


def test_power_of_two_never_picks_the_dearest_of_three(fleet):
    picker, candidates = PowerOfTwo(rng=Random(4)), fleet(3)
    picked = [picker.pick(REQUEST, candidates, (1.0, 9.0, 5.0)) for _ in range(3000)]
    # Two of three are drawn: the cheapest is among them two times in three, else the middle one is the cheaper.
    assert picked.count(1) == 0
    assert picked.count(0) == pytest.approx(2000, abs=80)


def test_power_of_two_draws_every_pair_and_breaks_ties_evenly(fleet):
    picker, candidates = PowerOfTwo(rng=Random(5)), fleet(5)
    picked = [picker.pick(REQUEST, candidates, (1.0,) * 5) for _ in range(5000)]
    assert all(abs(picked.count(index) - 1000) < 110 for index in range(5))


def test_power_of_two_takes_the_only_candidate(fleet):
    assert PowerOfTwo(rng=Random(6)).pick(REQUEST, fleet(1), (3.0,)) == 0
