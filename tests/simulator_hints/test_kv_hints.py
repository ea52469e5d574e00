"""Hints inside requests to a simulated worker change what its cache keeps, stores and loads; mistakes in them are answered with 400."""

import asyncio

import pytest

from backends.hints.kv_hints import KvHintsDriver
from backends.hints.kv_transfer_params import KvTransferParamsDriver
from backends.hints.model import Action, Hint, Subject
from simulator.engine import Retention
from simulator.server.hashing import wire_hash
from simulator.server.hints import Fetch, HintsError, read_hints

FOREVER = float("inf")


def prompt(first, tokens=160):
    return list(range(first, first + tokens))


def envelope(*actions):
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_id": str(at), "action_type": kind, "action_version": "1.0", "payload": payload}
            for at, (kind, payload) in enumerate(actions)
        ],
    }


def retain(*directives):
    return envelope(("kv.retain", {"scope": "s", "directives": list(directives)}))


def worth(worker, ids):
    """What the device's blocks of a prompt are worth."""
    worker.pump.advance()
    device = worker.engine.memory.device
    return [device.priority(key, worker.clock.now()) for key in worker.hasher.chain(ids) if key in device]


async def fill(complete, worker, first=600, rounds=4):
    for index in range(rounds):
        await complete(worker, prompt(first + 300 * index))


async def test_what_is_to_be_retained_outlives_what_came_later(start, complete):
    worker = await start(kv_hints=True, kv_blocks=24, max_model_len=256)
    kept = retain({"start": 0, "end": 96, "priority": 90, "duration": 3600.0})
    await complete(worker, prompt(10), kv_hints=kept)
    await fill(complete, worker)
    assert await complete(worker, prompt(10)) == 96


async def test_without_the_option_the_field_is_ignored(start, complete):
    worker = await start(kv_blocks=24, max_model_len=256)
    await complete(worker, prompt(10), kv_hints=retain({"start": 0, "end": 96, "priority": 90}))
    await fill(complete, worker)
    assert await complete(worker, prompt(10)) == 0


async def test_a_priority_for_all_of_a_request_can_let_it_go_first(start, complete):
    worker = await start(kv_hints=True, kv_blocks=32, max_model_len=256)
    await complete(worker, prompt(10))
    over = envelope(("vllm.set_priority", {"target": "request_cached", "location": "local_g1", "value": -50}))
    await complete(worker, prompt(1000), kv_hints=over)
    await complete(worker, prompt(2000))
    await complete(worker, prompt(3000, 64))
    assert len(worth(worker, prompt(10))) == 10
    assert len(worth(worker, prompt(1000))) < 10


async def test_what_the_gateways_driver_says_is_what_happens(start, complete):
    worker = await start(kv_hints=True)
    subject = Subject("m", 160, {}, session="s")
    fields = {"rule": "r", "worker": "w", "subject": subject}
    hints = [
        Hint(id=1, action=Action.RETAIN, stop=64, priority=90, ttl=60.0, **fields),
        Hint(id=2, action=Action.RETAIN, start=64, stop=160, priority=70, ttl=60.0, **fields),
    ]
    await complete(worker, prompt(10), **KvHintsDriver().fields(hints, {}))
    assert worth(worker, prompt(10)) == [90] * 4 + [70] * 6
    demote = Hint(id=3, action=Action.DEMOTE, start=32, stop=160, priority=0, **fields)
    await complete(worker, prompt(10), **KvHintsDriver().fields([demote], {}))
    assert worth(worker, prompt(10)) == [90] * 2 + [0] * 8


async def test_the_drivers_probe_sees_whether_it_is_understood(start, call, http):
    for understood in (True, False):
        worker = await start(kv_hints=understood)
        async with http.get(f"{worker.url}{KvHintsDriver().probe().path}") as answer:
            assert KvHintsDriver().speaks(answer.status, await answer.read()) is understood


@pytest.mark.parametrize(
    "hints",
    [
        "often",
        {"protocol_version": "0.1", "actions": "many"},
        {"protocol_version": "0.1", "actions": [{"action_type": "kv.retain", "payload": 3}]},
        retain({"start": 0, "end": 16, "priority": 101}),
        retain({"start": 32, "end": 16, "priority": 10}),
        retain({"start": 0, "end": "all", "priority": 10}),
        retain({"start": 0, "end": 16, "priority": 10, "duration": -1}),
        envelope(*[("x", {})] * 17),
        envelope(("kv.fetch", {"source_control_endpoint": "w"})),
    ],
)
async def test_mistakes_are_answered_with_400_and_the_worker_goes_on(start, call, complete, hints):
    worker = await start(kv_hints=True)
    status, answer = await call(
        "POST",
        f"{worker.url}/v1/completions",
        {"model": "sim", "prompt": prompt(10), "max_tokens": 1, "kv_hints": hints},
    )
    assert status == 400
    assert "kv" in answer["error"]["message"]
    assert await complete(worker, prompt(10)) == 0


def fetch_of(worker, ids):
    hashes = [wire_hash(key) for key in worker.hasher.chain(ids)]
    return envelope(("kv.fetch", {"source_control_endpoint": worker.url, "block_hashes": hashes}))


async def test_a_request_waits_for_what_it_fetches_from_another_worker(start, shared, complete):
    one, other = await start(shared), await start(shared, kv_hints=True)
    await complete(one, prompt(10))
    assert await complete(other, [*prompt(10), 7, 8], kv_hints=fetch_of(one, prompt(10))) == 160
    assert await complete(other, prompt(3000), kv_hints=fetch_of(one, prompt(3000))) == 0


async def test_a_client_that_leaves_while_its_blocks_are_fetched_leaves_nothing_behind(start, shared, complete, http):
    one, other = await start(shared), await start(shared, kv_hints=True, speed=0.001)
    await complete(one, prompt(10))
    body = {"model": "sim", "prompt": prompt(10), "kv_hints": fetch_of(one, prompt(10))}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), http.post(f"{other.url}/v1/completions", json=body):
            pass
    while not other.metrics.finished["abort"]:  # noqa: ASYNC110 - the server's own doing
        await asyncio.sleep(0.01)
    assert (other.stats().running, other.stats().waiting, len(other.pump)) == (0, 0, 0)


async def test_no_more_is_offloaded_than_a_request_says(start, complete):
    worker = await start(l1_blocks=512)
    subject = Subject("m", 160, {})
    hint = Hint(id=1, action=Action.DEMOTE, rule="r", worker="w", subject=subject, start=48, stop=160, target="l1")
    await complete(worker, prompt(10), **KvTransferParamsDriver().fields([hint], {}))
    worker.pump.advance()
    assert len(worker.engine.memory.l1) == 3


async def test_nothing_is_loaded_that_a_request_does_not_want_loaded(start, complete):
    worker = await start(l1_blocks=512)
    ids = prompt(10, 800)
    await complete(worker, ids)
    for tiers, cached in (([], 0), ([{"medium": "STORAGE"}], 0), ([{"medium": "CPU", "locality": "LOCAL"}], 784)):
        assert worker.pump.reset_prefix_cache()
        assert await complete(worker, ids, kv_transfer_params={"kv_load_tiers": tiers}) == cached


@pytest.mark.parametrize(
    "transfer", [{"max_offload_tokens": -1}, {"max_offload_tokens": "all"}, {"kv_load_tiers": "CPU"}]
)
async def test_wrong_transfer_parameters_are_answered_with_400(start, call, transfer):
    worker = await start()
    body = {"model": "sim", "prompt": prompt(10), "max_tokens": 1, "kv_transfer_params": transfer}
    assert (await call("POST", f"{worker.url}/v1/completions", body))[0] == 400


def read(hints=None, transfer=None):
    return read_hints(hints, transfer, prompt_tokens=100, block_size=16)


def test_ranges_are_blocks_that_begin_in_them_and_the_highest_counts():
    wishes = read(
        retain(
            {"start": 0, "end": 40, "priority": 80, "duration": 5},
            {"start": 40, "end": 100, "priority": 60},
            {"covers_output": True, "priority": 20},
        )
    )
    assert wishes.retention == (
        Retention(7, 1 << 36, 20, FOREVER),
        Retention(3, 7, 60, FOREVER),
        Retention(0, 3, 80, 5.0),
    )


def test_of_a_number_for_all_and_ranges_the_higher_counts():
    said = retain({"start": 0, "end": 32, "priority": 90}, {"start": 32, "end": 100, "priority": 55})
    said["actions"].append(
        {"action_type": "vllm.set_priority", "payload": {"target": "request_cached", "value": 20, "ttl_seconds": 9}}
    )
    assert [(part.priority, part.until) for part in read(said).retention] == [(55, FOREVER), (70, 9.0), (90, FOREVER)]


def test_what_is_not_known_is_left_out():
    assert read({"protocol_version": "9", "actions": 3}).retention == ()
    assert read(envelope(("kv.unheard-of", {"x": 1}))) == read()
    assert read(None, {"do_remote_decode": True}) == read()
    assert read(envelope(("vllm.set_priority", {"value": None}))) == read()


def test_a_fetch_names_its_source_and_its_blocks():
    said = envelope(("kv.fetch", {"source_control_endpoint": "http://w:1/", "block_hashes": [1, 2]}))
    assert read(said).fetches == (Fetch("w:1", (1, 2)),)
    with pytest.raises(HintsError):
        read(envelope(("kv.fetch", {"source_control_endpoint": "w:1", "block_hashes": ["a"]})))
