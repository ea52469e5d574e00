import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.server.hashing import BlockHasher, cbor_head, extra_keys, wire_hash

HASHER = BlockHasher(4, 1000)
IDS = st.lists(st.integers(0, 999), max_size=40)


def test_hashes_are_those_of_a_real_vllm(fixtures):
    hasher = BlockHasher(32, 152_000)
    for line in (fixtures / "kv_blocks.jsonl").read_text().splitlines():
        exchange = json.loads(line)
        chain = [wire_hash(digest) for digest in hasher.chain(exchange["ids"], salt=exchange["cache_salt"])]
        for event in exchange["stored"]:
            start = chain.index(event["block_hashes"][0])
            assert chain[start : start + len(event["block_hashes"])] == event["block_hashes"]
            assert event["parent_block_hash"] == (chain[start - 1] if start else None)
            keys = [
                extra_keys(None, exchange["cache_salt"], first=start + at == 0)
                for at in range(len(event["block_hashes"]))
            ]
            assert event["extra_keys"] == keys


@given(IDS, IDS)
def test_equal_beginnings_have_equal_chains_and_nothing_else_has(left, right):
    first, second = HASHER.chain(left), HASHER.chain(right)
    for index in range(min(len(first), len(second))):
        assert (first[index] == second[index]) == (left[: (index + 1) * 4] == right[: (index + 1) * 4])


def test_salt_and_adapter_each_make_a_chain_of_their_own():
    ids = list(range(8))
    chains = [HASHER.chain(ids, salt=salt, lora=lora) for salt in (None, "a", "b") for lora in (None, "a", "b")]
    assert len({digest for chain in chains for digest in chain}) == 2 * len(chains)


def test_only_full_blocks_are_hashed():
    assert [len(HASHER.chain(list(range(count)))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("value", "encoded"),
    # RFC 8949, appendix A
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1_000_000, "1a000f4240"),
        (10**12, "1b000000e8d4a51000"),
    ],
)
def test_integers_are_encoded_in_their_shortest_form(value, encoded):
    assert cbor_head(0, value).hex() == encoded
