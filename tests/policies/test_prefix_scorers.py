"""The costs that read matches and tokens: formulas and invariants."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import Capabilities, Policy
from policies.base import Candidate, Match, RouteRequest
from policies.parameters import PolicyError
from policies.registry import Registry
from policies.scorers.in_flight_tokens import InFlightTokens
from policies.scorers.lmetric import LMetric
from policies.scorers.prefill_cost import PrefillCost
from policies.scorers.prefix_match import PrefixMatch
from policies.scorers.uncached_tokens import UncachedTokens

MATCHING = [PrefixMatch, UncachedTokens, LMetric, PrefillCost]
PROMPT = RouteRequest(model="m", prompt_tokens=1000)


@pytest.fixture(scope="module")
def worker(candidate):
    """A candidate: its match in tokens, and the fields of its worker."""

    def make(match=0, **fields):
        if isinstance(slots := fields.pop("slots", None), int):
            fields["capabilities"] = Capabilities(slots=slots)
        source = "event" if match else ""
        return Candidate(candidate(**fields).worker, Match(device=match, source=source))

    return make


@pytest.mark.parametrize(
    ("scorer", "costs"),
    [
        (PrefixMatch(), [1.0, 0.4, 0.0]),
        (UncachedTokens(), [1000, 400, 0]),
        (InFlightTokens(), [0, 300, 20]),
        (LMetric(), [1000 * 1, 700 * 3, 10 * 2 / 0.25]),
        (PrefillCost(congestion_price=3, occupancy=0), [3000, 300 + 1200, 20]),
        (PrefillCost(congestion_price=0, occupancy=2, assumed_slots=10), [1000, 300 + 2000 * 2 / 8 + 400, 20 + 400]),
    ],
)
def test_costs_are_what_their_formulas_say(scorer, costs, worker):
    """Three workers: idle and empty; two requests, 600 tokens held, eight slots; in slow start, all held in two tiers."""
    slow = worker(in_flight=1, pending=1, pending_tokens=10, weight=0.5)
    candidates = [
        worker(),
        worker(600, in_flight=2, pending=2, pending_tokens=300, slots=8),
        Candidate(slow.worker, Match(device=500, l2=500, source="event")),
    ]
    assert list(scorer.score(PROMPT, candidates)) == pytest.approx(costs)


def test_a_full_worker_costs_a_prompt_more_as_long_as_another_has_a_free_slot(worker):
    scorer = PrefillCost(occupancy=1)
    full, free = worker(in_flight=4, slots=4), worker(in_flight=1, slots=4)
    unknown = worker(in_flight=120)
    assert scorer.score(PROMPT, [full, free]) == [1000 + 1000 + 1000, 250 + 1000]
    assert scorer.score(PROMPT, [full, full]) == [1000 + 1000] * 2
    assert scorer.score(PROMPT, [full, unknown]) == [1000 + 1000 + 1000, 10_000 + 1000]


@pytest.mark.parametrize("scorer", MATCHING)
def test_a_prompt_of_unknown_length_costs_the_same_everywhere(scorer, worker):
    candidates = [worker(), worker(500), worker(in_flight=3, pending=1, pending_tokens=70)]
    assert len(set(scorer().score(RouteRequest(model="m"), candidates))) == 1


@pytest.mark.parametrize("scorer", MATCHING)
def test_a_match_longer_than_the_prompt_counts_as_all_of_it(scorer, worker):
    whole, more = scorer().score(PROMPT, [worker(1000), worker(5000)])
    assert whole == more >= 0


@pytest.mark.parametrize("parameter", [{"congestion_price": -1.0}, {"occupancy": float("nan")}, {"assumed_slots": 0}])
@pytest.mark.parametrize("preset", ["kvaware", "prefixaware"])
def test_parameters_that_make_no_sense_are_refused(preset, parameter):
    section = Policy(preset=preset, parameters=parameter)
    with pytest.raises(PolicyError, match=next(iter(parameter))):
        Registry.default().build("mine", {"mine": section})


def test_a_policy_of_one_s_own_wants_events_when_a_step_reads_matches():
    steps = {"scorers": [{"type": "uncached-tokens"}, {"type": "in-flight-tokens"}]}
    section = msgspec.convert(steps, Policy)
    assert Registry.default().build("mine", {"mine": section}).knowledge == "events"
    unused = msgspec.convert({"scorers": [{"type": "uncached-tokens", "weight": 0}, {"type": "in-flight"}]}, Policy)
    assert Registry.default().build("mine", {"mine": unused}).knowledge == "none"


def test_a_preset_with_other_parameters_keeps_to_its_history():
    section = Policy(preset="prefixaware", parameters={"occupancy": 1.0})
    assert Registry.default().build("mine", {"mine": section}).knowledge == "history"


tokens = st.integers(0, 200_000)
workers = st.fixed_dictionaries(
    {
        "match": tokens,
        "pending_tokens": tokens,
        "pending": st.integers(0, 9),
        "in_flight": st.integers(0, 90),
        "weight": st.sampled_from([1.0, 1.0, 0.5, 0.1]),
        "slots": st.sampled_from([None, 4, 256]),
    }
)
fleets = st.lists(workers, min_size=2, max_size=9)
prompts = st.integers(1, 200_000)
presets = st.sampled_from(["prefixaware", "kvaware", "lmetric"])


def told(fields):
    """Only what the gateway can count: who is pending is in flight, and has something to be computed."""
    busy = fields["pending"] > 0
    return {
        **fields,
        "in_flight": max(fields["in_flight"], fields["pending"]),
        "pending_tokens": max(1, fields["pending_tokens"]) if busy else 0,
    }


def costs(scorer, worker, prompt, fleet):
    return list(scorer.score(RouteRequest(model="m", prompt_tokens=prompt), [worker(**told(each)) for each in fleet]))


@given(presets, fleets, st.integers(0, 200_000), st.integers(0, 9))
def test_the_choice_is_one_of_the_candidates_and_nothing_faults(worker, preset, fleet, prompt, seed):
    policy = Registry.default().build(preset, {}, seed=seed)
    candidates = [worker(worker_id=str(n), **told(each)) for n, each in enumerate(fleet)]
    decision = policy.decide(RouteRequest(model="m", prompt_tokens=prompt), candidates)
    assert policy.faults == 0, policy.last_fault
    assert decision.chosen in candidates
    assert decision.costs[candidates.index(decision.chosen)] == min(decision.costs)


@pytest.mark.parametrize("scorer", MATCHING)
@given(fleet=fleets, prompt=prompts, more=tokens)
def test_more_of_the_prompt_held_never_makes_a_candidate_worse(worker, scorer, fleet, prompt, more):
    better = [{**fleet[0], "match": fleet[0]["match"] + more}, *fleet[1:]]
    before, after = costs(scorer(), worker, prompt, fleet), costs(scorer(), worker, prompt, better)
    assert after[0] <= before[0]
    assert after[1:] == before[1:]


@pytest.mark.parametrize("scorer", [InFlightTokens, LMetric, PrefillCost])
@given(fleet=fleets, prompt=prompts, more=tokens)
def test_more_pending_tokens_never_make_a_candidate_better(worker, scorer, fleet, prompt, more):
    fleet = [{**fleet[0], "pending": max(1, fleet[0]["pending"])}, *fleet[1:]]
    worse = [{**fleet[0], "pending_tokens": fleet[0]["pending_tokens"] + more}, *fleet[1:]]
    before, after = costs(scorer(), worker, prompt, fleet), costs(scorer(), worker, prompt, worse)
    assert after[0] >= before[0]
    assert after[1:] == before[1:]


@pytest.mark.parametrize("scorer", [LMetric, PrefillCost])
@given(fleet=fleets, prompt=prompts, more=st.integers(0, 50))
def test_more_requests_in_flight_never_make_a_candidate_better(worker, scorer, fleet, prompt, more):
    """Better than others, that is: when the last worker with a free slot fills up, being full stops to matter."""
    fleet = [{**fleet[0], "in_flight": 9 + fleet[0]["in_flight"]}, *fleet[1:]]
    worse = [{**fleet[0], "in_flight": fleet[0]["in_flight"] + more}, *fleet[1:]]
    before, after = costs(scorer(), worker, prompt, fleet), costs(scorer(), worker, prompt, worse)
    assert all(
        after[0] - after[n] >= before[0] - before[n] or after[0] - after[n] == pytest.approx(before[0] - before[n])
        for n in range(1, len(fleet))
    )


@pytest.mark.parametrize("scorer", [PrefixMatch, UncachedTokens, InFlightTokens, PrefillCost])
@given(fleet=fleets, prompt=prompts)
def test_twice_the_tokens_everywhere_mean_the_same_order(worker, scorer, fleet, prompt):
    fleet = [told(each) for each in fleet]
    twice = [{**each, "match": 2 * each["match"], "pending_tokens": 2 * each["pending_tokens"]} for each in fleet]
    once, doubled = costs(scorer(), worker, prompt, fleet), costs(scorer(), worker, 2 * prompt, twice)
    # Twice a float is exact, so the order is the very same, ties included.
    factor = 1 if scorer is PrefixMatch else 2
    assert doubled == [factor * cost for cost in once]
