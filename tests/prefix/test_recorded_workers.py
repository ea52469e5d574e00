"""What real workers said, against what they then really took from their caches."""

import pytest

from gateway.prefix import events
from gateway.prefix.holders import Tier

MODEL = "qwen3-tiny"


def predicted_and_actual(index, mirror, recording, *, seqs_in_order):
    """Before each exchange, what the map says, and what the engine said afterwards; then its events are applied."""
    messages, exchanges = recording
    pending = sorted(messages)
    seen = []
    for exchange in exchanges:
        root = index.hasher.root(MODEL, None, exchange["cache_salt"])
        chains = index.hasher.chains(root, exchange["prompt_token_ids"], index.block_sizes or [32])
        match = index.match(chains).get(mirror.worker)
        seen.append((exchange["label"], match.tokens if match else 0, exchange["cached_tokens"]))
        last = max(exchange["event_seqs"], default=-1)
        while pending and pending[0] <= last:
            mirror.apply(events.decode(messages[pending.pop(0)].payload), now=float(seqs_in_order))
    return seen


def test_predicted_cached_tokens_are_those_of_a_real_vllm_for_every_request(index, recording):
    mirror = index.follow("w", MODEL)
    seen = predicted_and_actual(index, mirror, recording("vllm"), seqs_in_order=0)
    assert [(label, predicted) for label, predicted, _ in seen] == [(label, actual) for label, _, actual in seen]
    assert sum(actual for *_, actual in seen) > 1000
    assert mirror.problems == {}
    assert mirror.counters.removed_unknown == mirror.orphans == 0


def test_the_recording_of_vllm_ends_with_what_its_last_request_stored(index, recording):
    mirror = index.follow("w", MODEL)
    messages, _ = recording("vllm")
    for seq in sorted(messages):
        mirror.apply(events.decode(messages[seq].payload), now=0.0)
    assert mirror.counters.cleared == 1
    assert mirror.blocks(Tier.DEVICE) == 2


def test_with_lmcache_events_alone_are_right_until_it_reloads_from_its_silent_l2(index, recording):
    mirror = index.follow("w", MODEL)
    seen = predicted_and_actual(index, mirror, recording("lmcache"), seqs_in_order=0)
    wrong = [(label, predicted) for label, predicted, actual in seen if predicted != actual]
    assert [label for label, _ in wrong] == [
        "system A after eviction (reload expected)",
        "session A next turn after eviction (reload expected)",
        # The request after reset_prefix_cache would be a third, but vLLM announces a reset with its next step only.
    ]
    assert all(predicted <= actual for _, predicted, actual in seen)


def test_with_lmcache_and_its_write_through_l2_known_every_prediction_is_right(index, recording):
    mirror = index.follow("w", MODEL, pool="files", write_through=True, ttl={Tier.L2: 3600.0})
    seen = predicted_and_actual(index, mirror, recording("lmcache"), seqs_in_order=0)
    assert [(label, predicted) for label, predicted, _ in seen] == [(label, actual) for label, _, actual in seen]


@pytest.mark.parametrize("name", ["vllm", "lmcache"])
def test_every_event_of_a_recording_is_understood(recording, name):
    messages, _ = recording(name)
    for message in messages.values():
        batch = events.decode(message.payload)
        assert batch.events
        assert batch.problems == {}
        assert batch.rank == 0
        assert batch.timestamp > 1.7e9
