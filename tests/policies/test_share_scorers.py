"""The small scorers: what their formulas say, and the Inference Gateway's names for them."""

import pytest

from gateway.config.schema import Policy, Step
from policies.base import Decision, Match, RouteRequest
from policies.registry import ALIASES, Registry
from policies.scorers.dynamo_cost import DynamoCost
from policies.scorers.kv_pressure import KvPressure
from policies.scorers.lora_affinity import LoraAffinity
from policies.scorers.lru import Lru
from policies.scorers.predicted_latency import PredictedLatency
from policies.scorers.queue import Queue
from policies.scorers.running_requests import RunningRequests
from policies.scorers.tier_weighted_match import TierWeightedMatch

PROMPT = RouteRequest(model="m", prompt_tokens=1000, now=10.0)


def test_queue_and_running_requests_are_shares_of_the_span(real):
    workers = [real(), real(), real()]
    for each, pending, running in zip(workers, (0, 1, 4), (3, 1, 2), strict=True):
        for n in range(pending + running):
            lease = each.worker.acquire()
            if n < running:
                lease.first_byte()
    assert Queue().score(PROMPT, workers) == [0.0, 0.25, 1.0]
    assert RunningRequests().score(PROMPT, workers) == [1.0, 0.0, 0.5]
    assert Queue().score(PROMPT, workers[:1]) == [0.0]


def test_kv_pressure_is_the_share_of_the_pool(real):
    small, big, unknown = (
        real(kv_capacity_tokens=4000, max_model_len=4000), real(500, kv_capacity_tokens=8000, max_model_len=4000), real()
    )  # fmt: skip
    small.worker.acquire(1000)
    assert KvPressure().score(PROMPT, [small, big, unknown]) == pytest.approx([0.5, 500 / 8000, 1000 / 6000])
    assert KvPressure().score(PROMPT, [unknown]) == [0.0]


def test_tokens_in_slower_tiers_count_less(real):
    held = [real(), real(Match(device=1000)), real(Match(device=200, l1=400, l2=400))]
    assert TierWeightedMatch().score(PROMPT, held) == pytest.approx([1.0, 0.0, 1 - 0.2 - 0.3 - 0.1])
    assert TierWeightedMatch().score(RouteRequest(model="m"), held) == [0.0] * 3
    with pytest.raises(ValueError, match="must be in"):
        TierWeightedMatch(l1=1.5)


def test_new_prompts_go_round_and_known_ones_do_not_care(real):
    workers, scorer = [real(worker_id=str(n)) for n in range(3)], Lru()
    for n in (1, 0):
        scorer.observe(PROMPT, Decision(workers[n], workers, (), "p"))
    assert scorer.score(PROMPT, workers) == [1.0, 0.5, 0.0]
    known = [real(500, worker_id="9"), *workers]
    scorer.observe(PROMPT, Decision(known[0], known, (), "p"))
    assert scorer.score(PROMPT, known) == [0.0] * 4
    assert scorer.score(PROMPT, workers) == [1.0, 0.5, 0.0]


def test_adapters_draw_their_requests(real):
    workers = [real(lora_adapters=("sales",)), real()]
    assert LoraAffinity().score(RouteRequest(model="m", body={"model": "sales"}), workers) == [0.0, 1.0]
    assert LoraAffinity().score(RouteRequest(model="m", body={"model": "m"}), workers) == [0.0, 0.0]


def test_predicted_latency_is_a_share_between_best_and_worst(real):
    assert PredictedLatency().score(PROMPT, [real(), real(500), real(1000)]) == pytest.approx([1.0, 0.5, 0.0])
    assert PredictedLatency().score(RouteRequest(model="m"), [real(), real(500)]) == [0.0, 0.0]


def test_dynamo_s_cost_counts_blocks_to_compute_and_blocks_held(real):
    busy, tiered = real(block_size=32), real(Match(device=200, l1=400, l2=400))
    busy.worker.acquire(640)
    assert DynamoCost().score(PROMPT, [busy, tiered]) == pytest.approx([(640 + 1000 + 640) / 32, 400 / 16])
    assert DynamoCost(prefill_load_scale=0).score(PROMPT, [busy, tiered]) == pytest.approx([20, 0])


@pytest.mark.parametrize(
    "name", ["queue", "kvCache", "prefix", "lru", "loraAffinity", "runningRequests", "predictedLatency"]
)
def test_the_inference_gateway_s_weight_names_are_types_of_scorers(name, real):
    section = Policy(scorers=(Step(type=name, weight=2.0),))
    policy = Registry.default().build("p", {"p": section})
    assert policy.decide(PROMPT, [real(), real(500)]).costs
    assert policy.explain(PROMPT, [real(), real(500)]).rows[0].terms.keys() == {name}
    assert ALIASES.get(("scorer", name), name) in Registry.default().types("scorer")
