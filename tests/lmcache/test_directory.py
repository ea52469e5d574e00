"""What LMCache's directory says, in the prefix map: recorded, and whatever it may say."""

import base64
import gzip
import itertools
import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.hints import chunks
from backends.hints.lmcache_coordinator import Held, Placement
from gateway.prefix import events
from gateway.prefix.holders import Tier
from gateway.prefix.index import PrefixIndex
from gateway.prompt.blocks import Hasher
from gateway.residency.chunk_names import AGAIN
from gateway.residency.directory import DOUBT, SLOWEST, Directory
from tests.lmcache.conftest import FIXTURES, exchanges

MODEL = "qtiny"
WORKER = "127.0.0.1:8011"
RECORDED = Path(__file__).parents[1] / "prefix" / "fixtures"


class Coordinator:
    """Keeps what servers report, and answers lookups by key, as the real one does."""

    def __init__(self):
        self.placements = {}

    def report(self, batch):
        for entry in batch["entries"]:
            key = msgkey(entry["key"])
            here = (batch["instance_id"], batch["tier"])
            if batch["event_type"] == "store":
                self.placements.setdefault(key, set()).add(here)
            elif batch["event_type"] == "delete":
                self.placements.get(key, set()).discard(here)

    def lookup(self, keys):
        return [
            Held(
                chunks.ObjectKey(**key),
                [Placement(*each) for each in sorted(self.placements.get(msgkey(key), ()))],
            )
            for key in keys
        ]


def msgkey(key):
    return tuple(key[name] for name in ("chunk_hash_hex", "model_name", "kv_rank", "object_group_id", "cache_salt"))


class Scene:
    """A fleet of workers, its directory and a coordinator."""

    def __init__(self, *, block_size=32, workers=(WORKER,), instances=("mp-0",), **options):
        self.hasher = Hasher(3)
        self.index = PrefixIndex(self.hasher)
        self.mirrors = {name: self.index.follow(name, "fleet", block_size=block_size) for name in workers}
        self.size = block_size
        self.coordinator = Coordinator()
        self.directory = Directory("fleet", self.index, model=MODEL, **{"chunk": 32, **options})
        self.index.watchers["fleet"] = self
        self.workers, self.instances = workers, dict(zip(instances, workers, strict=False))
        self.now = 0.0
        self.sync()

    def saw(self, *_):
        pass

    def stored(self, event, ours, block_size):
        self.directory.names.stored(event, ours, block_size)

    def sync(self):
        self.directory.workers({name: [name] for name in self.workers}, self.instances)

    def chains(self, tokens, salt=None):
        return self.hasher.chains(self.hasher.root("fleet", None, salt), array("I", tokens), [self.size])

    def ask(self, tokens, salt=None):
        """A prompt comes, its chunks are named, and all that is due is asked about."""
        chains = self.chains(tokens, salt)
        first, total = self.directory.names.known(chains)
        self.directory.touch(chains, self.now)
        self.directory.names.name(array("I", tokens), first, total, chains, salt)
        self.round()
        return self.match(tokens, salt)

    def round(self):
        while wanted := self.directory.due(self.now, 100):
            self.directory.learned(wanted, self.coordinator.lookup(self.directory.keys(wanted)), self.now)

    def match(self, tokens, salt=None):
        return self.index.match(self.chains(tokens, salt))

    def put(self, tokens, tier, *, salt="", instance="mp-0", stored=True, ranks=(0,), world_size=1):
        for name in chunks.names(tokens, self.directory.chunk):
            for rank in ranks:
                key = chunks.keys([name], MODEL, world_size, salt)[rank]
                batch = {"instance_id": instance, "tier": tier, "event_type": "store" if stored else "delete"}
                self.coordinator.report({**batch, "entries": [{"key": key}]})


PROMPT = list(range(5000, 5000 + 32 * 6 + 5))


def test_what_is_in_shared_storage_is_a_match_on_every_worker():
    scene = Scene(workers=("a:1", "b:1"), instances=("mp-a", "mp-b"))
    scene.put(PROMPT, "l2", instance="mp-a")
    found = scene.ask(PROMPT)
    assert {name: (match.l2, match.tokens) for name, match in found.items()} == {"a:1": (192, 192), "b:1": (192, 192)}


def test_storage_that_is_not_shared_is_its_workers_own():
    scene = Scene(workers=("a:1", "b:1"), instances=("mp-a", "mp-b"), shared=False)
    scene.put(PROMPT, "l2", instance="mp-a")
    assert {name: match.l2 for name, match in scene.ask(PROMPT).items()} == {"a:1": 192}


def test_a_worker_that_joins_later_reaches_the_storage_and_one_that_was_cleared_still_does():
    scene = Scene(workers=("a:1",), instances=("mp-a",))
    scene.put(PROMPT, "l2", instance="mp-a")
    scene.ask(PROMPT)
    scene.index.follow("b:1", "fleet", block_size=32)
    scene.workers = ("a:1", "b:1")
    scene.sync()
    scene.mirrors["a:1"].forget()
    assert {name: match.l2 for name, match in scene.match(PROMPT).items()} == {"a:1": 192, "b:1": 192}
    scene.index.remove("a:1")
    scene.workers = ("b:1",)
    scene.sync()
    assert set(scene.match(PROMPT)) == {"b:1"}


def test_a_workers_cpu_memory_is_known_by_its_servers_name():
    scene = Scene(workers=("a:1", "b:1"), instances=("mp-a", "mp-b"))
    scene.put(PROMPT, "l1", instance="mp-b")
    assert {name: match.l1 for name, match in scene.ask(PROMPT).items()} == {"b:1": 192}


def test_a_chunk_that_is_gone_from_the_directory_is_gone_from_the_map_when_it_is_asked_again():
    scene = Scene()
    scene.put(PROMPT, "l2")
    scene.put(PROMPT, "l1")
    scene.ask(PROMPT)
    scene.put(PROMPT, "l2", stored=False)
    scene.put(PROMPT, "l1", stored=False)
    assert scene.match(PROMPT)[WORKER].tokens == 192
    scene.now += AGAIN
    scene.round()
    assert scene.match(PROMPT) == {}


def test_a_chunk_is_held_only_where_all_devices_hold_their_part():
    scene = Scene(world_size=2)
    scene.put(PROMPT, "l2", ranks=(0,), world_size=2)
    assert scene.ask(PROMPT) == {}
    scene.put(PROMPT, "l2", ranks=(1,), world_size=2)
    scene.now += AGAIN * 2
    scene.round()
    assert scene.match(PROMPT)[WORKER].l2 == 192


def test_salts_are_kept_apart():
    scene = Scene()
    scene.put(PROMPT, "l2", salt="tenant")
    assert scene.ask(PROMPT) == {}
    assert scene.ask(PROMPT, "tenant")[WORKER].l2 == 192
    assert scene.ask(PROMPT, "other") == {}


def test_chunks_longer_than_blocks_hold_all_of_their_blocks():
    scene = Scene(block_size=16, chunk=64)
    scene.put(PROMPT, "l2")
    assert scene.ask(PROMPT)[WORKER].l2 == 192


def test_a_chunk_that_no_block_size_divides_is_left_alone():
    scene = Scene(block_size=48, chunk=64)
    scene.put(PROMPT, "l2")
    assert scene.ask(PROMPT) == {}
    assert len(scene.directory.names) == 0


def test_the_next_turn_names_only_what_is_new():
    scene = Scene()
    scene.ask(PROMPT)
    longer = PROMPT + list(range(9000, 9100))
    assert scene.directory.names.known(scene.chains(longer)) == (6, 9)
    scene.ask(longer)
    assert scene.directory.names.named == 9


def test_a_workers_event_names_what_it_has_generated_itself():
    scene = Scene()
    names = chunks.names(PROMPT, 32)
    event = ["BlockStored", names, None, PROMPT[:192], 32, None, "cpu"]
    scene.mirrors[WORKER].apply(events.decode(packed([event])), 0.0)
    assert len(scene.directory.names) == 6
    scene.put(PROMPT, "l2")
    scene.round()
    # Its events say so; one answer without l1 may be older than they are.
    assert scene.match(PROMPT)[WORKER].l1 == 192
    scene.now += AGAIN
    scene.round()
    assert (scene.match(PROMPT)[WORKER].l1, scene.match(PROMPT)[WORKER].l2) == (0, 192)
    assert scene.directory.counters.corrected == 6


def test_events_with_hashes_of_another_kind_name_nothing():
    scene = Scene()
    event = ["BlockStored", [bytes(32)], None, PROMPT[:32], 32, None, "cpu"]
    scene.mirrors[WORKER].apply(events.decode(packed([event])), 0.0)
    assert len(scene.directory.names) == 0


def test_a_chunk_is_asked_about_less_and_less_while_nothing_changes():
    scene = Scene()
    scene.ask(PROMPT[:32])
    times = []
    while scene.now < 400:
        scene.now += 1.0
        before = scene.directory.counters.asked
        scene.round()
        if scene.directory.counters.asked > before:
            times.append(scene.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == SLOWEST


def test_a_prompt_that_comes_again_asks_at_once_unless_that_was_done_lately():
    scene = Scene()
    scene.ask(PROMPT)
    scene.now = 100.0
    scene.round()
    scene.now = 101.0
    scene.ask(PROMPT)
    assert scene.directory.counters.asked == 12
    scene.now = 110.0
    scene.ask(PROMPT)
    assert scene.directory.counters.asked == 18


def test_what_a_worker_could_not_load_is_not_counted_on_for_a_while():
    scene = Scene()
    scene.put(PROMPT, "l2")
    scene.ask(PROMPT)
    scene.directory.missing(scene.chains(PROMPT), 70, scene.now)
    assert scene.match(PROMPT)[WORKER].l2 == 64
    scene.now += 2 * AGAIN
    assert scene.ask(PROMPT)[WORKER].l2 == 64
    scene.now += DOUBT + SLOWEST
    assert scene.ask(PROMPT)[WORKER].l2 == 192
    assert scene.directory.counters.doubted == 4


def test_what_a_prompt_brings_about_is_seen_soon_after_it_came():
    scene = Scene()
    scene.put(PROMPT, "l2")
    scene.ask(PROMPT)
    for _ in range(200):
        scene.now += 1.0
        scene.round()
    scene.ask(PROMPT)
    scene.put(PROMPT, "l1")  # it waited, and was fetched meanwhile
    scene.now += AGAIN
    scene.round()
    assert scene.match(PROMPT)[WORKER].l1 == 192


def test_when_the_directory_is_away_nothing_that_it_said_counts_and_it_comes_back_when_asked_again():
    scene = Scene()
    scene.put(PROMPT, "l2")
    scene.put(PROMPT, "l1")
    scene.ask(PROMPT)
    scene.directory.forget()
    assert scene.match(PROMPT) == {}
    scene.now = 10.0
    assert scene.ask(PROMPT)[WORKER].l1 == 192


def test_no_more_than_the_limit_is_remembered_and_what_is_forgotten_leaves_the_map():
    scene = Scene(limit=4)
    scene.put(PROMPT, "l2")
    scene.ask(PROMPT)
    assert len(scene.directory.names) == 4
    assert scene.directory.names.forgotten == 2
    assert scene.match(PROMPT) == {}  # its first chunks are those that are not known any more


def test_what_prompts_begin_with_stays_known_as_long_as_they_come():
    scene = Scene(limit=16)
    system = PROMPT[:64]
    scene.put(system, "l2")
    for number in range(20):
        scene.ask(system + list(range(number * 1000, number * 1000 + 32 * 4)))
        assert scene.match([*system, 1])[WORKER].l2 == 64
    assert len(scene.directory.names) == 16


def test_a_prompt_whose_beginning_was_forgotten_is_named_anew():
    scene = Scene(limit=8)
    scene.put(PROMPT, "l2")
    scene.ask(PROMPT)
    scene.ask(list(range(32 * 4)))
    assert scene.match(PROMPT) == {}
    assert scene.ask(PROMPT)[WORKER].l2 == 192


def test_a_question_without_an_answer_is_asked_again():
    scene = Scene()
    scene.put(PROMPT, "l2")
    chains = scene.chains(PROMPT)
    scene.directory.names.name(array("I", PROMPT), 0, 6, chains, None)
    wanted = scene.directory.due(0.0, 100)
    assert scene.directory.due(0.0, 100) == []
    scene.directory.again(wanted, 0.0)
    scene.now = AGAIN
    scene.round()
    assert scene.match(PROMPT)[WORKER].l2 == 192


@pytest.mark.parametrize("file", ["coordinator_with_mp_server", "coordinator_quota_eviction"])
def test_names_are_those_that_the_real_coordinator_computes(file):
    seen = 0
    for each in exchanges(file):
        if each["path"] == "/directory/lookup" and each["status"] == 200:
            request, response = each["request"], each["response"]
            keys = chunks.keys(chunks.names(request["token_ids"], 32), MODEL, 1, request.get("cache_salt"))
            assert keys == [result["key"] for result in response["results"]]
            seen += 1
    assert seen


def packed(batch):
    import msgspec

    return msgspec.msgpack.encode([1.0, batch])


# -- a real worker, a real server --------------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def run(scene, exchanges_, messages, reports):
    """Before each request what the map says, and after it what the worker said; then its events and its server's reports are applied."""
    seen = []
    for exchange in exchanges_:
        salt = exchange["cache_salt"]
        prompt = exchange["prompt_token_ids"]
        scene.now += 10.0
        match = scene.ask(prompt, salt).get(WORKER)
        chain = scene.chains(prompt, salt)[32]
        seen.append(
            (exchange["label"], min(match.tokens, chain.hittable * 32) if match else 0, exchange["cached_tokens"])
        )
        last = max(exchange["event_seqs"], default=-1)
        until = 0.0
        while messages and messages[0]["seq"] <= last:
            batch = events.decode(base64.b64decode(messages.pop(0)["payload_b64"]))
            scene.mirrors[WORKER].apply(batch, scene.now)
            until = batch.timestamp
        # The server reports within a second, the recording's next request came later than that.
        upcoming = events.decode(base64.b64decode(messages[0]["payload_b64"])).timestamp if messages else until + 60
        while reports and reports[0]["ts"] < (until + upcoming) / 2:
            scene.coordinator.report(reports.pop(0))
    return seen


@pytest.fixture
def recording():
    reports = sorted(
        (
            batch
            for call in lines(FIXTURES / "mp_server_to_coordinator.jsonl.gz")
            if call["path"] == "/events"
            for batch in call["request"]["batches"]
        ),
        key=lambda batch: batch["ts"],
    )
    return lines(RECORDED / "lmcache_exchanges.jsonl.gz"), lines(RECORDED / "lmcache_kv_events.jsonl.gz"), reports


def test_with_the_directory_every_prediction_is_what_a_real_worker_took_from_its_caches(recording):
    seen = run(Scene(), *recording)
    assert len(seen) == 16
    assert [(label, predicted) for label, predicted, _ in seen] == [(label, actual) for label, _, actual in seen]


_steps = st.lists(
    st.tuples(st.sampled_from(["l1", "l2"]), st.booleans(), st.integers(0, 2), st.sampled_from(["mp-a", "mp-b"])),
    max_size=12,
)


@given(steps=_steps)
@settings(deadline=None)
def test_after_any_reports_the_map_says_what_the_directory_says_once_it_was_asked_again(steps):
    scene = Scene(workers=("a:1", "b:1"), instances=("mp-a", "mp-b"), shared=False)
    prompts = [PROMPT, PROMPT[:96] + list(range(100)), list(range(200))]
    for prompt in prompts:
        scene.ask(prompt)
    for tier, stored, which, instance in steps:
        scene.put(prompts[which], tier, stored=stored, instance=instance)
        scene.now += SLOWEST
        scene.round()
    scene.now += 2 * SLOWEST
    scene.round()
    prefix_map = scene.index.maps[32]
    for prompt in prompts:
        for name, block in zip(chunks.names(prompt, 32), scene.chains(prompt)[32].hashes, strict=True):
            (key,) = chunks.keys([name], MODEL, 1, None)
            said = scene.coordinator.placements.get(msgkey(key), set())
            for instance, worker in scene.instances.items():
                held = prefix_map.tiers(scene.mirrors[worker].holder, block)
                assert (Tier.L1 in held) == ((instance, "l1") in said)
                pool = scene.directory._pools.get((worker, 32))
                in_pool = pool is not None and Tier.L2 in prefix_map.tiers(pool, block)
                assert in_pool == ((instance, "l2") in said)
