"""prefixaware, kvaware and lmetric: prefixes are followed, and no worker is buried under one."""

import random

import pytest

from gateway.config.schema import Capabilities
from policies.base import Candidate, Match, RouteRequest

PREFIX = ["prefixaware", "kvaware"]
ALL = [*PREFIX, "lmetric"]


def blocks(name, count):
    return [(name, n) for n in range(count)]


@pytest.mark.parametrize("preset", ALL)
@pytest.mark.parametrize("source", ["event", "expected", "history"])
def test_the_next_turn_goes_to_the_worker_that_holds_the_conversation(preset, source, build, fleet):
    candidates = fleet(8)
    candidates[5] = Candidate(candidates[5].worker, Match(device=900, source=source))
    request = RouteRequest(model="m", prompt_tokens=1000)
    assert build(preset).decide(request, candidates).chosen is candidates[5]


@pytest.mark.parametrize("tier", ["device", "l1", "l2"])
def test_tokens_held_in_any_tier_are_held(tier, build, fleet):
    candidates = fleet(4)
    candidates[2] = Candidate(candidates[2].worker, Match(**{tier: 500}, source="event"))
    assert build("kvaware").decide(RouteRequest(model="m", prompt_tokens=1000), candidates).chosen is candidates[2]


@pytest.mark.parametrize("preset", ALL)
def test_when_nobody_holds_anything_the_least_loaded_wins(preset, build, fleet):
    candidates = fleet([4, 3, 1, 2])
    assert build(preset).decide(RouteRequest(model="m", prompt_tokens=1000), candidates).chosen is candidates[2]
    for each, pending in zip(candidates, [0, 500, 800, 700], strict=True):
        each.worker.in_flight, each.worker.pending, each.worker.pending_tokens = 1, 1, pending
    assert build(preset).decide(RouteRequest(model="m", prompt_tokens=1000), candidates).chosen is candidates[0]


@pytest.mark.parametrize("preset", ALL)
def test_equal_holders_share_what_comes(preset, build, fleet, served):
    candidates = [Candidate(each.worker, Match(device=640, source="event")) for each in fleet(4)]
    counts = served(build(preset), candidates, 2000, lambda _n: RouteRequest(model="m", prompt_tokens=1000))
    assert all(420 < count < 580 for count in counts.values())


@pytest.mark.parametrize("preset", PREFIX)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [4, 64, 4096])
def test_a_burst_of_identical_new_prompts_lands_on_few_workers(preset, seed, length, naive_fleet):
    burst = naive_fleet(preset, seed=seed)
    for _ in range(32):
        burst.send(blocks("new", length))
    assert 1 <= len(burst.sent) <= 3
    prompt = length * burst.BLOCK + 1
    assert sum(burst.computed.values()) <= 3 * prompt + 32


def test_few_slots_spread_a_burst_over_more_workers(naive_fleet):
    burst = naive_fleet("kvaware", capabilities=Capabilities(slots=4))
    for _ in range(32):
        burst.send(blocks("new", 64))
    assert len(burst.sent) >= 5
    assert max(burst.sent.values()) <= 7
    assert sum(burst.computed.values()) <= 8 * (64 * burst.BLOCK + 1) + 32


@pytest.mark.parametrize("preset", PREFIX)
def test_bursts_of_different_prompts_go_to_different_workers(preset, naive_fleet):
    fleet = naive_fleet(preset)
    homes = [{fleet.send(blocks(name, 256)).id for _ in range(4)} for name in range(8)]
    assert len(set().union(*homes)) == 8
    assert sum(fleet.computed.values()) < 1.5 * 8 * 256 * fleet.BLOCK


@pytest.mark.parametrize("preset", PREFIX)
def test_one_huge_shared_prefix_uses_all_workers_under_load(preset, naive_fleet):
    """Every prompt begins with the same 8k tokens and adds 32 of its own; 128 run at any time, prefills are quick."""
    fleet = naive_fleet(preset)
    for number in range(1000):
        fleet.send([*blocks("hot", 512), *blocks(number, 2)])
        fleet.first_bytes()
        if len(fleet.running) > 128:
            fleet.end()
    assert len(fleet.sent) == 8
    assert max(worker.in_flight for worker in fleet.workers) <= 2 * 128 / 8
    assert sum(fleet.computed.values()) < 8 * 512 * fleet.BLOCK + 1000 * 3 * fleet.BLOCK


@pytest.mark.parametrize("preset", ALL)
def test_a_hot_prefix_leaves_a_worker_whose_queue_is_longer_than_computing_it_elsewhere(preset, build, fleet):
    candidates = fleet([9, 0])
    hot = candidates[0].worker
    candidates[0] = Candidate(hot, Match(device=8000, source="event"))
    request = RouteRequest(model="m", prompt_tokens=8192)
    hot.in_flight = hot.pending = 1
    hot.pending_tokens = 1000
    assert build(preset).decide(request, candidates).chosen is candidates[0]
    hot.pending_tokens = 100_000
    assert build(preset).decide(request, candidates).chosen is candidates[1]


def test_a_busy_fleet_holds_on_to_what_is_cached_longer_than_an_idle_one(build, fleet):
    """The holder has 12k tokens to compute first; elsewhere the prompt costs 8k. Others wait for those 8k only if there are any."""
    request = RouteRequest(model="m", prompt_tokens=8192)

    def chosen(pending_elsewhere):
        candidates = fleet(8)
        for each in candidates:
            worker = each.worker
            worker.in_flight = worker.pending = int(pending_elsewhere > 0)
            worker.pending_tokens = pending_elsewhere
        holder = candidates[3].worker
        holder.in_flight, holder.pending, holder.pending_tokens = 1, 1, pending_elsewhere + 12_000
        candidates[3] = Candidate(holder, Match(device=8000, source="event"))
        return build("kvaware").decide(request, candidates).chosen.worker is holder

    assert not chosen(0)
    assert chosen(1000)


@pytest.mark.parametrize("preset", ALL)
def test_traffic_without_reuse_is_spread_as_well_as_by_least_load(preset, replay):
    rng = random.Random(3)
    now, requests = 0.0, []
    for _ in range(2500):
        now += rng.expovariate(28.0)  # 70 % of what 8 workers prefill
        requests.append((now, 1 + int(rng.expovariate(1 / 1400)), 1 + int(rng.expovariate(1 / 100)), ()))
    requests = [
        (at, prompt, output, [(n, k) for k in range(prompt // 512)])
        for n, (at, prompt, output, _) in enumerate(requests)
    ]
    assert replay(preset, 8, requests).mean <= 1.01 * replay("leastload", 8, requests).mean


def conversations(seed, count, span):
    """Multi-turn chats over a few system prompts, arrivals in order."""
    rng = random.Random(seed)
    requests = []
    for chat in range(count):
        at, system, length = rng.random() * span, rng.randrange(4), 4096
        for _ in range(rng.randrange(1, 10)):
            length += rng.randrange(200, 2500)
            keys = [("system", system, n) if n < 8 else (chat, n) for n in range(length // 512)]
            requests.append((at, length, 150, keys))
            length += 150
            at += rng.expovariate(1 / 20)
    return sorted(requests, key=lambda request: request[0])


def test_conversations_find_their_cache_and_start_sooner_than_by_load(replay):
    requests = conversations(5, 300, 400.0)
    aware, blind = replay("kvaware", 8, requests), replay("leastload", 8, requests)
    assert aware.cached / aware.tokens > 1.4 * blind.cached / blind.tokens
    assert aware.mean < 0.5 * blind.mean


@pytest.mark.parametrize(
    ("preset", "knowledge"), [("prefixaware", "history"), ("kvaware", "events"), ("lmetric", "events"), ("p2c", "none")]
)
def test_a_policy_says_which_knowledge_of_the_caches_it_wants(preset, knowledge, build):
    assert build(preset).knowledge == knowledge
