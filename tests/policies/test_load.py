"""leastload and p2c: what users of other routers complained about."""

import pytest

from policies.base import RouteRequest

REQUEST = RouteRequest(model="m")
BY_LOAD = ["leastload", "prefixaware", "kvaware", "lmetric"]
"""These go by requests in flight when the prompt's length is not known."""
PRESETS = [*BY_LOAD, "p2c", "roundrobin", "session", "chwbl"]


@pytest.mark.parametrize("preset", PRESETS)
def test_an_idle_fleet_asked_one_request_at_a_time_uses_all_its_workers(preset, build, fleet, served):
    counts = served(build(preset), fleet(4), 2000)
    assert all(420 < count < 580 for count in counts.values())


@pytest.mark.parametrize("preset", [*BY_LOAD, "roundrobin", "session", "chwbl"])
def test_a_burst_of_equal_requests_spreads_evenly(preset, build, fleet, served):
    counts = served(build(preset), fleet(8), 80, hold=True)
    assert set(counts.values()) == {10}


def test_a_burst_under_p2c_leaves_no_worker_far_above_the_others(build, fleet, served):
    counts = served(build("p2c"), fleet(8), 800, hold=True)
    assert max(counts.values()) - min(counts.values()) <= 4


@pytest.mark.parametrize("preset", BY_LOAD)
def test_without_a_known_prompt_the_worker_with_the_fewest_requests_is_taken(preset, build, fleet):
    candidates = fleet([5, 3, 1, 4])
    assert build(preset).decide(REQUEST, candidates).chosen is candidates[2]


@pytest.mark.parametrize("preset", [*BY_LOAD, "p2c", "session", "chwbl"])
def test_an_idle_new_worker_is_not_flooded(preset, build, fleet, served):
    """Three busy workers and one that has just become ready: while its weight is 0.1, it takes a tenth of a share."""
    candidates = fleet([20, 20, 20, 0])
    candidates[3].worker.weight = 0.1
    counts = served(build(preset), candidates, 40, hold=True)
    assert counts[candidates[3].worker.id] <= 5
    candidates[3].worker.weight = 1.0
    more = served(build(preset), candidates, 40, hold=True)
    assert more[candidates[3].worker.id] >= 10


@pytest.mark.parametrize("preset", PRESETS)
def test_a_retry_goes_to_a_worker_that_was_not_tried(preset, build, fleet):
    policy, candidates = build(preset), fleet(4)
    tried: list[str] = []
    for attempt in range(4):
        request = RouteRequest(model="m", headers={"x-session-id": "s"}, attempt=attempt, tried=tried)
        chosen = policy.decide(request, candidates).chosen.worker.id
        assert chosen not in tried
        tried.append(chosen)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_takes_a_worker_that_is_not_routable(preset, build, fleet):
    policy, candidates = build(preset), fleet([0, 9, 0])
    candidates[0].worker.routable = candidates[2].worker.routable = False
    assert policy.decide(REQUEST, candidates).chosen is candidates[1]
    candidates[1].worker.routable = False
    assert policy.decide(REQUEST, candidates) is None
