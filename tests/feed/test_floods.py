"""Floods of events and of garbage: taken in or counted, and the event loop goes on."""

import asyncio
import gc
import random
import time

import msgspec
import pytest

from gateway.prefix import stream
from gateway.prefix.events import Cleared, Removed, Stored
from gateway.prefix.holders import Tier

BLOCK = 16


@pytest.fixture
def publisher(publishers):
    return publishers()


@pytest.fixture
async def lag():
    """The most CPU time, in seconds, that this process took between two turns of the event loop since it was last asked.

    CPU time, because on a busy machine a timer is late for other reasons. All threads count: they hold the same lock.
    What is there already is hidden from the garbage collector, as the gateway does.
    """
    gc.collect()
    gc.freeze()
    worst = 0.0

    async def watch():
        nonlocal worst
        while True:
            before = time.process_time()
            await asyncio.sleep(0.0005)
            worst = max(worst, time.process_time() - before)

    def longest():
        nonlocal worst
        found, worst = worst, 0.0
        return found

    watching = asyncio.get_running_loop().create_task(watch())
    yield longest
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    gc.unfreeze()


async def followed(scene, tools, publisher, started):
    """A scene that follows only `publisher`, whose worker is away, subscribed."""
    section = tools.section_of("http://127.0.0.1:9", kv_events=tools.EventSocket(endpoint=publisher.endpoint))
    context = scene(section)
    it = await context.__aenter__()
    started.append(context)
    await tools.until(lambda: it.status().status == "events")
    # The subscription itself takes a moment after the handshake.
    while not it.status().counters.get("batches"):
        publisher.batch([["AllBlocksCleared"]])
        await asyncio.sleep(0.01)
    return it


@pytest.fixture
async def following(scene, tools, publisher):
    started = []

    async def following():
        return await followed(scene, tools, publisher, started)

    yield following
    for context in started:
        await context.__aexit__(None, None, None)


def stored(hashes, parent, tokens):
    return ["BlockStored", hashes, parent, tokens, BLOCK, None]


async def test_200_000_events_are_taken_in_and_the_loop_goes_on(following, publisher, tools, lag):
    it = await following()
    rng = random.Random(5)
    tokens = [rng.randrange(150_000) for _ in range(BLOCK)]
    batches, per_batch = 20, 5000
    lag()
    for number in range(batches):
        first = number * per_batch + 1
        events = [stored([first + at], None, [number * per_batch + at, *tokens[1:]]) for at in range(per_batch)]
        events += [["BlockRemoved", [first + at]] for at in range(per_batch)]
        publisher.batch(events)
        del events
        await asyncio.sleep(0)
    lag()  # what making them cost is not the feed's
    await tools.until(lambda: it.status().counters["events"] >= batches * per_batch * 2, 60.0)
    await tools.until(lambda: it.status().blocks["device"] == 0, 10.0)
    assert lag() < 0.05
    assert it.status().counters.get("losses", 0) == 0


async def test_one_batch_of_a_million_tokens_does_not_stop_the_loop(following, publisher, tools, lag):
    it = await following()
    blocks = 62_500
    tokens = [number % 150_000 for number in range(blocks * BLOCK)]
    payload = msgspec.msgpack.encode([time.time(), [stored(list(range(1, blocks + 1)), None, tokens)], 0])
    await asyncio.sleep(0.05)
    lag()
    publisher.send(b"", next(publisher.seq).to_bytes(8, "big"), payload)
    await tools.until(lambda: it.status().blocks["device"] == blocks, 10.0)
    assert lag() < 0.1  # in a thread, but its longest steps hold the interpreter's lock
    assert it.predicted(it.status().worker, tokens) == (blocks - 1) * BLOCK


async def test_garbage_is_counted_and_nothing_else_happens(following, publisher, tools):
    it = await following()
    rng = random.Random(3)
    tokens = list(range(40 * BLOCK))
    publisher.batch([stored(list(range(1, 41)), None, tokens)])
    await tools.until(lambda: it.status().blocks["device"] == 40)
    for number in range(2000):
        match number % 4:
            case 0:
                publisher.send(b"", rng.randbytes(8), rng.randbytes(20), b"one more")
            case 1:
                publisher.send(rng.randbytes(30))
            case 2:
                publisher.send(b"", next(publisher.seq).to_bytes(8, "big"), rng.randbytes(50))
            case 3:
                publisher.batch([{"type": "BlockStored", "block_hashes": "?"}, 7, None, ["Whatever", 1]])
    publisher.batch([stored(list(range(41, 51)), 40, tokens[: 10 * BLOCK])])
    await tools.until(lambda: it.status().blocks["device"] == 50)
    status = it.status()
    assert status.problems["garbage"] >= 1000
    assert status.problems["bad_event"] == 1500
    assert status.problems["unknown_event"] == 500
    assert status.status == "events"
    assert it.feeds.degraded("m") == ["1 of 1 workers sent KV events that make no sense: 127.0.0.1:9"]


async def test_a_message_that_is_too_long_costs_a_connection_and_no_memory(following, publisher, tools):
    it = await following()
    publisher.send(b"", next(publisher.seq).to_bytes(8, "big"), bytes(17 * 1024 * 1024))
    await tools.until(lambda: it.status().counters.get("disconnects") == 1)
    await tools.until(lambda: it.status().status in ("events", "gap"))


@pytest.mark.parametrize("count", [1, 511, 512, 513, 2000])
def test_a_long_event_in_parts_is_the_same_event(count):
    packed = bytes(range(256)) * (count * BLOCK * 4 // 256 + 1)
    event = Stored(
        list(range(count)), 99, packed[: count * BLOCK * 4], BLOCK, Tier.DEVICE, "lora", [None] * (count - 1) + [["x"]]
    )
    parts = stream._parts(event)
    assert all(len(part.hashes) <= stream.PIECE for part in parts)
    assert [each for part in parts for each in part.hashes] == event.hashes
    assert b"".join(part.tokens for part in parts) == event.tokens
    assert [part.parent for part in parts] == [99, *(part.hashes[-1] for part in parts[:-1])]
    assert [key for part in parts for key in part.extra_keys] == list(event.extra_keys)
    removed = Removed(list(range(count)), Tier.L1, 3)
    assert [each for part in stream._parts(removed) for each in part.hashes] == removed.hashes
    assert stream._parts(Cleared()) == [Cleared()]


def test_an_event_that_names_hashes_only_stays_whole():
    event = Stored(list(range(2000)), None, b"", 0, Tier.L1)
    assert stream._parts(event) == [event]
