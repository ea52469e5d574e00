import asyncio
import dataclasses
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from simulator.engine import profile_named
from simulator.server.events import END_OF_REPLAY
from simulator.server.hashing import wire_hash

CHAT = "/v1/chat/completions"
ENDPOINTS = {"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "tcp://127.0.0.1:*"}


@asynccontextmanager
async def subscribed(worker):
    """A subscriber that is connected; events from before the first batch it saw are skipped."""
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    subscriber.connect(worker.publisher.endpoint)
    await monitor.recv_multipart()
    subscriber.disable_monitor()
    await asyncio.sleep(0.05)  # the subscription itself has no event on this side
    try:
        yield subscriber
    finally:
        context.destroy(linger=0)


async def receive(subscriber):
    """(topic, sequence, batch) of the next message."""
    async with asyncio.timeout(5):
        topic, sequence, payload = await subscriber.recv_multipart()
    return topic.decode(), int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)


async def replay(worker, start):
    """The frames, after the empty one, of each reply to a replay request."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(worker.publisher.replay_endpoint)
    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
    replies = []
    try:
        async with asyncio.timeout(5):
            while True:
                empty, *frames = await dealer.recv_multipart()
                assert empty == b""
                if frames[-2:] == [END_OF_REPLAY, b""]:
                    return replies, frames
                replies.append(frames)
    finally:
        context.destroy(linger=0)


def follow(blocks, events):
    """Apply events in map form to {medium: {hash: tokens}}."""
    for event in events:
        if event["type"] == "AllBlocksCleared":
            blocks["GPU"].clear()
            continue
        held = blocks.setdefault(event["medium"], {})
        if event["type"] == "BlockStored":
            size = event["block_size"]
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            assert len(event["extra_keys"]) == len(event["block_hashes"])
            for at, block_hash in enumerate(event["block_hashes"]):
                held[block_hash] = event["token_ids"][at * size : (at + 1) * size]
        else:
            for block_hash in event["block_hashes"]:
                del held[block_hash]


async def say(http, worker, chat, content, **fields):
    async with http.post(worker.url + CHAT, json=chat(content, **fields)) as response:
        assert response.status == 200
        return await response.json()


async def test_the_events_rebuild_the_cache_through_evictions(start, http, chat):
    worker = await start(profile="h100-8b", kv_blocks=40, block_size=16, max_model_len=600, **ENDPOINTS)
    for number in range(12):
        await say(http, worker, chat, f"conversation {number % 5} " * 40, max_tokens=20)
    replies, _ = await replay(worker, 0)
    blocks = {}
    for _, _, payload in replies:
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert (rank, timestamp > 1e9) == (0, True)
        follow(blocks, events)
    assert worker.engine.stats.removed_blocks > 0
    assert set(blocks["GPU"]) == {wire_hash(key) for key in worker.engine.memory.device.keys}
    assert [int.from_bytes(sequence, "big") for _, sequence, _ in replies] == list(range(len(replies)))


async def test_outer_tiers_are_announced_with_their_tokens(start, http, chat):
    profile = dataclasses.replace(
        profile_named("h100-8b"), kv_blocks=30, max_model_len=400, l1_blocks=20, l2_blocks=200, offload="evict"
    )
    worker = await start(profile=profile, **ENDPOINTS)
    for number in range(10):
        await say(http, worker, chat, f"conversation {number} " * 40, max_tokens=2)
    replies, _ = await replay(worker, 0)
    blocks, tokens = {}, {}
    for _, _, payload in replies:
        events = msgspec.msgpack.decode(payload)[1]
        follow(blocks, events)
        for event in events:
            for at, block_hash in enumerate(event["block_hashes"] if event["type"] == "BlockStored" else ()):
                part = event["token_ids"][at * 16 : (at + 1) * 16]
                assert tokens.setdefault(block_hash, part) == part
    assert blocks["CPU"]
    assert blocks["STORAGE"]
    assert set(worker._origins) >= worker.engine.memory.device.keys
    assert {wire_hash(key) for key in worker._origins} == set().union(*blocks.values())


async def test_a_subscriber_hears_prompt_and_answer_with_salt_and_topic(start, http, chat):
    worker = await start(profile="h100-8b", block_size=16, topic="kv@me", **ENDPOINTS)
    async with subscribed(worker) as subscriber:
        answer = await say(http, worker, chat, "word " * 100, max_tokens=33, return_token_ids=True, cache_salt="tenant")
        ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        heard, keys = [], []
        while len(heard) < (len(ids) - 1) // 16 * 16:  # the last token's keys and values are never computed
            topic, _, (_, events, _) = await receive(subscriber)
            assert topic == "kv@me"
            for event in events:
                heard += event["token_ids"]
                keys += event["extra_keys"]
        assert heard == ids[: len(heard)]
        assert keys == [["tenant"]] + [None] * (len(keys) - 1)
        chain = worker.hasher.chain(ids, salt="tenant")
        assert event["block_hashes"][-1] in [wire_hash(digest) for digest in chain]


async def test_the_array_form_holds_the_fields_in_vllms_old_order(start, http, chat):
    worker = await start(kv_events_encoding="array", kv_events_replay_topic=False, lora_modules=("style",), **ENDPOINTS)
    await say(http, worker, chat, "word " * 100, max_tokens=1, model="style")
    ((sequence, payload),), end = await replay(worker, 0)
    assert (sequence, end) == ((0).to_bytes(8, "big"), [END_OF_REPLAY, b""])
    _, (event,), _ = msgspec.msgpack.decode(payload)
    name, hashes, parent, tokens, size, lora_id, medium, lora_name, keys, group, kind = event
    assert (name, parent, size, medium, group, kind) == ("BlockStored", None, 32, "GPU", 0, "full_attention")
    assert (lora_id, lora_name) == (1, "style")
    assert len(hashes) * 32 == len(tokens) == len(keys) * 32
    assert keys == [["style"]] * len(hashes)


async def test_lost_batches_leave_a_gap_that_a_replay_fills(start, http, chat):
    worker = await start(**ENDPOINTS)
    async with subscribed(worker) as subscriber:
        await say(http, worker, chat, "first " * 100, max_tokens=1)
        assert (await receive(subscriber))[1] == 0
        async with http.post(worker.url + "/simulator/faults", json={"drop_events": 2}) as response:
            assert response.status == 200
        for word in ("second", "third", "fourth"):
            await say(http, worker, chat, f"{word} " * 100, max_tokens=1)
        assert (await receive(subscriber))[1] == 3
    replies, end = await replay(worker, 1)
    assert [int.from_bytes(frames[1], "big") for frames in replies] == [1, 2, 3]
    assert end == [b"", END_OF_REPLAY, b""]
    async with http.get(worker.url + "/simulator/state") as response:
        assert (await response.json())["kv_events"]["dropped"] == 2


async def test_a_share_of_the_batches_can_get_lost(start, http, chat):
    worker = await start(**ENDPOINTS)
    async with http.post(worker.url + "/simulator/faults", json={"drop_events_share": 1}):
        pass
    await say(http, worker, chat, "word " * 100, max_tokens=1)
    assert (worker.publisher.sequence, worker.publisher.dropped) == (1, 1)


async def test_a_reset_says_that_all_is_gone(start, http, chat):
    worker = await start(**ENDPOINTS)
    await say(http, worker, chat, "word " * 100, max_tokens=1)
    async with subscribed(worker) as subscriber, http.post(worker.url + "/reset_prefix_cache"):
        _, sequence, (_, events, _) = await receive(subscriber)
    assert (sequence, events) == (1, [{"type": "AllBlocksCleared"}])


async def test_the_sources_tell_where_to_connect(start, http):
    worker = await start(model="m", **ENDPOINTS)
    async with http.get(worker.url + "/kv_event_sources") as response:
        source = (await response.json())["0"]
    assert source["endpoint"] == worker.publisher.endpoint
    assert source["replay_endpoint"] == worker.publisher.replay_endpoint
    assert source["topic"] == f"kv@127.0.0.1:{worker.port}@m"
    assert not source["endpoint"].endswith("*")
    quiet = await start()
    async with http.get(quiet.url + "/kv_event_sources") as response:
        assert await response.json() == {}


async def test_an_address_without_a_star_is_connected_to(start, http, chat):
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    heard = subscriber.recv_multipart()  # a bound subscriber subscribes only while it is asked for messages
    try:
        worker = await start(kv_events=f"tcp://127.0.0.1:{port}")
        for number in range(100):
            await say(http, worker, chat, f"word {number} " * 100, max_tokens=1)
            if heard.done():
                break
        async with asyncio.timeout(5):
            assert (await heard)[0] == worker.publisher.topic.encode()
    finally:
        context.destroy(linger=0)


async def test_a_taken_address_is_an_error_and_nothing_stays_open(start):
    first = await start(**ENDPOINTS)
    endpoint = first.publisher.endpoint.replace("127.0.0.1", "*")
    with pytest.raises(zmq.ZMQError):
        await start(kv_events=endpoint)
