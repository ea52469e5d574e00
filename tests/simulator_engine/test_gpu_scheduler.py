"""Chunked prefill over a paged pool: figures worked out by hand (see the fixture for the worker's numbers)."""

import pytest

from simulator.engine import Engine, Finished, FirstToken, Stored, TokenOut


def test_a_long_prompt_is_computed_in_chunks_of_the_budget(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 2500), 0.0)
    outputs = engine.advance(100.0)
    assert only(outputs, FirstToken)[0].time == pytest.approx(0.05 + 0.25)
    # 1,000 tokens are 62 blocks and a half: the half is complete in the second step.
    stored = only(outputs, Stored)
    assert [(event.first_block, len(event.keys)) for event in stored] == [(0, 62), (62, 63), (125, 31)]
    assert [event.time for event in stored] == pytest.approx([0.15, 0.25, 0.30])


def test_streams_go_on_while_a_prompt_is_prefilled(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "stream", 100, 50), 0.0)
    engine.submit(ask(profile, "prompt", 1998, 50), 0.07)
    outputs = engine.advance(100.0)
    times = [token.time for token in only(outputs, TokenOut, "stream")]
    # First token at 0.06. The step under way ends at 0.08; then 999 tokens beside one decode, twice.
    assert times[:5] == pytest.approx([0.06, 0.08, 0.08 + 0.1699, 0.08 + 0.2898, 0.08 + 0.2898 + 0.022])
    assert only(outputs, FirstToken, "prompt")[0].time == pytest.approx(0.3698)


def test_short_prompts_share_a_step(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.submit(ask(profile, "first", 10, 1), 0.0)
    engine.submit(ask(profile, "a", 300, 1), 0.01)
    engine.submit(ask(profile, "b", 400, 1), 0.02)
    firsts = only(engine.advance(100.0), FirstToken)
    assert [first.time for first in firsts] == pytest.approx([0.051, 0.171, 0.171])


def test_the_queue_goes_by_priority_then_by_arrival(gpu, ask, only):
    profile = gpu(slots=1)
    engine = Engine(profile)
    for name, priority in (("now", 5), ("late", 5), ("low", 9), ("high", 1), ("later", 5)):
        engine.submit(ask(profile, name, 10, priority=priority), 0.0)
    order = [first.request_id for first in only(engine.advance(100.0), FirstToken)]
    assert order == ["now", "high", "late", "later", "low"]


def test_a_prompt_waits_until_its_blocks_are_free_and_nobody_overtakes_it(gpu, ask, only):
    profile = gpu(kv_blocks=10)
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 96, 20), 0.0)  # 6 blocks, a seventh while it decodes; it ends after 19 steps
    engine.submit(ask(profile, "b", 80, 1), 0.0)  # 5 blocks: not now
    engine.submit(ask(profile, "c", 16, 1), 0.0)  # 1 block: behind b
    outputs = engine.advance(100.0)
    end = only(outputs, Finished, "a")[0].time
    assert end == pytest.approx(0.0596 + 19 * 0.02)
    assert [first.queue_time for first in only(outputs, FirstToken)] == pytest.approx([0.0, end, end])


def test_the_newest_request_is_preempted_when_blocks_run_out_and_still_gives_each_token_once(gpu, ask, only):
    profile = gpu(kv_blocks=10)
    engine = Engine(profile)
    engine.submit(ask(profile, "old", 64, 50), 0.0)
    engine.submit(ask(profile, "new", 64, 50), 0.0)
    outputs = engine.advance(100.0)
    assert engine.stats.preemptions == 1
    assert engine.stats.prefix_queries == 64 + 64, "only first admissions count"
    assert [end.request_id for end in only(outputs, Finished)] == ["old", "new"]
    for name in ("old", "new"):
        assert len(only(outputs, FirstToken, name)) == 1
        assert [token.index for token in only(outputs, TokenOut, name)] == list(range(50))
    # "new" starts a step later. When "old" has filled its fifth block (80 tokens), the pool is full: "new", with 16 tokens
    # out, has to go. "old" takes the block that is freed, and later evicts two of the four that "new" had filled.
    end = only(outputs, Finished, "old")[0].time
    times = [token.time for token in only(outputs, TokenOut, "new")]
    assert [time <= end for time in times] == [True] * 16 + [False] * 34
    assert times[16] == pytest.approx(end + 0.05 + (64 + 16 - 2 * 16) / 10_000)


def test_the_least_urgent_request_is_preempted_first(gpu, ask, only):
    profile = gpu(kv_blocks=10)
    engine = Engine(profile)
    engine.submit(ask(profile, "background", 64, 50, priority=5), 0.0)
    engine.submit(ask(profile, "urgent", 64, 50, priority=0), 0.0)
    assert [end.request_id for end in only(engine.advance(100.0), Finished)] == ["urgent", "background"]


def test_after_a_preemption_the_queue_waits_for_one_step(gpu, ask, only):
    profile = gpu(kv_blocks=10, slots=2)
    engine = Engine(profile)
    engine.submit(ask(profile, "a", 64, 50, priority=0), 0.0)
    engine.submit(ask(profile, "b", 64, 50, priority=2), 0.0)
    engine.submit(ask(profile, "c", 10, 1, priority=1), 0.1)
    outputs = engine.advance(100.0)
    lost = only(outputs, Stored, "a")[
        1
    ].time  # "a" has filled its fifth block and takes one from "b", and with it its slot
    assert only(outputs, FirstToken, "c")[0].queue_time == pytest.approx(lost + 0.02 - 0.1)


def test_an_aborted_prompt_frees_its_blocks_for_the_next(gpu, ask, only):
    profile = gpu(kv_blocks=100)
    engine = Engine(profile)
    engine.submit(ask(profile, "gone", 1500, 10), 0.0)
    engine.submit(ask(profile, "b", 1500, 10), 0.0)
    assert engine.stats.waiting == 1
    engine.abort("gone", 0.01)
    outputs = engine.advance(100.0)
    assert only(outputs, FirstToken, "gone") == []
    # The step under way goes on to its end at 0.15; nothing of it is cached.
    assert only(outputs, FirstToken, "b")[0].queue_time == pytest.approx(0.15)
    assert {event.request_id for event in only(outputs, Stored)} == {"b"}


def test_an_aborted_waiting_request_is_never_started(gpu, ask, only):
    profile = gpu(slots=1)
    engine = Engine(profile)
    for name in "abc":
        engine.submit(ask(profile, name, 10), 0.0)
    engine.abort("b", 0.01)
    assert [first.request_id for first in only(engine.advance(100.0), FirstToken)] == ["a", "c"]


@pytest.mark.parametrize(
    ("prompt", "output", "blocks", "message"),
    [
        (0, 5, 0, "at least 1"),
        (5, 0, 0, "at least 1"),
        (8192, 1, 512, "max_model_len"),
        (1600, 1, 100, "blocks hold"),
        (100, 1, 5, "block keys"),
    ],
)
def test_a_request_that_could_never_run_is_refused(gpu, prompt, output, blocks, message):
    from simulator.engine import EngineRequest

    engine = Engine(gpu(kv_blocks=100))
    with pytest.raises(ValueError, match=message):
        engine.submit(EngineRequest("a", prompt, output, tuple(range(blocks))), 0.0)
    assert engine.next_time() is None


def test_an_id_can_be_used_again_only_after_its_request_has_ended(gpu, ask):
    profile = gpu()
    engine = Engine(profile)
    request = ask(profile, "a", 10)
    engine.submit(request, 0.0)
    with pytest.raises(ValueError, match="in use"):
        engine.submit(request, 0.01)
    engine.submit(request, 10.0)


def test_time_never_runs_backwards(gpu, ask, only):
    profile = gpu()
    engine = Engine(profile)
    engine.advance(5.0)
    engine.submit(ask(profile, "a", 100), 4.0)
    (first,) = only(engine.advance(100.0), FirstToken)
    assert first.time == pytest.approx(5.06)


def test_the_stats_follow_the_load(gpu, ask):
    profile = gpu(slots=2, kv_blocks=600)
    engine = Engine(profile, emit_tokens=False)
    for name in "abc":
        engine.submit(ask(profile, name, 160, 100), 0.0)
    engine.advance(1.0)
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.prompt_tokens, stats.prefix_queries) == (2, 1, 320, 320)
    # a alone gets its first token at 0.066, b beside it at 0.066 + 0.02 + 0.066 = 0.152; then a step each 22 ms.
    steps = int((1.0 - 0.152) / 0.022)
    assert stats.generation_tokens == 2 + 1 + 2 * steps
    assert stats.kv_usage == pytest.approx((13 + 13) / 600)
