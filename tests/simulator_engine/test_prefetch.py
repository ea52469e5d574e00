"""Prefetches take bandwidth and no computing; pins hold against eviction, and give way to running requests."""

import pytest

from simulator.engine import Engine, Finished, FirstToken, Removed, Stored, Tier, TokenOut

SLOW = {"l2_bandwidth": 16 * 131_072 * 10.0, "l2_latency": 0.5, "l1_bandwidth": 16 * 131_072 * 100.0, "l1_latency": 0.1}
"""10 blocks a second from l2 after half a second, 100 from l1 after 100 ms."""


@pytest.fixture
def far(gpu, ask):
    """An engine that has 40 blocks in l2 alone, and the request they are of."""

    def make(**changes):
        profile = gpu(l1_blocks=200, l2_blocks=400, **SLOW, **changes)
        l2 = Tier(400)
        other = Engine(profile, l2=l2)
        request = ask(profile, "a", 641)
        other.submit(request, 0.0)
        other.advance(9.0)
        return Engine(profile, l2=l2), request

    return make


def test_blocks_come_from_l2_to_l1_at_its_bandwidth_in_pieces(far, only):
    engine, request = far()
    assert engine.prefetch(request.blocks, 0, 40, "l2", "l1", 10.0) == pytest.approx(4.5)
    outputs = only(engine.advance(100.0), Stored)
    assert [event.tier for event in outputs] == ["l1"] * 8
    assert [event.time for event in outputs] == pytest.approx([11.0 + piece / 2 for piece in range(8)])
    assert [key for event in outputs for key in event.keys] == list(request.blocks)


def test_blocks_come_to_the_device_and_are_a_hit_there(far, ask, only):
    engine, request = far()
    seconds = engine.prefetch(request.blocks, 0, 40, "l2", "device", 10.0)
    engine.submit(ask(engine.profile, "again", 641, after=request, shared=40), 10.0 + seconds)
    first = only(engine.advance(100.0), FirstToken)[0]
    assert (first.cached_device, first.computed_tokens, first.load_time) == (640, 1, 0.0)


def test_the_device_computes_on_while_blocks_come(far, ask, only):
    quiet, _ = far()
    busy, request = far()
    busy.prefetch(request.blocks, 0, 40, "l2", "device", 10.0)
    for engine in (quiet, busy):
        engine.submit(ask(engine.profile, "b", 300, 50), 10.0)
    kinds = FirstToken | TokenOut | Finished
    assert only(quiet.advance(100.0), kinds) == only(busy.advance(100.0), kinds)


def test_one_memory_sends_one_thing_after_another(far):
    engine, request = far()
    assert engine.prefetch(request.blocks, 0, 8, "l2", "l1", 10.0) == pytest.approx(1.3)
    assert engine.prefetch(request.blocks, 8, 16, "l2", "l1", 10.0) == pytest.approx(2.6)


def test_what_a_request_loads_goes_first(far, ask, only):
    engine, request = far(prefill_rate=100.0)
    engine.prefetch(request.blocks, 32, 40, "l2", "l1", 10.0)
    engine.submit(ask(engine.profile, "again", 321, after=request, shared=20), 10.0)
    outputs = engine.advance(100.0)
    assert only(outputs, FirstToken)[0].load_time == pytest.approx(2.5)
    arrived = [event.time for event in only(outputs, Stored) if event.tier == "l1" and event.request_id is None]
    assert arrived[0] == pytest.approx(10.0 + 0.5 + 0.1 + 2.5)


def test_what_is_there_or_on_its_way_is_not_brought_again(far):
    engine, request = far()
    assert engine.prefetch(request.blocks, 0, 8, "l2", "l1", 10.0) is not None
    assert engine.prefetch(request.blocks, 0, 8, "l2", "l1", 10.1) is None
    engine.advance(20.0)
    assert engine.prefetch(request.blocks, 0, 8, "l2", "l1", 20.0) is None


def test_nothing_comes_that_is_nowhere(far, ask):
    engine, request = far()
    assert engine.prefetch(ask(engine.profile, "unknown", 640).blocks, 0, 40, "l2", "l1", 10.0) is None
    assert engine.prefetch(request.blocks, 0, 40, "l1", "device", 10.0) is None


def test_what_comes_to_the_device_joins_on_to_what_is_there(far):
    engine, request = far()
    engine.prefetch(request.blocks, 3, 8, "l2", "device", 10.0)
    engine.advance(100.0)
    assert engine.memory.device.keys == set(request.blocks[:8])


def test_it_takes_no_room_on_the_device_from_what_is_worth_more(far, ask, only):
    engine, request = far(kv_blocks=48)
    other = ask(engine.profile, "b", 321)
    engine.submit(other, 6.0)
    engine.advance(9.0)
    engine.retain(other.blocks, 0, 20, 60, 1000.0, 9.0)
    engine.prefetch(request.blocks, 0, 40, "l2", "device", 10.0)
    outputs = engine.advance(100.0)
    assert only(outputs, Removed) == []
    assert sum(len(event.keys) for event in only(outputs, Stored) if event.tier == "device") == 28
    assert engine.next_time() is None


def test_blocks_come_from_another_workers_memory(gpu, ask, only):
    profile = gpu(**SLOW)
    one, other = Engine(profile), Engine(profile)
    request = ask(profile, "a", 641)
    one.submit(request, 0.0)
    one.advance(5.0)
    assert other.prefetch(request.blocks, 0, 40, "l1", "device", 10.0, peer=("one", one)) == pytest.approx(4.5)
    other.submit(ask(profile, "again", 641, after=request, shared=40), 20.0)
    assert only(other.advance(100.0), FirstToken)[0].cached_device == 640


def test_what_is_pinned_on_the_device_stays_until_its_time_is_over(gpu, ask, only):
    profile = gpu(kv_blocks=16)
    engine = Engine(profile)
    kept = ask(profile, "kept", 65)
    engine.submit(kept, 0.0)
    engine.advance(5.0)
    assert engine.pin(kept.blocks, 0, 4, "device", 55.0, 5.0) == 4
    for index in range(1, 8):
        engine.submit(ask(profile, f"other {index}", 129), index * 10.0)
    removed = [(event.time, key) for event in only(engine.advance(100.0), Removed) for key in event.keys]
    # It was the least recently used all the time; from its pin's end on it counts as used just then.
    assert [time for time, key in removed if key[0] == "kept"] == [70.0] * 4


def test_a_memory_is_pinned_up_to_its_share_only(gpu, ask):
    profile = gpu(kv_blocks=16)
    engine = Engine(profile)
    request = ask(profile, "a", 97)
    engine.submit(request, 0.0)
    engine.advance(5.0)
    assert engine.pin(request.blocks, 0, 6, "device", 1000.0, 5.0) == 0
    assert engine.pin(request.blocks, 0, 4, "device", 1000.0, 5.0) == 4
    assert engine.pin(request.blocks, 0, 1, "device", 1000.0, 5.0) == 0
    assert engine.unpin(request.blocks, 0, 6, "device", 6.0) == 4
    assert engine.pin(request.blocks, 0, 1, "device", 1000.0, 6.0) == 1


def test_a_pin_gives_way_before_a_request_cannot_run(gpu, ask, only):
    profile = gpu(kv_blocks=16)
    engine = Engine(profile)
    kept = ask(profile, "kept", 65)
    engine.submit(kept, 0.0)
    engine.advance(5.0)
    engine.pin(kept.blocks, 0, 4, "device", 1000.0, 5.0)
    engine.submit(ask(profile, "large", 200, 50), 10.0)
    outputs = engine.advance(100.0)
    assert [end.reason for end in only(outputs, Finished, "large")] == ["length"]
    assert engine.stats.preemptions == 0


def test_pins_in_l1_hold_and_end(gpu, ask):
    profile = gpu(kv_blocks=64, l1_blocks=16)
    engine = Engine(profile)
    kept = ask(profile, "kept", 65)
    engine.submit(kept, 0.0)
    engine.advance(5.0)
    assert engine.pin(kept.blocks, 0, 4, "l1", 1000.0, 5.0) == 4
    for index in range(1, 6):
        engine.submit(ask(profile, f"other {index}", 129), index * 10.0)
    engine.advance(59.0)
    assert all(key in engine.memory.l1 for key in kept.blocks)
    assert engine.unpin(kept.blocks, 0, 4, "l1", 60.0) == 4
    for index in range(6, 9):
        engine.submit(ask(profile, f"other {index}", 129), index * 10.0)
    engine.advance(200.0)
    assert not any(key in engine.memory.l1 for key in kept.blocks)
    assert len(engine.memory.l1) == 16


def test_a_request_says_how_much_of_it_is_offloaded_and_from_where_it_loads(gpu, ask, only):
    profile = gpu(l1_blocks=200)
    engine = Engine(profile)
    first = ask(profile, "a", 641, offload_tokens=170)
    engine.submit(first, 0.0)
    engine.advance(5.0)
    assert len(engine.memory.l1) == 10
    engine.reset_prefix_cache(6.0)
    engine.submit(ask(profile, "none", 641, after=first, shared=40, load_tiers=(), offload_tokens=0), 10.0)
    assert only(engine.advance(19.0), FirstToken)[0].cached_l1 == 0
    engine.reset_prefix_cache(19.0)
    engine.submit(ask(profile, "all", 641, after=first, shared=40, load_tiers=("l1",)), 20.0)
    assert only(engine.advance(30.0), FirstToken)[0].cached_l1 == 160


def test_a_reset_ends_pins_and_what_is_on_its_way(far):
    engine, request = far()
    engine.prefetch(request.blocks, 0, 8, "l2", "device", 10.0)
    engine.advance(30.0)
    assert engine.pin(request.blocks, 0, 8, "device", 1000.0, 30.0) == 8
    engine.prefetch(request.blocks, 8, 40, "l2", "device", 30.0)
    assert engine.reset_prefix_cache(30.1)
    assert engine.advance(100.0)[-1].time == 30.1
    assert len(engine.memory.device) == 0
