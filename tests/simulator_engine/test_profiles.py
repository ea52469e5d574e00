"""The built-in profiles say what was measured."""

import pytest

from simulator.engine import PROFILES, Engine, Finished, FirstToken, profile_named


@pytest.mark.parametrize(
    ("name", "prompt", "seconds"),
    [("trn2-70b", 10_000, 0.814), ("trn1-8b", 4096, 0.153), ("inf2-8b", 4096, 0.209), ("h100x2-32b", 20_480, 1.0)],
)
def test_a_prompt_takes_as_long_as_it_was_measured_to_take(ask, only, name, prompt, seconds):
    profile = PROFILES[name]
    engine = Engine(profile)
    engine.submit(ask(profile, "a", prompt), 0.0)
    assert only(engine.advance(100.0), FirstToken)[0].time == pytest.approx(seconds, rel=0.001)


@pytest.mark.parametrize(
    ("name", "streams", "context", "milliseconds"),
    [
        ("trn2-70b", 1, 10_000, 19.6),
        ("trn1-8b", 1, 4096, 7.0),
        ("trn1-8b", 8, 4096, 10.0),
        ("inf2-8b", 1, 4096, 7.5),
        ("inf2-8b", 8, 4096, 10.5),
        ("inf2-8b", 8, 8192, 15.3),
        ("h100-8b", 1, 1000, 12.0),
        ("h100-8b", 256, 1000, 24.0),
    ],
)
def test_a_token_takes_as_long_as_it_was_measured_to_take(name, streams, context, milliseconds):
    assert PROFILES[name].itl(streams, context) * 1000 == pytest.approx(milliseconds, rel=0.04)


@pytest.mark.parametrize("name", ["trn2-70b", "trn1-8b", "inf2-8b", "h100-8b", "h100x2-32b"])
def test_each_built_in_profile_fills_its_slots_and_finishes(ask, only, name):
    profile = profile_named(name)
    assert profile.description
    engine = Engine(profile, emit_tokens=False)
    count = min(profile.slots, 12) + 2
    for index in range(count):
        engine.submit(ask(profile, f"r{index}", 3000, 200, family="f", shared=20), 0.0)
    most = 0
    while (due := engine.next_time()) is not None:
        count -= len(only(engine.advance(due), Finished))
        most = max(most, engine.stats.running)
    assert count == 0
    assert most >= min(profile.effective_slots, 12)


def test_an_unknown_profile_is_answered_with_those_that_exist():
    with pytest.raises(ValueError, match="trn2-70b, trn1-8b, inf2-8b, h100-8b, h100x2-32b"):
        profile_named("trn3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"itl_base": 0.0}, "itl_base"),
        ({"prefill_buckets": (1024, 512)}, "prefill_buckets"),
        ({"tokens_per_step": 0.5}, "tokens_per_step"),
        ({"segment_size": 100}, "segment_size"),
        ({"kv_blocks": 100}, "kv_blocks"),
        ({"prefill": "chunked", "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
    ],
)
def test_numbers_with_which_nothing_could_run_are_refused(neuron, changes, message):
    with pytest.raises(ValueError, match=message):
        neuron(**changes)
