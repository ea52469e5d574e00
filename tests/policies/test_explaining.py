"""explain: the table behind a decision, without side effects."""

import pytest

from gateway.config.schema import Policy, Step
from policies.base import Candidate, Explaining, RouteRequest
from policies.registry import Registry

REQUEST = RouteRequest(model="m", prompt_tokens=1000, now=10.0)


def build(preset="", seed=3, **section):
    sections = {"p": Policy(**section)} if section else {}
    return Registry.default().build(preset or "p", sections, seed=seed)


def test_every_filter_s_verdict_and_every_term_is_in_the_table(real):
    down, short, held, cold = real(worker_id="a"), real(worker_id="b"), real(900, worker_id="c"), real(worker_id="d")
    down.worker.routable = False
    short = real(worker_id="b", max_model_len=500, kv_capacity_tokens=5000)
    policy = build("ttft")
    assert isinstance(policy, Explaining)
    told = policy.explain(REQUEST, [down, short, held, cold])
    assert [row.rejected_by for row in told.rows] == ["healthy", "fits-context", "", ""]
    assert [row.cost is None for row in told.rows] == [True, True, False, False]
    assert told.rows[2].terms["prefill"] == pytest.approx(0.6)
    assert sum(told.rows[3].terms.values()) == pytest.approx(told.rows[3].cost)
    assert told.chosen == 2
    assert (
        told.reason
        == "c costs least of 2 candidates, 0.6 against 1.5 of the next; it holds 900 of the prompt's 1000 tokens."
    )


def test_weighted_costs_stand_under_the_names_of_the_configuration(real):
    policy = build(scorers=(Step(type="in-flight", weight=2.0), Step(type="prefix-match", name="cache", weight=0.5)))
    busy = real(500)
    busy.worker.acquire()
    told = policy.explain(REQUEST, [busy, real()], chosen=0)
    assert told.rows[0].terms == {"in-flight": 2.0, "cache": 0.25}
    assert told.rows[0].cost == 2.25
    assert told.chosen == 0
    assert "though another costs less" in told.reason


@pytest.mark.parametrize("preset", Registry.default().presets())
def test_explaining_changes_nothing(preset, real):
    """Two equal policies decide alike, though one explains itself all the time."""
    quiet, talking = build(preset), build(preset)
    workers = [real(100 * n, worker_id=str(n)) for n in range(4)]
    for _ in range(30):
        talking.explain(REQUEST, workers)
        assert quiet.decide(REQUEST, workers).chosen is talking.decide(REQUEST, workers).chosen
    assert talking.faults == 0


def test_snapshots_explain_a_decision_after_the_load_has_changed(real):
    workers = [real(worker_id="a"), real(worker_id="b")]
    workers[0].worker.acquire(3000, now=9.0)
    policy = build("ttft")
    before = [Candidate(each.worker.snapshot(), each.match) for each in workers]
    costs = [row.cost for row in policy.explain(REQUEST, before).rows]
    for each in workers:
        each.worker.acquire(9000, now=10.0)
    assert [row.cost for row in policy.explain(REQUEST, before).rows] == costs
    assert [row.cost for row in policy.explain(REQUEST, workers).rows] != costs


def test_nobody_left_and_only_one_left_say_so(real):
    down, up = real(worker_id="a"), real(worker_id="b")
    down.worker.routable = False
    assert (
        build("ttft").explain(REQUEST, [down]).reason == "None of 1 workers may take the request: dropped 1 by healthy."
    )
    assert build("ttft").explain(REQUEST, [down]).chosen is None
    told = build("ttft").explain(REQUEST, [down, up])
    assert (told.chosen, told.reason) == (1, "b was the only one of 2 workers that healthy let through.")
    assert build("ttft").explain(REQUEST, []).reason == "There are no workers."


class Broken:
    def score(self, request, candidates):
        raise RuntimeError("boom")


def test_a_step_that_fails_is_named(real):
    registry = Registry.default()
    registry.register("scorer", "broken", Broken)
    policy = registry.build("p", {"p": Policy(scorers=(Step(type="broken"),))})
    told = policy.explain(REQUEST, [real(worker_id="a"), real(worker_id="b")], chosen=1)
    assert told.reason == "b was chosen among 2 candidates by load; broken failed (RuntimeError)."
    assert [row.cost for row in told.rows] == [None, None]
    assert policy.faults == 0
