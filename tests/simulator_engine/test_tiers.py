"""Tiers below the device: what is copied, what is loaded, and what that costs."""

import pytest

from simulator.engine import Engine, FirstToken, Removed, Stored, Tier


@pytest.fixture
def tiered(gpu):
    """Eight device blocks of 16 tokens, 1 KiB per token; l1 loads 10 us per token + 1 ms, computing takes 100 us."""

    def make(**changes):
        numbers = {
            "kv_blocks": 8,
            "l1_blocks": 100,
            "kv_bytes_per_token": 1024,
            "l1_bandwidth": 1024 / 10e-6,
            "l1_latency": 0.001,
            "l2_bandwidth": 1024 / 50e-6,
            "l2_latency": 0.002,
        }
        return gpu(**(numbers | changes))

    return make


@pytest.fixture
def evicted(ask):
    """Run request "a" (96 tokens, 6 blocks), then others that push its blocks from the device; "a" comes again at 100 s."""

    def run(engine, profile):
        a = ask(profile, "a", 96)
        engine.submit(a, 0.0)
        engine.submit(ask(profile, "b", 128 - 1), 10.0)
        engine.submit(ask(profile, "again", 96, after=a, shared=6), 100.0)
        return engine.advance(1000.0)

    return run


def test_loading_is_chosen_when_it_is_cheaper_than_computing(tiered, evicted, only):
    profile = tiered()
    (first,) = only(evicted(Engine(profile), profile), FirstToken, "again")
    # Five blocks: 80 tokens at 10 us + 1 ms = 1.8 ms, instead of 8 ms.
    assert (first.cached_device, first.cached_l1, first.computed_tokens) == (0, 80, 16)
    assert first.load_time == pytest.approx(0.0018)
    assert first.prefill_time == pytest.approx(0.0516)
    assert first.time == pytest.approx(100 + 0.0534)


def test_computing_is_chosen_when_loading_is_dearer(tiered, evicted, only):
    profile = tiered(l1_latency=0.0073)  # 8.1 ms
    (first,) = only(evicted(Engine(profile), profile), FirstToken, "again")
    assert (first.cached_l1, first.computed_tokens, first.load_time) == (0, 96, 0.0)
    assert first.time == pytest.approx(100.0596)


def test_buckets_can_make_loading_pointless(tiered, evicted, only):
    profile = tiered(prefill_buckets=(128,))
    (first,) = only(evicted(Engine(profile), profile), FirstToken, "again")
    assert (first.cached_l1, first.padded_tokens) == (0, 128)


def test_l1_continues_what_the_device_holds_and_l2_what_l1_holds(tiered, ask, only):
    profile = tiered(kv_blocks=20, l1_blocks=7, l2_blocks=100)
    engine = Engine(profile)
    a = ask(profile, "a", 160)
    engine.submit(a, 0.0)  # written through, leaf first: l1 has room for the first seven of ten blocks
    engine.submit(ask(profile, "gone", 256), 10.0)  # its 16 blocks push the last six from the device; it completes none
    engine.abort("gone", 10.01)
    engine.submit(ask(profile, "again", 161, after=a, shared=10), 20.0)
    (first,) = only(engine.advance(100.0), FirstToken, "again")
    assert (first.cached_device, first.cached_l1, first.cached_l2, first.computed_tokens) == (64, 48, 48, 1)
    assert first.load_time == pytest.approx(0.001 + 48 * 10e-6 + 0.002 + 48 * 50e-6)


def test_write_through_copies_to_both_tiers_when_a_block_is_complete(tiered, ask, only):
    profile = tiered(l1_blocks=2, l2_blocks=10)
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 48), 0.0)
    outputs = engine.advance(10.0)
    keys = (("a", 0), ("a", 1), ("a", 2))
    stored = [(event.tier, event.keys, event.request_id, event.first_block) for event in only(outputs, Stored)]
    assert stored == [(tier, keys, "a", 0) for tier in ("device", "l1", "l2")]
    assert [(event.tier, event.keys) for event in only(outputs, Removed)] == [("l1", (("a", 2),))]


def test_a_tier_keeps_longest_what_was_used_last(tiered, ask, only):
    profile = tiered(kv_blocks=20, l1_blocks=6, l2_blocks=6)
    engine = Engine(profile)
    a = ask(profile, "a", 48)
    engine.submit(a, 0.0)
    engine.submit(ask(profile, "b", 48), 10.0)
    engine.submit(ask(profile, "a again", 49, after=a, shared=3), 20.0)
    engine.submit(ask(profile, "c", 32), 30.0)
    removed = [(event.tier, event.keys) for event in only(engine.advance(100.0), Removed)]
    assert removed == [(tier, (("b", 2), ("b", 1))) for tier in ("l1", "l2")]


def test_on_eviction_blocks_go_down_one_tier_at_a_time(tiered, ask, only):
    profile = tiered(offload="evict", l1_blocks=2, l2_blocks=10)
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 64), 0.0)
    assert {event.tier for event in only(engine.advance(5.0), Stored)} == {"device"}
    engine.submit(ask(profile, "b", 112), 10.0)  # 7 blocks, 4 are free
    told = [
        (type(output).__name__, output.tier, output.keys) for output in only(engine.advance(10.0), Stored | Removed)
    ]
    a1, a2, a3 = (("a", index) for index in (1, 2, 3))
    assert told == [
        ("Removed", "device", (a3, a2, a1)),
        ("Stored", "l1", (a1, a2, a3)),
        ("Removed", "l1", (a3,)),
        ("Stored", "l2", (a3,)),
    ]


def test_what_was_offloaded_on_eviction_comes_back(tiered, evicted, only):
    profile = tiered(offload="evict")
    outputs = evicted(Engine(profile), profile)
    (first,) = only(outputs, FirstToken, "again")
    assert first.cached_l1 == 80
    back = [event for event in only(outputs, Stored, "again") if event.tier == "device"]
    assert [(event.first_block, len(event.keys)) for event in back] == [(0, 6)]


def test_blocks_evicted_from_two_chains_are_announced_as_two_chains(tiered, ask, only):
    profile = tiered(offload="evict")
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 33), 0.0)
    engine.submit(ask(profile, "b", 33), 10.0)
    engine.submit(ask(profile, "c", 127), 20.0)
    stored = [event for event in only(engine.advance(20.0), Stored) if event.tier == "l1"]
    assert sorted(event.keys for event in stored) == [(("a", 0), ("a", 1)), (("b", 0), ("b", 1))]
    assert {(event.parent, event.request_id, event.first_block) for event in stored} == {(None, None, None)}


def test_a_shared_l2_serves_another_worker(tiered, ask, only):
    profile = tiered(l1_blocks=0)
    shared = Tier(100)
    one, two = Engine(profile, l2=shared), Engine(profile, l2=shared)
    a = ask(profile, "a", 96)
    one.submit(a, 0.0)
    one.advance(10.0)
    two.submit(ask(profile, "again", 96, after=a, shared=6), 10.0)
    (first,) = only(two.advance(20.0), FirstToken)
    assert (first.cached_device, first.cached_l2) == (0, 80)
    assert first.load_time == pytest.approx(0.002 + 80 * 50e-6)


def test_resetting_the_device_keeps_l1_unless_told_otherwise(tiered, ask, only):
    profile = tiered()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 48), 0.0)
    engine.advance(10.0)
    assert engine.reset_prefix_cache(10.0)
    assert len(engine.memory.l1) == 3
    assert engine.reset_prefix_cache(11.0, offloaded=True)
    (removed,) = only(engine.advance(12.0), Removed)
    assert (removed.tier, set(removed.keys)) == ("l1", {("a", 0), ("a", 1), ("a", 2)})
    assert len(engine.memory.l1) == 0


def test_external_hits_are_counted(tiered, evicted):
    profile = tiered()
    engine = Engine(profile)
    evicted(engine, profile)
    stats = engine.stats
    assert (stats.external_queries, stats.external_hits, stats.cached_l1) == (96 + 127 + 96, 80, 80)
