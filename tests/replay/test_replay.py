"""A fleet in virtual time: every request ends once, and what is measured is what happened."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.registry import PolicyError, Registry
from simulator.engine import profile_named
from simulator.fleet import FleetOptions, Outcome, replay
from simulator.fleet.run import _Run

POLICIES = ["roundrobin", "leastload", "p2c", "session", "chwbl", "prefixaware", "kvaware", "lmetric"]


def some_workload(new_script, seed, count=60, rate=4.0, longest=12):
    """Requests of a few families at random times; some come after another one."""
    random = Random(seed)
    script = new_script()
    time = 0.0
    for index in range(count):
        time += random.expovariate(rate)
        family = random.randrange(5)
        length = random.randint(1, longest)
        shared = random.randint(0, length)
        blocks = [
            *range(family * 100, family * 100 + shared),
            *range(10_000 + 100 * index, 10_000 + 100 * index + length - shared),
        ]
        tokens = 100 * length - random.randrange(100)
        after = f"q{random.randrange(index)}" if index and random.random() < 0.2 else None
        script.ask(
            time,
            blocks,
            random.randint(1, 300),
            tokens=tokens,
            after=after,
            delay=random.random(),
            session=f"s{family}",
        )
    return script.workload


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from(POLICIES),
    st.integers(1, 5),
    st.sampled_from([14, 40, 1000]),
    st.sampled_from([0.0, 0.3]),
)
def test_every_request_ends_once_and_every_token_is_counted_once(
    new_script, fleet, seed, policy, workers, blocks, loss
):
    work = some_workload(new_script, seed)
    options = fleet(workers=workers, kv_blocks=blocks, event_loss=loss, seed=seed)
    run = _Run(work, options, Registry.default().build(policy, {}, seed=seed), None)
    run.to_the_end()  # raises if a request did not end, ended twice, or left a lease behind
    result = run.result()
    out = result.requests
    assert sum(out.count(outcome) for outcome in Outcome) == len(work.requests)
    assert out.count(Outcome.UNENDED) == out.count(Outcome.FAILED) == 0
    stats = [engine.stats for engine in run._engines]
    assert result.computed_by_worker() == [each.computed_tokens for each in stats]
    answered = [index for index in range(len(out)) if out.outcome[index] == Outcome.COMPLETED]
    assert sum(result.computed_by_worker()) + sum(out.device[i] + out.l1[i] + out.l2[i] for i in answered) == sum(
        out.prompt[index] for index in answered
    )
    for index in answered:
        assert 0 < out.ttft[index] <= out.e2e[index]
        assert out.e2e[index] >= out.ttft[index] + (out.output[index] - 1) * 0.01 - 1e-9
    assert result.infinite_hit_rate >= result.summary()["hit_rate"] - 1e-12


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_one_worker_with_an_endless_cache_hits_what_the_trace_allows(new_script, fleet, seed):
    work = some_workload(new_script, seed)
    summary = replay(work, fleet(workers=1, kv_blocks=100_000), "roundrobin").summary()
    assert summary["hit_rate"] == summary["infinite_hit_rate"] == summary["pooled_lru_hit_rate"]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_runs(new_script, fleet, policy):
    options = fleet(workers=4, kv_blocks=60, event_loss=0.1, seed=3)
    one, two = (replay(some_workload(new_script, 1), options, policy) for _ in range(2))
    assert one.requests.worker == two.requests.worker
    assert one.requests.ttft.tobytes() == two.requests.ttft.tobytes()
    assert one.summary() == two.summary()


def test_other_seeds_break_ties_otherwise(new_script, fleet):
    work = some_workload(new_script, 1)
    one, two = (replay(work, fleet(workers=4, seed=seed), "leastload") for seed in (1, 2))
    assert one.requests.worker != two.requests.worker


def test_a_lone_request_takes_what_the_profile_says(script, fleet):
    script.ask(5.0, range(10), output=101)
    result = replay(script.workload, fleet(workers=1, overhead=0.25), "roundrobin")
    assert result.requests.arrival[0] == 5.0
    assert result.requests.ttft[0] == pytest.approx(1.25)
    assert result.requests.e2e[0] == pytest.approx(2.25)
    assert result.duration == pytest.approx(2.25)


def test_a_prefix_that_was_computed_is_not_computed_again(script, fleet):
    script.ask(0.0, range(10))
    script.ask(5.0, range(20))
    result = replay(script.workload, fleet(workers=1), "kvaware")
    assert list(result.requests.device) == [0, 1000]
    assert list(result.requests.predicted) == [0, 1000]
    assert result.requests.ttft[1] == pytest.approx(1.0)


def test_a_request_after_another_waits_for_its_end_and_its_pause(script, fleet):
    first = script.ask(0.0, range(10), output=101)
    script.ask(1.0, range(20), after=first, delay=3.0)
    script.ask(30.0, range(30), after=first, delay=3.0)
    result = replay(script.workload, fleet(workers=1), "roundrobin")
    assert list(result.requests.arrival) == pytest.approx([0.0, 2.0 + 3.0, 30.0])


def test_what_comes_after_a_refused_request_comes_all_the_same(script, fleet):
    first = script.ask(1.0, range(10), output=200)
    script.ask(1.0, range(5), after=first, delay=0.5)
    result = replay(script.workload, fleet(workers=1, max_model_len=1100), "roundrobin")
    assert list(result.requests.outcome) == [Outcome.REFUSED, Outcome.COMPLETED]
    assert result.requests.arrival[1] == pytest.approx(1.5)
    assert math.isnan(result.requests.ttft[0])
    assert result.summary()["refused"] == 1


def test_what_no_cache_can_hold_is_refused(script, fleet):
    script.ask(0.0, range(11))
    result = replay(script.workload, fleet(workers=2, kv_blocks=10), "kvaware")
    assert list(result.requests.outcome) == [Outcome.REFUSED]
    assert list(result.requests.worker) == [-1]


def test_a_prefix_longer_than_any_compiled_one_makes_the_request_fail(new_script):
    script = new_script(run_tokens=512)
    script.ask(0.0, range(4))
    script.ask(30.0, range(8))
    script.ask(60.0, range(9))
    profile = profile_named("trn1-8b")
    options = FleetOptions(workers=1, profile=type(profile)(**{**_fields(profile), "max_prefix_bucket": 2048}))
    result = replay(script.workload, options, "roundrobin")
    assert list(result.requests.outcome) == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.FAILED]
    assert result.summary()["failed"] == 1


def _fields(profile):
    return {name: getattr(profile, name) for name in profile.__dataclass_fields__}


def test_speed_draws_arrivals_and_pauses_together(script, fleet):
    first = script.ask(10.0, range(1))
    script.ask(20.0, range(1))
    script.ask(10.0, range(1), after=first, delay=4.0)
    result = replay(script.workload, fleet(workers=8, speed=2.0), "roundrobin")
    assert sorted(result.requests.arrival) == pytest.approx([5.0, 5.1 + 2.0, 10.0])


def test_a_burst_of_siblings_lands_together_before_any_event_came(script, fleet):
    for index in range(4):
        script.ask(0.1 * index, [*range(50), 100 + index], output=2)
    result = replay(script.workload, fleet(workers=4, prefill_rate=100_000.0, event_lag=60.0), "kvaware")
    assert len(set(result.requests.worker)) == 1


def test_events_that_come_late_are_known_late(script, fleet):
    script.ask(0.0, range(10))
    script.ask(10.0, range(10))
    for lag, predicted in ((8.9, 900), (9.1, 0)):
        result = replay(script.workload, fleet(workers=1, event_lag=lag), "kvaware")
        assert result.requests.predicted[1] == predicted
        assert result.requests.device[1] == 900


def test_without_events_only_what_was_just_sent_is_believed(script, fleet):
    for time in (0.0, 1.0, 10.0):
        script.ask(time, range(10))
    result = replay(script.workload, fleet(workers=1, event_loss=1.0), "kvaware")
    assert list(result.requests.predicted) == [0, 900, 0]


def test_what_a_worker_evicts_is_no_longer_believed(script, fleet):
    script.ask(0.0, range(10))
    script.ask(10.0, range(100, 115))
    script.ask(40.0, range(10))
    result = replay(script.workload, fleet(workers=1, kv_blocks=20), "kvaware")
    assert result.requests.predicted[2] == result.requests.device[2] == 500


def test_prefixaware_needs_no_events(new_script, fleet):
    work = some_workload(new_script, 5)
    with_events, without = (
        replay(work, fleet(workers=4, event_loss=loss), "prefixaware").requests for loss in (0.0, 1.0)
    )
    assert with_events.worker == without.worker
    assert sum(without.predicted) > 0


def test_policies_that_read_no_caches_predict_nothing(new_script, fleet):
    assert replay(some_workload(new_script, 5), fleet(), "roundrobin").summary()["predicted_hit_rate"] is None


def test_a_session_stays_with_its_worker(script, fleet):
    for index in range(40):
        script.ask(10.0 * index, range(5), session=f"s{index % 4}")
    result = replay(script.workload, fleet(workers=8), "session")
    for session in range(4):
        assert len({result.requests.worker[index] for index in range(session, 40, 4)}) == 1


def test_prompts_that_begin_alike_go_to_one_worker_by_their_hash_alone(script, fleet):
    for index in range(40):
        script.ask(10.0 * index, [1000 + index % 4, *range(9)])
    result = replay(script.workload, fleet(workers=8), "chwbl")
    assert len({result.requests.worker[index] for index in range(0, 40, 4)}) == 1
    assert len(set(result.requests.worker)) > 1


def test_round_robin_gives_everybody_as_many(script, fleet):
    for index in range(40):
        script.ask(0.5 * index, range(index, index + 3))
    result = replay(script.workload, fleet(workers=8), "roundrobin")
    assert [list(result.requests.worker).count(worker) for worker in range(8)] == [5] * 8


def test_knowing_the_caches_saves_work(new_script, fleet):
    work = some_workload(new_script, 9, count=200, rate=2.0)
    blind, seeing = (replay(work, fleet(workers=4, kv_blocks=60), name).summary() for name in ("roundrobin", "kvaware"))
    assert seeing["hit_rate"] > blind["hit_rate"] + 0.05
    assert seeing["ttft_mean_s"] < blind["ttft_mean_s"]


def test_what_left_the_device_is_loaded_from_the_workers_own_memory(script, fleet):
    script.ask(0.0, range(10))
    script.ask(10.0, range(100, 119))
    script.ask(40.0, range(10))
    result = replay(script.workload, fleet(workers=1, kv_blocks=20, l1_blocks=100), "kvaware")
    assert (result.requests.device[2], result.requests.l1[2]) == (100, 800)
    assert result.requests.predicted[2] == 900
    assert result.summary()["hit_rate_l1"] == pytest.approx(800 / 3900)


def test_what_one_worker_computed_another_loads_from_the_shared_memory(script, fleet):
    script.ask(0.0, range(10))
    script.ask(10.0, range(10))
    result = replay(script.workload, fleet(workers=2, l2_blocks=1000), "roundrobin")
    assert len(set(result.requests.worker)) == 2
    assert list(result.requests.l2) == [0, 900]


def test_the_shared_memory_is_a_match_on_every_worker(script, fleet):
    script.ask(0.0, range(10), output=2000)
    script.ask(5.0, range(10))
    policy = Registry.default()
    run = _Run(script.workload, fleet(workers=2, l2_blocks=1000), policy.build("kvaware", {}), None)
    run.to_the_end()
    keys = run._keys.keys(script.workload.requests[0])
    assert {name: match.tokens for name, match in run._knowledge.match(keys.chain, 1e9).items()} == {
        "w0": 900,
        "w1": 900,
    }


@pytest.mark.parametrize("name", ["trn2-70b", "trn1-8b", "h100x2-32b"])
def test_built_in_profiles_run(new_script, name):
    random = Random(0)
    script = new_script(run_tokens=512)
    for index in range(60):
        script.ask(index * 0.3, [*range(random.randint(1, 8)), 1000 + index], 50)
    result = replay(script.workload, FleetOptions(workers=2, profile=profile_named(name)), "kvaware")
    assert result.requests.count(Outcome.COMPLETED) == 60
    assert result.summary()["hit_rate"] > 0.2


def test_a_policy_that_is_told_no_speed_learns_it(new_script, fleet):
    work = some_workload(new_script, 2, count=300, rate=1.0)
    run = _Run(work, fleet(workers=2, speed_told=False), Registry.default().build("kvaware", {}, seed=0), None)
    start = [worker.rate for worker in run._workers]
    run.to_the_end()
    for worker, before in zip(run._workers, start, strict=True):
        assert before != pytest.approx(1000, rel=0.5)
        assert worker.rate == pytest.approx(1000, rel=0.2)


def test_progress_is_told_to_the_end(new_script, fleet):
    told = []
    replay(some_workload(new_script, 2, count=150), fleet(), "roundrobin", progress=lambda *each: told.append(each))
    assert told == [(64, 150), (128, 150), (150, 150)]


def test_an_unknown_policy_is_an_error(new_script, fleet):
    with pytest.raises(PolicyError, match="kvaware"):
        replay(some_workload(new_script, 2, count=1), fleet(), "kvawere")


def test_nothing_to_do_is_done_at_once(script, fleet):
    result = replay(script.workload, fleet(), "kvaware")
    assert result.summary()["ttft_mean_s"] is None
    assert result.summary()["requests"] == 0
