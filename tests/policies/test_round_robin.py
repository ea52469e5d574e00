from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import RouteRequest
from policies.turns import REMEMBERED

REQUEST = RouteRequest(model="m")


def take(policy, candidates, **fields):
    return policy.decide(RouteRequest(model="m", **fields), candidates).chosen.worker


def test_every_worker_has_its_turn_in_each_round_and_always_in_the_same_order(build, fleet):
    policy, candidates = build("roundrobin"), fleet(5)
    order = [take(policy, candidates).id for _ in range(20)]
    assert len(set(order[:5])) == 5
    assert order == order[:5] * 4


def test_costs_are_places_in_the_line_as_shares(build, fleet):
    policy, candidates = build("roundrobin"), fleet(5)
    order = [take(policy, candidates).id for _ in range(5)]
    decision = policy.decide(REQUEST, candidates)
    costs = {each.worker.id: cost for each, cost in zip(candidates, decision.costs, strict=True)}
    assert [costs[worker_id] for worker_id in order] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_first_worker_served_is_not_always_the_first_of_the_list(build, fleet):
    first = Counter(take(build("roundrobin", seed=seed), fleet(4)).id for seed in range(200))
    assert len(first) == 4
    assert max(first.values()) < 80


def test_retries_do_not_disturb_the_rotation(build, fleet):
    """One worker of four fails every request that reaches it: the others share its retries evenly."""
    policy, candidates = build("roundrobin"), fleet(4)
    broken = candidates[1].worker.id
    attempts, answered = Counter(), Counter()
    for _ in range(1200):
        worker = take(policy, candidates)
        attempts[worker.id] += 1
        if worker.id == broken:
            worker = take(policy, candidates, attempt=1, tried=[broken])
            attempts[worker.id] += 1
        answered[worker.id] += 1
    assert sum(answered.values()) == 1200
    assert max(attempts.values()) - min(attempts.values()) <= 1
    assert max(answered.values()) - min(answered.values()) <= 1
    assert broken not in answered


def test_a_worker_that_comes_back_gets_one_turn_not_all_that_it_missed(build, fleet):
    policy, candidates = build("roundrobin"), fleet(3)
    for _ in range(6):
        take(policy, candidates)
    candidates[0].worker.routable = False
    for _ in range(100):
        take(policy, candidates)
    candidates[0].worker.routable = True
    turns = [take(policy, candidates).id for _ in range(9)]
    assert turns[0] == candidates[0].worker.id
    assert Counter(turns) == {each.worker.id: 3 for each in candidates}


def test_a_new_worker_joins_without_moving_the_others_turns(build, fleet):
    policy, candidates = build("roundrobin"), fleet(4)
    old = candidates[:3]
    order = [take(policy, old).id for _ in range(3)]
    assert [take(policy, candidates).id for _ in range(8)] == [candidates[3].worker.id, *order] * 2


@settings(max_examples=60, deadline=None)
@given(away=st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=12))
def test_no_worker_waits_longer_than_a_round_while_workers_come_and_go(away, build, fleet):
    policy, candidates = build("roundrobin"), fleet(6)
    waited = Counter()
    for missing in [*away, set()]:
        present = [each for index, each in enumerate(candidates) if index not in missing]
        for _ in range(7):
            chosen = take(policy, present).id
            for each in present:
                waited[each.worker.id] = 0 if each.worker.id == chosen else waited[each.worker.id] + 1
            assert max(waited.values()) <= 5  # of six workers, each other one at most once in between


def test_a_worker_in_slow_start_has_its_turn_less_often(build, fleet, served):
    policy, candidates = build("roundrobin"), fleet(4)
    candidates[3].worker.weight = 0.25
    counts = served(policy, candidates, 1300)
    assert 90 <= counts[candidates[3].worker.id] <= 110  # 1300 · 0.25 / 3.25
    assert all(390 <= counts[each.worker.id] <= 410 for each in candidates[:3])


def test_a_worker_whose_slow_start_is_over_has_its_turn_at_once(build, fleet):
    policy, candidates = build("roundrobin"), fleet(4)
    candidates[3].worker.weight = 0.01
    for _ in range(40):
        take(policy, candidates)
    candidates[3].worker.weight = 1.0
    assert take(policy, candidates) is candidates[3].worker


def test_what_is_remembered_of_workers_that_left_is_bounded(build, candidate):
    policy = build("roundrobin")
    for n in range(10_000):
        take(policy, [candidate(f"pod-{n + k}") for k in range(3)])
    scorer = policy._scorer.__self__
    assert len(scorer._served) <= REMEMBERED + 6
    assert "pod-10001" in scorer._served or "pod-10000" in scorer._served
