"""LMCache's servers beside simulated workers: shaped as the recorded ones, and what they are asked comes true in the engine."""

import asyncio
from array import array

import pytest

from backends.hints import chunks
from backends.hints.lmcache import LMCacheDriver
from backends.hints.lmcache_common import Place
from backends.hints.lmcache_coordinator import LMCacheCoordinatorDriver
from backends.hints.model import Action, Hint, Subject
from simulator.server.lmcache_coordinator import LMCacheCoordinator

CHUNK = 32
IDS = list(range(10, 170))
"""Five chunks."""
INSTANCE = [
    *("instance_id", "ip", "http_port", "registration_time"),
    *("metadata", "p2p_advertised_url", "mq_port"),
]
"""What the real coordinator says of each."""


def shape(value):
    """The names and types in a JSON value; of lists, the first entry's."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def named(ids=IDS, **fields):
    return {"model_name": "sim", "world_size": 1, "token_ids": ids, **fields}


async def ended(call, url):
    """The last answer to polls at `url`."""
    while True:
        status, answer = await call("GET", url)
        if answer.get("status") != "pending":
            return status, answer
        await asyncio.sleep(0.005)


@pytest.fixture
async def pair(start, shared):
    """Two workers with one storage, each with a server, the first one's l1 as large as the second one's."""
    return [await start(shared, l1_blocks=512, lmcache_port=0) for _ in range(2)]


@pytest.fixture
async def coordinator(pair):
    server = LMCacheCoordinator([worker.lmcache for worker in pair], "127.0.0.1", 0)
    await server.start()
    yield server
    await server.stop()


async def test_what_one_worker_stored_comes_to_the_l1_of_another(pair, complete, call, recorded):
    one, other = pair
    await complete(one, IDS)
    url = f"{other.lmcache.url}/cache/prefetches"
    status, submitted = await call("POST", url, named())
    assert (status, shape(submitted)) == (202, shape(recorded("mp_server", "warm L2 -> L1")[1]))
    assert submitted["chunks"] == 5
    poll = f"{url}/{submitted['request_id']}"
    status, completed = await ended(call, poll)
    real = recorded("mp_server", "poll", status="completed")
    assert (status, shape(completed)) == (real[0], shape(real[1]))
    assert (completed["found_keys"], completed["total_keys"]) == (5, 5)
    assert (await call("GET", poll))[0] == 404
    assert all(key in other.engine.memory.l1 for key in other.hasher.chain(IDS))
    assert await complete(other, [*IDS, 3, 4]) == 160


async def test_without_the_prefetch_nothing_is_in_the_other_ones_l1(pair, complete):
    one, other = pair
    await complete(one, IDS)
    assert len(other.engine.memory.l1) == 0
    assert len(one.engine.memory.l1) == 10


async def test_a_prefetch_takes_the_storages_bandwidth(start, shared, complete, call):
    one = await start(shared, l1_blocks=512)
    other = await start(shared, l1_blocks=512, lmcache_port=0, speed=0.01)
    await complete(one, IDS)
    url = f"{other.lmcache.url}/cache/prefetches"
    _, submitted = await call("POST", url, named())
    # At a hundredth of the speed, 7 ms take 0.7 s.
    assert (await call("GET", f"{url}/{submitted['request_id']}"))[1]["status"] == "pending"
    assert len(other.engine.memory.l1) < 10


@pytest.mark.parametrize(
    ("label", "body"),
    [
        ("shorter than a chunk: noop", named(IDS[:10])),
        ("no layout for the model: 503", named() | {"model_name": "unknown"}),
        ("wrong direction: 400", named(source_tier="l1", target_tier="l2")),
        ("422", {"token_ids": IDS[:2]}),
        ("tokens nobody stored", named()),
    ],
)
async def test_prefetches_are_answered_as_the_real_server_answers(pair, call, recorded, label, body):
    status, answer = await call("POST", f"{pair[0].lmcache.url}/cache/prefetches", body)
    real_status, real = recorded("mp_server", label)
    assert (status, shape(answer)) == (real_status, shape(real))


async def test_what_is_nowhere_is_not_found(pair, call, recorded):
    url = f"{pair[0].lmcache.url}/cache/prefetches"
    _, submitted = await call("POST", url, named())
    _, answer = await ended(call, f"{url}/{submitted['request_id']}")
    assert shape(answer) == shape(recorded("mp_server", "nothing found")[1])
    assert (answer["found_keys"], answer["total_keys"]) == (0, 5)


async def test_objects_are_deleted_by_their_names(pair, complete, call, recorded):
    one, _ = pair
    await complete(one, IDS)
    keys = chunks.keys(chunks.names(IDS, CHUNK)[3:], "sim", 1, None)
    url = f"{one.lmcache.url}/cache/objects"
    status, answer = await call("DELETE", url, {"keys": keys, "tier": "l1"})
    assert (status, answer) == (200, {"deleted": 2, "skipped": 0, "ok": True})
    assert len(one.engine.memory.l1) == 6
    assert len(one.shared.l2) == 10
    assert (await call("DELETE", url, {"keys": keys, "tier": "all"}))[1]["deleted"] == 2
    assert len(one.shared.l2) == 6
    unknown = [{**keys[0], "chunk_hash_hex": "00" * 32}]
    assert (await call("DELETE", url, {"keys": unknown})) == recorded("mp_server", "unknown key")
    status, answer = await call("DELETE", url, {"keys": "x"})
    assert (status, answer) == recorded("mp_server", "422", detail=answer["detail"])


async def test_l1_is_cleared_and_storage_is_not(pair, complete, call, recorded):
    one, _ = pair
    await complete(one, IDS)
    assert await call("POST", f"{one.lmcache.url}/cache/clear") == recorded("mp_server", "clear L1 (no body)")
    assert (len(one.engine.memory.l1), len(one.shared.l2)) == (0, 10)
    assert await call("POST", f"{one.lmcache.url}/cache/clear", {"tier": "l2"}) == recorded("mp_server", "only l1: 400")


async def test_quotas_are_remembered(pair, call):
    url = f"{pair[0].lmcache.url}/quota/tenant-1"
    assert await call("PUT", url, {"limit_gb": 0.5}) == (
        200,
        {"cache_salt": "tenant-1", "limit_gb": 0.5, "status": "ok"},
    )
    assert (await call("GET", url))[1]["limit_gb"] == 0.5
    assert await call("PUT", url, {"limit_gb": -1}) == (400, {"error": "limit_gb must be non-negative"})
    assert (await call("DELETE", url))[1]["status"] == "removed"
    assert (await call("DELETE", url))[1]["status"] == "not_found"


async def test_the_directory_says_who_holds_each_chunk(coordinator, pair, complete, call, recorded):
    one, other = pair
    await complete(one, IDS)
    status, answer = await call("POST", f"{coordinator.url}/directory/lookup", named([*IDS, 1, 2]))
    real = recorded("coordinator_with_mp_server", "lookup of a prompt that vLLM stored: L1 and L2 placements of mp-0")
    assert (status, shape(answer)) == (real[0], shape(real[1]))
    assert answer["chunks"] == 5
    assert [result["token_ids"] for result in answer["results"]] == [
        IDS[at : at + CHUNK] for at in range(0, 160, CHUNK)
    ]
    l1, l2 = one.lmcache.instance, other.lmcache.instance
    for result in answer["results"]:
        places = {(place["instance_id"], place["tier"]) for place in result["placements"]}
        assert places == {(l1, "l1"), (l1, "l2"), (l2, "l2")}
    keys = [result["key"] for result in answer["results"]][:2]
    by_keys = (await call("POST", f"{coordinator.url}/directory/lookup", {"keys": keys}))[1]
    assert by_keys["results"] == answer["results"][:2]
    salted = (await call("POST", f"{coordinator.url}/directory/lookup", named(cache_salt="tenant-1")))[1]
    assert [result["placements"] for result in salted["results"]] == [[]] * 5


@pytest.mark.parametrize(
    ("label", "body"),
    [
        ("shorter than a chunk", named(IDS[:20])),
        ("tokens without a model: 422", {"token_ids": IDS}),
        ("both forms: 422", named(keys=[])),
        ("bad hex: 422", {"keys": [{"chunk_hash_hex": "zz", "model_name": "sim", "kv_rank": 16777472}]}),
    ],
)
async def test_lookups_that_name_nothing_are_answered_as_by_the_real_one(coordinator, call, recorded, label, body):
    status, answer = await call("POST", f"{coordinator.url}/directory/lookup", body)
    real_status, real = recorded("coordinator", label)
    assert status == real_status
    if status == 200:
        assert answer == real
    else:
        assert [(each["type"], each["msg"], each["loc"]) for each in answer["detail"]] == [
            (each["type"], each["msg"], each["loc"]) for each in real["detail"]
        ]


async def test_instances_are_named_and_prefetches_go_to_the_one_that_is_named(
    coordinator, pair, complete, call, recorded
):
    one, other = pair
    await complete(one, IDS)
    status, answer = await call("GET", f"{coordinator.url}/instances")
    assert (status, list(answer["instances"][0])) == (200, INSTANCE)
    assert [each["instance_id"] for each in answer["instances"]] == [one.lmcache.instance, other.lmcache.instance]
    url = f"{coordinator.url}/cache/prefetches"
    status, submitted = await call("POST", url, named(instance_id=other.lmcache.instance))
    real = recorded("coordinator_with_mp_server", "prefetch dispatched through the coordinator")
    assert (status, shape(submitted)) == (real[0], shape(real[1]))
    await ended(call, f"{url}/{other.lmcache.instance}/{submitted['request_id']}")
    assert len(other.engine.memory.l1) == 10
    assert (await call("POST", url, named(instance_id="nobody")))[0] == 404
    noop = await call("POST", url, named(IDS[:3], instance_id=one.lmcache.instance))
    assert shape(noop[1]) == shape(recorded("coordinator_with_mp_server", "noop", request_id="")[1])
    wrong = named(instance_id=one.lmcache.instance) | {"model_name": "unknown"}
    assert (await call("POST", url, wrong))[0] == 502


async def test_pins_are_counted_and_hold_in_storage_until_the_last_is_taken_back(coordinator, pair, complete, call):
    one, _ = pair
    await complete(one, IDS)
    pins, delete = f"{coordinator.url}/cache/pins", f"{coordinator.url}/cache/delete"
    pinned = {"requested": 2, "affected": 2, "status": "pinned"}
    assert await call("POST", pins, named(IDS[:64])) == (200, pinned)
    assert await call("POST", pins, named(IDS[:64])) == (200, pinned)
    assert [each["pin_count"] for each in (await call("GET", pins))[1]["pins"]] == [2, 2]
    everything = named(instance_id=one.lmcache.instance, tier="l2")
    assert (await call("DELETE", pins, named(IDS[:64])))[1] == {**pinned, "status": "unpinned"}
    assert (await call("POST", delete, everything))[1] == {
        "instance_id": one.lmcache.instance,
        "requested": 5,
        "affected": 3,
        "skipped": 2,
        "status": "deleted",
    }
    assert len(one.shared.l2) == 4
    await call("DELETE", pins, named(IDS[:64]))
    assert (await call("GET", pins))[1] == {"total": 0, "pins": []}
    assert (await call("POST", delete, everything))[1]["skipped"] == 0
    assert len(one.shared.l2) == 0
    assert (await call("DELETE", pins, named(IDS[:64])))[1] == {**pinned, "status": "unpinned"}


async def test_a_forced_delete_takes_pins_too(coordinator, pair, complete, call):
    one, _ = pair
    await complete(one, IDS)
    await call("POST", f"{coordinator.url}/cache/pins", named())
    body = named(instance_id=one.lmcache.instance, force=True)
    answer = (await call("POST", f"{coordinator.url}/cache/delete", body))[1]
    assert (answer["affected"], answer["skipped"]) == (10, 0)
    assert (await call("GET", f"{coordinator.url}/cache/pins"))[1]["total"] == 0


async def said(http, driver, hint, url):
    """How a hint that `driver` says to the server at `url` ends."""
    call = driver.call(hint)
    while True:
        async with http.request(call.method, url + call.path, json=call.body) as answer:
            verdict = driver.read(hint, answer.status, await answer.read())
        if verdict.verdict != "pending":
            return verdict
        call = verdict.then
        await asyncio.sleep(0.005)


def wish(action, **fields):
    subject = Subject("m", len(IDS), {}, ids=lambda: array("I", IDS))
    return Hint(id=1, action=action, rule="r", worker="w", subject=subject, stop=len(IDS), **fields)


async def test_the_gateways_driver_understands_the_server_and_is_understood(pair, complete, http):
    one, other = pair
    await complete(one, IDS)
    driver = LMCacheDriver(Place(model="sim", chunk=CHUNK))
    async with http.get(other.lmcache.url + driver.probe().path) as answer:
        assert driver.speaks(answer.status, await answer.read())
    answer = await said(http, driver, wish(Action.PREFETCH, source="l2", target="l1"), other.lmcache.url)
    assert (answer.verdict, answer.moved_tokens) == ("accepted", 160)
    assert len(other.engine.memory.l1) == 10
    answer = await said(http, driver, wish(Action.DEMOTE, start=64, target="l1"), other.lmcache.url)
    assert answer.verdict == "accepted"
    assert len(other.engine.memory.l1) == 4


async def test_the_gateways_driver_understands_the_coordinator_and_is_understood(coordinator, pair, complete, http):
    one, other = pair
    await complete(one, IDS)
    driver = LMCacheCoordinatorDriver(Place(model="sim", chunk=CHUNK, instance=other.lmcache.instance))
    async with http.get(coordinator.url + driver.probe().path) as answer:
        assert driver.speaks(answer.status, await answer.read())
    answer = await said(http, driver, wish(Action.PREFETCH, source="l2", target="l1"), coordinator.url)
    assert answer.verdict == "accepted"
    assert len(other.engine.memory.l1) == 10
    assert (await said(http, driver, wish(Action.PIN, target="l2"), coordinator.url)).verdict == "accepted"
    assert len(one.shared.l2.pinned) == 10
    assert (await said(http, driver, wish(Action.UNPIN, target="l2"), coordinator.url)).verdict == "accepted"
    assert not one.shared.l2.pinned


async def test_a_worker_starts_both_servers_when_it_is_told_to(start, call):
    worker = await start(l1_blocks=64, l2_blocks=64, lmcache_port=0, lmcache_coordinator_port=0)
    assert (await call("GET", f"{worker.lmcache.url}/healthcheck"))[1] == {"status": "healthy"}
    assert (await call("GET", f"{worker.lmcache_coordinator.url}/healthz"))[1] == {"status": "healthy"}
    status = (await call("GET", f"{worker.lmcache.url}/status"))[1]
    assert (status["chunk_size"], status["hash_algorithm"]) == (CHUNK, "blake3")
