"""What holds for every worker and every load."""

from math import nextafter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator.engine import Engine, Finished, FirstToken, Retention, TokenOut
from simulator.engine.work import Work

WORKERS = [
    "neuron",
    "neuron-segments",
    "neuron-2d",
    "gpu",
    "gpu-tight",
    "gpu-parallel",
    "gpu-store",
    "gpu-evict",
    "no-cache",
]


@pytest.fixture(scope="session")
def workers(neuron, gpu):
    small = {"block_size": 4, "max_model_len": 160}
    buckets = (8, 16, 32)
    tight = gpu(**small, kv_blocks=44, slots=6, max_num_batched_tokens=24, chunk_overhead=0.01)
    return {
        "neuron": neuron(
            **small,
            kv_blocks=90,
            prefill_buckets=buckets,
            decode_batch_buckets=(1, 2, 4),
            itl_per_context_token=0.0001,
            decode_context_buckets=(16, 48, 80),
        ),
        "neuron-segments": neuron(**small, kv_blocks=130, prefill_buckets=buckets, segment_size=16),
        "neuron-2d": neuron(**small, kv_blocks=130, prefill_buckets=buckets, max_prefix_bucket=160),
        "gpu": gpu(**small, kv_blocks=200, slots=6, max_num_batched_tokens=24),
        "gpu-tight": tight,
        "gpu-parallel": gpu(**small, kv_blocks=60, slots=6, max_num_batched_tokens=24, tokens_per_step=2.7),
        "gpu-store": gpu(
            **small, kv_blocks=48, slots=3, max_num_batched_tokens=64, l1_blocks=30, l2_blocks=90, overhead=0.0
        ),
        "gpu-evict": gpu(**small, kv_blocks=48, slots=3, l1_blocks=20, l2_blocks=40, offload="evict"),
        "no-cache": gpu(**small, kv_blocks=50, slots=6, max_num_batched_tokens=24, prefix_caching=False),
    }


@pytest.fixture(scope="session")
def build(ask):
    """Turn drawn numbers into requests and their times."""

    def make(profile, drawn):
        now, events, requests = 0.0, [], []
        for index, (gap, prompt, output, shared, stem, priority, abort) in enumerate(drawn):
            now += gap
            fields = {"priority": priority, "finish_reason": "stop" if index % 2 else "length"}
            if priority == 2:
                fields["retention"] = (Retention(0, shared, 90, now + 1.0), Retention(shared, 99, 10))
            if stem >= len(requests):
                request = ask(profile, f"r{index}", prompt, output, family=stem, shared=shared, **fields)
            else:
                request = ask(profile, f"r{index}", prompt, output, shared=shared, after=requests[stem], **fields)
            requests.append(request)
            events.append((now, "submit", request))
            if abort is not None:
                events.append((now + abort, "abort", request))
        events.sort(key=lambda event: event[0])
        return events, requests

    return make


@pytest.fixture(scope="session")
def play():
    """Run events through an engine, asking it at `moments` in between; the outputs of each question, and the engine."""

    def run(engine, events, moments=(), seen=lambda outputs: None):
        schedule = [(time, 0, kind, request) for time, kind, request in events]
        schedule += [(time, 1, "advance", None) for time in moments]
        schedule.sort(key=lambda entry: entry[:2])
        told = []
        for time, _, kind, request in schedule:
            if kind == "submit":
                engine.submit(request, time)
            elif kind == "abort":
                engine.abort(request.id, time)
            elif kind == "hint":
                request(engine, time)
            else:
                outputs = engine.advance(time)
                assert all(output.time <= time for output in outputs)
                told += outputs
                seen(outputs)
        outputs = engine.advance(1e9)
        seen(outputs)
        return told + outputs

    return run


gaps = st.one_of(st.just(0.0), st.floats(0, 0.2), st.floats(0, 3))
arrivals = st.lists(
    st.tuples(
        gaps,
        st.integers(1, 110),
        st.integers(1, 50),
        st.integers(0, 30),
        st.integers(0, 4),
        st.integers(0, 2),
        st.one_of(st.none(), st.none(), st.none(), gaps),
    ),
    min_size=1,
    max_size=12,
)
worker_names = st.sampled_from(WORKERS)
hints = st.lists(
    st.tuples(
        st.floats(0, 8),
        st.sampled_from(["l2 to l1", "l1 to device", "l2 to device", "pin", "unpin", "retain", "demote"]),
        st.integers(0, 11),
        st.integers(0, 12),
        st.integers(0, 40),
        st.sampled_from(["device", "l1", "l2"]),
        st.floats(0, 4),
    ),
    max_size=12,
)


def wishes(drawn, requests):
    """Events of hints about prompts of `requests`."""

    def wish(what, keys, start, stop, tier, lifetime):
        def tell(engine, now):
            if what == "pin":
                engine.pin(keys, start, stop, tier, now + lifetime, now)
            elif what == "unpin":
                engine.unpin(keys, start, stop, tier, now)
            elif what == "retain":
                engine.retain(keys, start, stop, 5 * stop, now + lifetime, now)
            elif what == "demote":
                engine.demote(keys, start, stop, now)
            else:
                source, _, target = what.split()
                engine.prefetch(keys, start, stop, source, target, now)

        return tell

    return [
        (time, "hint", wish(what, requests[index % len(requests)].blocks, start, stop, tier, lifetime))
        for time, what, index, start, stop, tier, lifetime in drawn
    ]


@settings(max_examples=150, deadline=None)
@given(name=worker_names, drawn=arrivals, moments=st.lists(st.floats(0, 12), max_size=25))
def test_each_request_gets_one_first_token_its_tokens_in_order_and_one_end(
    workers, build, play, only, name, drawn, moments
):
    profile = workers[name]
    events, requests = build(profile, drawn)
    aborted = {request.id: time for time, kind, request in events if kind == "abort"}
    engine = Engine(profile)
    outputs = play(engine, events, moments)
    times = [output.time for output in outputs]
    assert times == sorted(times)
    submitted = {request.id: time for time, kind, request in events if kind == "submit"}
    for request in requests:
        mine = only(only(outputs, FirstToken | TokenOut | Finished), object, request.id)
        kinds = [type(output) for output in mine]
        tokens = [output for output in mine if isinstance(output, TokenOut)]
        assert [token.index for token in tokens] == [sum(t.count for t in tokens[:i]) for i in range(len(tokens))]
        assert all(token.count >= 1 for token in tokens)
        if Finished not in kinds:
            assert all(output.time <= aborted[request.id] for output in mine)
            continue
        assert kinds == [FirstToken] + [TokenOut] * len(tokens) + [Finished]
        assert sum(token.count for token in tokens) == request.output_tokens
        first, end = mine[0], mine[-1]
        assert end.reason == request.finish_reason
        assert first.cached_device + first.cached_l1 + first.cached_l2 + first.computed_tokens == request.prompt_tokens
        assert first.computed_tokens >= 1
        assert first.padded_tokens >= first.computed_tokens
        assert min(first.queue_time, first.load_time) >= 0
        spent = first.queue_time + first.load_time + first.prefill_time
        assert first.time - submitted[request.id] == pytest.approx(spent)
    finished = only(outputs, Finished)
    assert engine.stats.generation_tokens >= sum(
        request.output_tokens for request in requests if request.id in {end.request_id for end in finished}
    )
    if not aborted:
        assert len(finished) == len(requests)
        assert engine.stats.generation_tokens == sum(request.output_tokens for request in requests)


@settings(max_examples=150, deadline=None)
@given(name=worker_names, drawn=arrivals, wished=hints, moments=st.lists(st.floats(0, 12), max_size=25))
def test_the_events_tell_exactly_what_each_tier_holds_and_an_idle_pool_is_free_or_cached(
    workers, build, play, known, name, drawn, wished, moments
):
    profile = workers[name]
    events, requests = build(profile, drawn)
    events += wishes(wished, requests)
    engine = Engine(profile, emit_tokens=False)
    eyes = known(engine)

    def look(outputs):
        eyes.see(outputs, requests)
        eyes.check()
        device, stats = engine.memory.device, engine.stats
        assert 0 <= device.free <= device.total
        assert 0 <= device.in_use <= device.total
        assert stats.running <= profile.effective_slots
        assert not any(r.needs_block(engine._step, profile.block_size) for r in engine._decoding.values())
        assert len(engine.memory.l1) <= profile.l1_blocks
        assert len(engine.memory.l2) <= profile.l2_blocks

    play(engine, events, moments, look)
    device, stats = engine.memory.device, engine.stats
    assert engine.next_time() is None
    assert (stats.running, stats.waiting, device.in_use, stats.kv_usage) == (0, 0, 0, 0.0)
    assert device.free + len(device) == profile.kv_blocks
    assert len(device) == stats.stored_blocks - stats.removed_blocks


@settings(max_examples=150, deadline=None)
@given(name=worker_names, drawn=arrivals, wished=hints, moments=st.lists(st.floats(0, 12), max_size=60))
def test_many_small_steps_give_exactly_what_one_big_step_gives(workers, build, play, name, drawn, wished, moments):
    profile = workers[name]
    events, requests = build(profile, drawn)
    events += wishes(wished, requests)
    big = Engine(profile)
    small = Engine(profile)
    assert play(small, events, moments) == play(big, events)
    assert small.stats == big.stats


@settings(max_examples=100, deadline=None)
@given(name=worker_names, drawn=arrivals)
def test_an_engine_asked_whenever_it_says_so_gives_the_same(workers, build, name, drawn):
    profile = workers[name]
    events, _ = build(profile, drawn)
    events = [event for event in events if event[1] == "submit"]
    patient, eager = Engine(profile), Engine(profile)
    told = []
    for time, _, request in events:
        while (due := eager.next_time()) is not None and due <= time:
            told += eager.advance(due)
        eager.submit(request, time)
        patient.submit(request, time)
    while (due := eager.next_time()) is not None:
        outputs = eager.advance(due)
        assert all(output.time == due for output in outputs), "something fell due earlier than it said"
        told += outputs
    assert told == patient.advance(1e9)


@settings(max_examples=150, deadline=None)
@given(name=worker_names, drawn=arrivals, moments=st.lists(st.floats(0, 12), max_size=10))
def test_without_tokens_everything_else_happens_at_the_same_times(workers, build, play, name, drawn, moments):
    profile = workers[name]
    events, _ = build(profile, drawn)
    loud, quiet = Engine(profile, seed=7), Engine(profile, seed=7, emit_tokens=False)
    outputs = play(loud, events)
    assert [output for output in outputs if not isinstance(output, TokenOut)] == play(quiet, events, moments)
    assert loud.stats == quiet.stats


@settings(max_examples=100, deadline=None)
@given(name=worker_names, drawn=arrivals)
def test_on_an_idle_worker_the_events_predict_the_hit(workers, build, known, only, name, drawn):
    profile = workers[name]
    _, requests = build(profile, drawn)
    engine = Engine(profile, emit_tokens=False)
    eyes = known(engine)
    for number, request in enumerate(requests):
        run = 0
        while run < (request.prompt_tokens - 1) // profile.block_size and request.blocks[run] in eyes.tiers["device"]:
            run += 1
        engine.submit(request, number * 1000.0)
        outputs = engine.advance(number * 1000.0 + 999.0)
        first = only(outputs, FirstToken)[0]
        assert first.cached_device == profile.credit(request.prompt_tokens, run * profile.block_size)
        eyes.see(outputs, requests)


@given(start=st.floats(0, 1e6), duration=st.floats(1e-3, 10), steps=st.integers(1, 10_000), at=st.integers(0, 10_000))
@example(start=0.37462438754724514, duration=0.4337944604037133, steps=10_000, at=2075)  # the division rounds up here
def test_the_steps_done_agree_with_their_times_to_the_last_bit(start, duration, steps, at):
    work = Work(start=start, duration=duration, steps=steps, first_step=0)
    step = min(at, steps)
    assert work.done(work.time(step)) == step
    if step:
        assert work.done(nextafter(work.time(step), 0.0)) == step - 1
