"""The prefix cache: what is kept, what counts as a hit, and what goes first."""

import pytest

from simulator.engine import Cleared, Engine, Finished, FirstToken, Removed, Stored, TokenOut


def test_a_hit_never_covers_the_last_prompt_token(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 64, family="f", shared=4), 0.0)
    engine.submit(ask(profile, "same", 64, family="f", shared=4), 10.0)
    engine.submit(ask(profile, "longer", 65, family="f", shared=4), 20.0)
    assert [first.cached_device for first in only(engine.advance(100.0), FirstToken)] == [0, 48, 64]


def test_a_partial_last_block_is_not_shared(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 47), 0.0)
    (stored,) = only(engine.advance(100.0), Stored)
    assert stored.keys == (("a", 0), ("a", 1))
    assert (stored.parent, stored.tier, stored.request_id, stored.first_block) == (None, "device", "a", 0)


def test_generated_blocks_are_cached_at_the_step_that_completes_them(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 40, 25), 0.0)  # 65 tokens: four full blocks, the last token is never computed
    outputs = engine.advance(100.0)
    tokens = [token.time for token in only(outputs, TokenOut)]
    prompt, third, fourth = only(outputs, Stored)
    assert prompt.keys == (("a", 0), ("a", 1))
    # Token i (from 0) sits at position 40 + i and is computed by the step that makes token i + 1.
    assert (third.keys, third.parent, third.time) == ((("a", 2),), ("a", 1), tokens[8])
    assert (fourth.keys, fourth.first_block, fourth.time) == ((("a", 3),), 3, tokens[24])
    assert only(outputs, Finished)[0].time == tokens[24]


def test_the_last_token_is_never_computed_so_it_completes_no_block(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 40, 24), 0.0)
    assert sum(len(event.keys) for event in only(engine.advance(100.0), Stored)) == 3


def test_the_next_turn_hits_the_answer_of_the_last_one(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    turn = ask(profile, "turn 1", 100, 50)
    engine.submit(turn, 0.0)
    engine.submit(ask(profile, "turn 2", 200, 10, after=turn, shared=9), 10.0)
    assert only(engine.advance(100.0), FirstToken, "turn 2")[0].cached_device == 144


def test_eviction_takes_leaves_before_their_parents(gpu, ask, only):
    profile = gpu(kv_blocks=8)
    engine = Engine(profile)
    a = ask(profile, "a", 64)
    engine.submit(a, 0.0)
    engine.submit(ask(profile, "b", 96), 10.0)  # 6 blocks, 4 are free
    engine.submit(ask(profile, "c", 33, after=a, shared=2), 20.0)
    outputs = engine.advance(100.0)
    first_removed = only(outputs, Removed)[0]
    assert (first_removed.time, first_removed.keys, first_removed.tier) == (10.0, (("a", 3), ("a", 2)), "device")
    assert only(outputs, FirstToken, "c")[0].cached_device == 32


def test_eviction_takes_the_chain_that_was_used_longest_ago(gpu, ask, only):
    profile = gpu(kv_blocks=8)
    engine = Engine(profile)
    a, b = ask(profile, "a", 49), ask(profile, "b", 49)
    engine.submit(a, 0.0)
    engine.submit(b, 10.0)
    engine.submit(ask(profile, "a again", 49, after=a, shared=3), 20.0)
    engine.submit(ask(profile, "c", 48), 30.0)
    removed = [key for event in only(engine.advance(100.0), Removed) for key in event.keys]
    assert removed == [("b", 2)]


def test_blocks_in_use_are_never_evicted(gpu, ask, only):
    profile = gpu(kv_blocks=10)
    engine = Engine(profile)
    a = ask(profile, "a", 64, 40)
    engine.submit(a, 0.0)
    engine.submit(ask(profile, "b", 16), 0.1)
    engine.submit(ask(profile, "c", 48), 0.4)
    engine.submit(ask(profile, "d", 48), 0.6)
    outputs = engine.advance(0.8)
    assert len(only(outputs, Finished)) == 3
    removed = {key for event in only(outputs, Removed) for key in event.keys}
    assert removed
    assert not any(key[0] == "a" for key in removed)


def test_siblings_computed_at_the_same_time_are_kept_once(gpu, ask, only):
    profile = gpu(kv_blocks=100)
    engine = Engine(profile)
    engine.submit(ask(profile, "warm-up", 10), 0.0)
    for name in ("a", "b"):
        engine.submit(ask(profile, name, 80, 100, family="f", shared=5), 0.01)
    outputs = engine.advance(0.3)
    assert [first.cached_device for first in only(outputs, FirstToken)] == [0, 0, 0]
    assert [event.request_id for event in only(outputs, Stored)] == ["a"]
    assert engine.memory.device.in_use == 5 + 1 + 1


def test_a_cache_with_running_requests_is_not_reset(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 64, 10), 0.0)
    assert not engine.reset_prefix_cache(0.1)
    engine.advance(10.0)
    assert engine.reset_prefix_cache(10.0)
    engine.submit(ask(profile, "b", 64, after=ask(profile, "a", 64, 10), shared=4), 11.0)
    outputs = engine.advance(100.0)
    assert only(outputs, Cleared) == [Cleared(10.0)]
    assert only(outputs, FirstToken)[0].cached_device == 0


def test_without_prefix_caching_nothing_is_stored_or_hit(gpu, ask, only):
    profile = gpu(prefix_caching=False)
    engine = Engine(profile)
    for index in range(2):
        engine.submit(ask(profile, f"r{index}", 64, 40, family="f", shared=4), index * 10.0)
    outputs = engine.advance(100.0)
    assert only(outputs, Stored | Removed) == []
    assert [first.cached_device for first in only(outputs, FirstToken)] == [0, 0]
    assert engine.memory.device.free == profile.kv_blocks


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_block_is_taken_when_the_step_that_writes_to_it_begins(gpu, ask, prefix_caching):
    profile = gpu(prefix_caching=prefix_caching)
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 31, 40), 0.0)  # first token at 0.0531; position 32 is written by the second step
    used = []
    for now in (0.06, 0.0730, 0.0732, 0.3):
        engine.advance(now)
        used.append(engine.memory.device.in_use)
    assert used == [2, 2, 3, 3]


def test_hits_are_counted_in_tokens(gpu, ask):
    profile = gpu()
    engine = Engine(profile, emit_tokens=False)
    for index in range(3):
        engine.submit(ask(profile, f"r{index}", 100, family="f", shared=4), index * 10.0)
    engine.advance(100.0)
    stats = engine.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (300, 128)
    assert (stats.prompt_tokens, stats.computed_tokens, stats.cached_device) == (300, 172, 128)


@pytest.mark.parametrize("emit_tokens", [True, False])
def test_an_idle_engine_has_nothing_to_say(gpu, ask, emit_tokens):
    engine = Engine(gpu(), emit_tokens=emit_tokens)
    assert engine.next_time() is None
    assert engine.advance(10.0) == []
    engine.submit(ask(gpu(), "a", 100), 10.0)
    assert engine.next_time() == pytest.approx(10.06)
