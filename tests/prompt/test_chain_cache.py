"""Chains made from remembered states equal the ones made from the start."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import chain_cache
from gateway.prompt.blocks import Hasher
from gateway.prompt.chain_cache import ChainCache
from gateway.prompt.prompt import exact
from gateway.prompt.segments import Segment

HASHER = Hasher(7)


def segment(*ids):
    return Segment(array("I", ids))


@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=40), min_size=1, max_size=12),
    st.lists(st.integers(0, 11), min_size=1, max_size=30),
    st.sampled_from([1, 4, 16, 32]),
)
def test_any_conversation_of_shared_segments_has_the_chain_of_its_tokens(pieces, picks, block_size):
    cache = ChainCache(HASHER)
    segments = [segment(*piece) for piece in pieces]
    root = HASHER.root("m")
    conversation = []
    for pick in picks:
        conversation.append(segments[pick % len(segments)])
        prompt = exact(conversation)
        made = cache._chain(prompt.segments, prompt.token_count, root, block_size)
        assert made == HASHER.chain(root, prompt.ids, block_size)


def test_a_further_turn_hashes_only_its_own_segments():
    cache = ChainCache(HASHER)
    turns = [segment(*range(i, i + 3000)) for i in range(4)]
    root = HASHER.root("m")
    cache.chains(exact(turns[:3]), root, [32])
    before = cache.misses
    cache.chains(exact(turns), root, [32])
    assert cache.misses - before == 1
    assert cache.hits == 3


def test_namespaces_and_block_sizes_do_not_share_states():
    cache = ChainCache(HASHER)
    turns = [segment(*range(3000))]
    first = cache.chains(exact(turns), HASHER.root("m"), [16, 32])
    other = cache.chains(exact(turns), HASHER.root("m", salt="s"), [16, 32])
    assert first[16] != other[16]
    assert first[32].hashes == HASHER.chain(HASHER.root("m"), turns[0].ids, 32).hashes


def test_memory_is_bounded_and_what_was_forgotten_is_made_again():
    cache = ChainCache(HASHER, max_bytes=100_000)
    root = HASHER.root("m")
    for start in range(100):
        prompt = exact([segment(*range(start, start + chain_cache.SHORT))])
        assert cache.chains(prompt, root, [16])[16] == HASHER.chain(root, prompt.ids, 16)
        assert cache.bytes <= 100_000
    assert cache.resets
