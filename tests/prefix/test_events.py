import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from gateway.prefix.events import HASH_MASK, Cleared, Removed, Stored, decode, tier_of
from gateway.prefix.holders import Tier
from gateway.prefix.index import PrefixIndex
from gateway.prompt.blocks import Hasher, pack

TOKENS = list(range(32))
STORED = Stored([11, 12], 10, pack(TOKENS), 16, Tier.DEVICE)
MAP = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": TOKENS,
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
ARRAY = ["BlockStored", [11, 12], 10, TOKENS, 16]


def one(event, **batch):
    decoded = decode(msgpack.encode([1.5, [event], 3]))
    assert decoded.problems == batch.get("problems", {})
    assert decoded.timestamp == 1.5
    assert decoded.rank == 3
    return decoded.events[0] if decoded.events else None


def test_the_map_form_of_vllm_is_understood():
    assert one(MAP) == Stored([11, 12], 10, pack(TOKENS), 16, Tier.DEVICE, group=0, kind="full_attention")
    assert one({"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}) == Removed([1], Tier.L1)
    assert one({"type": "AllBlocksCleared"}) == Cleared()


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ([], STORED),
        ([None], STORED),
        ([7], Stored(*ARRAY[1:3], pack(TOKENS), 16, Tier.DEVICE, lora="#7")),
        ([None, "GPU"], STORED),
        ([None, "cpu"], Stored(*ARRAY[1:3], pack(TOKENS), 16, Tier.L1)),
        ([7, "GPU", "adapter"], Stored(*ARRAY[1:3], pack(TOKENS), 16, Tier.DEVICE, lora="adapter")),
        (
            [None, "GPU", None, [["salt"], None]],
            Stored(*ARRAY[1:3], pack(TOKENS), 16, Tier.DEVICE, extra_keys=[["salt"], None]),
        ),
        ([None, "GPU", None, None, 2], Stored(*ARRAY[1:3], pack(TOKENS), 16, Tier.DEVICE, group=2)),
        (
            [None, "GPU", None, None, 2, "mamba", 128, "LOCAL", "and", "more"],
            Stored(*ARRAY[1:3], pack(TOKENS), 16, Tier.DEVICE, group=2, kind="mamba"),
        ),
    ],
    ids=["0.9", "lora-id-none", "lora-id", "medium", "cpu", "lora-name", "extra-keys", "group", "kind-and-future"],
)
def test_every_array_layout_in_vllms_history_is_understood(tail, expected):
    assert one([*ARRAY, *tail]) == expected


def test_removals_in_array_form_may_lack_their_medium():
    assert one(["BlockRemoved", [1, 2]]) == Removed([1, 2], Tier.DEVICE)
    assert one(["BlockRemoved", [1], "CPU_PINNED", 4]) == Removed([1], Tier.L1, 4)
    assert one(["AllBlocksCleared"]) == Cleared()


@pytest.mark.parametrize(
    "batch",
    [
        [1.5, [ARRAY]],
        [1.5, [ARRAY], None],
        [1.5, [ARRAY], 0, "from the future"],
        {"ts": 1.5, "events": [ARRAY], "data_parallel_rank": 0},
    ],
)
def test_a_batch_may_be_an_array_of_two_or_more_or_a_map(batch):
    assert decode(msgpack.encode(batch)).events == [STORED]


def test_hashes_may_be_signed_unsigned_or_bytes():
    last = 0xF123456789ABCDEF
    known = last & HASH_MASK
    for spelling in (last, last - 2**64, b"x" * 24 + last.to_bytes(8, "big"), last.to_bytes(8, "big")):
        event = one(["BlockStored", [spelling], spelling, TOKENS[:16], 16])
        assert event.hashes == [known]
        assert event.parent == known
        assert one(["BlockRemoved", [spelling]]).hashes == [known]


def test_a_placeholder_with_hashes_only_is_understood():
    event = {
        **MAP,
        "token_ids": [],
        "block_size": 0,
        "parent_block_hash": None,
        "medium": "STORAGE",
        "extra_keys": None,
    }
    assert one(event) == Stored([11, 12], None, b"", 0, Tier.L2, group=0, kind="full_attention")


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("gpu", Tier.DEVICE),
        ("CPU", Tier.L1),
        ("cpu", Tier.L1),
        ("CPU_PINNED", Tier.L1),
        ("lmcache-l1", Tier.L1),
        ("lmcache-l2-fs", Tier.L2),
        ("LMCache-L2-redis", Tier.L2),
        ("STORAGE", Tier.L2),
        ("DISK", Tier.L2),
        ("EXTERNAL", Tier.L2),
        ("FS", Tier.L2),
        ("OBJ", Tier.L2),
        ("punched cards", None),
        (7, None),
    ],
)
def test_mediums_become_tiers(medium, tier):
    assert tier_of(medium) == tier


def test_what_another_host_holds_is_l2():
    assert tier_of("CPU", "REMOTE") == Tier.L2
    assert tier_of("CPU", "LOCAL") == Tier.L1


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (["BlockMoved", [1]], "unknown_event"),
        ({"type": "BlockMoved"}, "unknown_event"),
        ({}, "unknown_event"),
        ([], "bad_event"),
        ("BlockStored", "bad_event"),
        (None, "bad_event"),
        ([["BlockStored"]], "unknown_event"),
        (["BlockRemoved", [1], "punched cards"], "unknown_medium"),
        (["BlockStored", 5, None, TOKENS, 16], "bad_event"),
        (["BlockStored", [1.5], None, TOKENS, 16], "bad_event"),
        (["BlockStored", [b""], None, TOKENS, 16], "bad_event"),
        (["BlockStored", [1, b"x"], None, TOKENS, 16], "bad_event"),
        (["BlockStored", [1], None, [[1, 2]] * 16, 16], "bad_event"),
        (["BlockStored", [1], None, [-1] * 16, 16], "bad_event"),
        (["BlockStored", [1], None, "tokens", 16], "bad_event"),
        (["BlockStored", [1], None, TOKENS, -16], "bad_event"),
        (["BlockStored", [1], None, TOKENS, 1 << 40], "bad_event"),
        (["BlockStored", [1], "parent", TOKENS, 16], "bad_event"),
        (["BlockStored"], "bad_event"),
        ([*ARRAY, None, "GPU", None, [[[["deep"]]]]], "bad_event"),
        ([*ARRAY, None, "GPU", None, [[{"a": "map"}]]], "bad_event"),
    ],
)
def test_an_event_that_makes_no_sense_is_counted_and_its_neighbours_are_taken(event, problem):
    batch = decode(msgpack.encode([0.0, [ARRAY, event, ["AllBlocksCleared"]]]))
    assert batch.events == [STORED, Cleared()]
    assert batch.problems == {problem: 1}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xd6\xff\0\0\0\0",
        b"\x81\x81\x01\x02\x03",
        b"\xd9\x01\xff",
        msgpack.encode(5),
        msgpack.encode([]),
        msgpack.encode([1.0]),
        msgpack.encode([1.0, 2]),
        msgpack.encode({"events": None}),
        msgpack.encode({1: 2}),
    ],
)
def test_garbage_is_one_counted_problem(payload):
    batch = decode(payload)
    assert batch.events == []
    assert batch.problems == {"garbage": 1}


def test_a_batch_that_is_too_large_is_not_even_read(monkeypatch):
    monkeypatch.setattr("gateway.prefix.events.MAX_PAYLOAD", 10)
    assert decode(b"\x00" * 11).problems == {"too_large": 1}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoder_raise(payload):
    decode(payload)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(sorted(MAP)), inner, max_size=5),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]), st.lists(VALUES, max_size=14), st.booleans()
)
def test_no_fields_make_the_decoder_raise(tag, fields, as_map):
    event = dict(zip(MAP, [tag, *fields], strict=False)) if as_map else [tag, *fields]
    decode(msgpack.encode([0.0, [event], None]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["BlockStored", "BlockRemoved"]), st.lists(VALUES, max_size=12)), max_size=4))
def test_nothing_that_the_decoder_lets_through_makes_a_mirror_raise(items):
    index = PrefixIndex(Hasher(1))
    mirror = index.follow("w", "m")
    good = [*ARRAY[:2], None, *ARRAY[3:]]
    strange = [[tag, *fields] for tag, fields in items]
    # Each strange event also as a copy of a good one with the strange fields in the places that come late in it.
    half_good = [[*good, *fields] for _, fields in items]
    mirror.apply(decode(msgpack.encode([0.0, [*strange, good, *half_good]])), 0.0)
    chains = index.hasher.chains(index.hasher.root("m"), [*TOKENS, 0], [16])
    assert index.match(chains).keys() <= {"w"}
    assert mirror.counters.stored >= 2 or mirror.block_size != 16


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_no_flipped_byte_makes_the_decoder_raise(place, value):
    payload = bytearray(msgpack.encode([1.5, [MAP, [*ARRAY, None, "GPU"], ["BlockRemoved", [b"x" * 32], "CPU"]], 0]))
    payload[place % len(payload)] = value
    decode(bytes(payload))
