"""One prefill at a time: figures worked out by hand (see the fixture for the worker's numbers)."""

from itertools import pairwise

import pytest

from simulator.engine import BucketStats, Engine, Finished, FirstToken, TokenOut


@pytest.mark.parametrize(
    ("prompt", "padded", "seconds"),
    [(1, 512, 0.1512), (512, 512, 0.1512), (513, 1024, 0.2024), (600, 1024, 0.2024), (8193, 8192 + 512, 0.9704)],
)
def test_a_prefill_costs_what_its_bucket_costs(neuron, ask, only, prompt, padded, seconds):
    profile = neuron()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", prompt), 10.0)
    (first,) = only(engine.advance(100.0), FirstToken)
    assert first.time == pytest.approx(10 + seconds)
    assert (first.computed_tokens, first.padded_tokens) == (prompt, padded)


def test_padding_is_counted_by_bucket(neuron, ask):
    profile = neuron()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 8200), 0.0)
    engine.advance(100.0)
    assert engine.stats.prefill_buckets == {512: BucketStats(1, 504), 8192: BucketStats(1, 0)}


@pytest.mark.parametrize(
    ("shared_blocks", "credited", "seconds"),
    # 96 blocks are 3,072 tokens: three of four segments are saved. 62 are 1,984: one is. 31 are 992: none.
    [(96, 3072, 0.2024), (62, 1024, 0.5096), (31, 0, 0.5096)],
)
def test_a_cached_prefix_counts_in_whole_segments(neuron, ask, only, shared_blocks, credited, seconds):
    profile = neuron(segment_size=1024)
    engine = Engine(profile)
    engine.submit(ask(profile, "warm", 4096, family="f", shared=shared_blocks), 0.0)
    engine.submit(ask(profile, "a", 4096, family="f", shared=shared_blocks), 50.0)
    (first,) = only(engine.advance(100.0), FirstToken, "a")
    assert (first.cached_device, first.computed_tokens) == (credited, 4096 - credited)
    assert first.time == pytest.approx(50 + seconds)


def test_without_segments_a_prefix_counts_in_blocks_but_saves_time_only_across_a_bucket(neuron, ask, only):
    profile = neuron()
    engine = Engine(profile)
    engine.submit(ask(profile, "warm", 2048, family="f", shared=40), 0.0)
    engine.submit(ask(profile, "same bucket", 2048, family="f", shared=31), 50.0)
    engine.submit(ask(profile, "next bucket", 2048, family="f", shared=40), 60.0)
    outputs = engine.advance(100.0)
    same, less = only(outputs, FirstToken)[1:]
    assert (same.cached_device, same.padded_tokens) == (992, 2048)
    assert (less.cached_device, less.padded_tokens) == (1280, 1024)
    assert same.prefill_time == pytest.approx(0.3048)
    assert less.prefill_time == pytest.approx(0.2024)


def test_every_stream_stands_still_while_a_prompt_is_prefilled(neuron, ask, only):
    profile = neuron()
    engine = Engine(profile)
    engine.submit(ask(profile, "stream", 512, 100), 0.0)
    engine.submit(ask(profile, "prompt", 16_384, 100), 0.25)
    outputs = engine.advance(100.0)
    times = [token.time for token in only(outputs, TokenOut, "stream")]
    # Its first token at 0.1512, then one each 20 ms; the step under way ends at 0.2512, then two segments of 8,192.
    assert times[:6] == pytest.approx([0.1512, 0.1712, 0.1912, 0.2112, 0.2312, 0.2512])
    assert only(outputs, FirstToken, "prompt")[0].time == pytest.approx(0.2512 + 0.1 + 1.6384)
    assert times[6] == pytest.approx(1.9896 + 0.024)
    assert times[7] == pytest.approx(1.9896 + 0.048)


def test_waiting_prompts_all_go_before_the_next_decode_step(neuron, ask, only):
    profile = neuron()
    engine = Engine(profile)
    for name in "abc":
        engine.submit(ask(profile, name, 512, 3), 0.0)
    outputs = engine.advance(100.0)
    assert [first.time for first in only(outputs, FirstToken)] == pytest.approx([0.1512, 0.3024, 0.4536])
    assert only(outputs, TokenOut, "a")[1].time == pytest.approx(0.4536 + 0.016 + 3 * 0.004)


def test_a_request_waits_for_a_slot_until_another_ends(neuron, ask, only):
    profile = neuron(slots=1)
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 512, 11), 0.0)
    engine.submit(ask(profile, "b", 512, 11), 0.1)
    assert (engine.stats.running, engine.stats.waiting) == (1, 1)
    outputs = engine.advance(100.0)
    assert only(outputs, Finished, "a")[0].time == pytest.approx(0.3512)
    (first,) = only(outputs, FirstToken, "b")
    assert first.queue_time == pytest.approx(0.2512)
    assert first.time == pytest.approx(0.5024)


def test_slots_are_bounded_by_what_the_pool_holds_at_full_length(neuron, ask):
    profile = neuron(kv_blocks=2047 + 1024)  # 1,024 blocks each at 32,768 tokens: two, and almost a third
    assert profile.effective_slots == 2
    engine = Engine(profile)
    for name in "abc":
        engine.submit(ask(profile, name, 10, 1000), 0.0)
    engine.advance(2.0)
    assert (engine.stats.running, engine.stats.waiting) == (2, 1)


def test_the_queue_is_first_come_first_served_whatever_the_priority(neuron, ask, only):
    profile = neuron()
    engine = Engine(profile)
    for name, priority in (("a", 0), ("b", 9), ("c", -9)):
        engine.submit(ask(profile, name, 512, priority=priority), 0.0)
    assert [first.request_id for first in only(engine.advance(100.0), FirstToken)] == ["a", "b", "c"]


def test_a_cached_prefix_first_fills_the_padding_of_a_two_dimensional_bucket(neuron, ask, only):
    profile = neuron(max_prefix_bucket=8192)
    engine = Engine(profile)
    engine.submit(ask(profile, "warm", 800, family="f", shared=4), 0.0)
    engine.submit(ask(profile, "a", 800, family="f", shared=4), 50.0)
    (first,) = only(engine.advance(100.0), FirstToken, "a")
    assert (first.cached_device, first.computed_tokens, first.padded_tokens) == (0, 800, 1024)


def test_a_cached_prefix_above_the_largest_prefix_bucket_is_an_error_and_the_next_request_goes_on(neuron, ask, only):
    profile = neuron(prefill_buckets=(512, 1024), max_prefix_bucket=1024)
    engine = Engine(profile)
    engine.submit(ask(profile, "warm", 1300, family="f", shared=40), 0.0)
    engine.submit(ask(profile, "a", 1600, family="f", shared=40), 50.0)
    engine.submit(ask(profile, "b", 512), 50.0)
    outputs = engine.advance(100.0)
    assert only(outputs, Finished, "a") == [Finished(50.0, "a", "error")]
    assert only(outputs, FirstToken, "a") == []
    assert only(outputs, FirstToken, "b")[0].time == pytest.approx(50.1512)


def test_a_prompt_above_the_largest_bucket_is_an_error_without_segments(neuron, ask, only):
    profile = neuron(prefill_buckets=(512, 1024), segments=False)
    engine = Engine(profile)
    engine.submit(ask(profile, "fits", 1024), 0.0)
    engine.submit(ask(profile, "too long", 1025), 0.0)
    reasons = {end.request_id: end.reason for end in only(engine.advance(100.0), Finished)}
    assert reasons == {"fits": "length", "too long": "error"}


def test_a_decode_step_costs_what_the_longest_context_costs(neuron, ask, only):
    profile = neuron(itl_per_context_token=0.00001, decode_context_buckets=(500, 1000))
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 498, 5), 0.0)
    times = [token.time for token in only(engine.advance(100.0), TokenOut)]
    steps = [after - before for before, after in pairwise(times)]
    # Contexts 499 and 500 take the smaller bucket (5 ms), 501 and 502 the next one (10 ms).
    assert steps == pytest.approx([0.025, 0.025, 0.03, 0.03])


def test_a_decode_batch_is_padded_to_its_bucket(neuron, ask, only):
    profile = neuron(decode_batch_buckets=(1, 4))
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 512, 3), 0.0)
    engine.submit(ask(profile, "b", 512, 3), 0.0)
    outputs = engine.advance(100.0)
    assert only(outputs, Finished, "a")[0].time == pytest.approx(0.3024 + 2 * (0.016 + 4 * 0.004))
    assert engine.stats.decode_buckets == {4: BucketStats(2, 4)}


def test_an_aborted_prefill_holds_the_device_until_its_segment_ends(neuron, ask, only):
    profile = neuron()
    engine = Engine(profile)
    engine.submit(ask(profile, "gone", 24_000, 10), 0.0)
    engine.abort("gone", 0.5)
    assert (engine.stats.running, engine.stats.kv_usage) == (0, 0.0)
    engine.submit(ask(profile, "b", 512), 0.6)
    outputs = engine.advance(100.0)
    (first,) = only(outputs, FirstToken)
    assert first.request_id == "b"
    assert first.queue_time == pytest.approx(0.9192 - 0.6)


def test_an_aborted_stream_frees_its_slot_at_once_and_says_nothing_more(neuron, ask, only):
    profile = neuron(slots=1)
    engine = Engine(profile)
    engine.submit(ask(profile, "gone", 512, 1000), 0.0)
    engine.submit(ask(profile, "b", 512), 0.0)
    engine.abort("gone", 0.16)
    engine.abort("never was", 0.16)
    outputs = engine.advance(100.0)
    assert only(outputs, TokenOut, "gone") == [TokenOut(pytest.approx(0.1512), "gone", 0, 1)]
    assert only(outputs, Finished, "gone") == []
    assert only(outputs, FirstToken, "b")[0].time == pytest.approx(0.1712 + 0.1512)


def test_parallel_decoding_gives_several_tokens_a_step(neuron, ask, only):
    profile = neuron(tokens_per_step=2.0)
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 512, 21), 0.0)
    outputs = engine.advance(100.0)
    assert [token.count for token in only(outputs, TokenOut)] == [1] + [2] * 10
    assert only(outputs, Finished)[0].time == pytest.approx(0.1512 + 10 * 0.02)
