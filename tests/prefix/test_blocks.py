import itertools
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt.blocks import ChainState, Hasher, pack, worker_salt

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
HASHER = Hasher(seed=1)
ROOT = HASHER.root("m")


@settings(deadline=None)
@given(TOKENS, st.integers(1, 40), st.lists(st.integers(0, 200), max_size=8))
def test_a_chain_made_in_pieces_is_the_chain_of_the_whole_wherever_it_is_cut(tokens, block_size, cuts):
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    state, hashes = ChainState(block_size, ROOT), []
    for start, end in itertools.pairwise(bounds):
        more, state = HASHER.extend(state, tokens[start:end])
        hashes += more
    assert hashes == HASHER.chain(ROOT, tokens, block_size).hashes
    assert state.tail == pack(tokens)[len(hashes) * block_size * 4 :]
    assert state.parent == (hashes[-1] if hashes else ROOT)


@settings(deadline=None)
@given(TOKENS, st.integers(1, 40))
def test_ids_may_come_as_list_array_or_bytes(tokens, block_size):
    chain = HASHER.chain(ROOT, tokens, block_size)
    assert chain == HASHER.chain(ROOT, array("I", tokens), block_size) == HASHER.chain(ROOT, pack(tokens), block_size)
    assert len(chain.hashes) == len(tokens) // block_size
    assert chain.tokens == len(tokens)
    assert all(0 <= each < 2**56 for each in chain.hashes)


@settings(deadline=None)
@given(TOKENS.filter(bool), st.integers(1, 8), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it_and_none_before(tokens, block_size, data):
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[place] ^= 1
    before, after = (HASHER.chain(ROOT, each, block_size).hashes for each in (tokens, changed))
    same = place // block_size
    assert before[:same] == after[:same]
    assert all(a != b for a, b in zip(before[same:], after[same:], strict=True))


def test_several_block_sizes_of_one_prompt_are_each_the_chain_of_that_size():
    tokens = list(range(100))
    chains = HASHER.chains(ROOT, tokens, [1, 16, 32])
    assert {size: chain.hashes for size, chain in chains.items()} == {
        size: HASHER.chain(ROOT, tokens, size).hashes for size in (1, 16, 32)
    }


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (31, 0), (32, 0), (33, 1), (64, 1), (65, 2)], ids=str)
def test_the_block_with_a_prompts_last_token_is_never_hittable(tokens, blocks):
    assert HASHER.chain(ROOT, [7] * tokens, 32).hittable == blocks


def test_model_adapter_and_salt_each_make_another_root():
    roots = [
        HASHER.root(*each)
        for each in [
            ("m",),
            ("n",),
            ("m", "a"),
            ("m", None, "a"),
            ("m", "a", "a"),
            ("m", ""),
            ("m", None, ""),
            ("ma",),
            ("m", "aa"),
        ]
    ]
    assert len(set(roots)) == len(roots)


def test_another_seed_makes_other_hashes():
    assert Hasher(2).root("m") != ROOT


def test_a_branch_is_another_parent():
    assert len({ROOT, HASHER.branch(ROOT, b"x"), HASHER.branch(ROOT, b"y")}) == 3


@settings(deadline=None)
@given(st.text(), st.text(), st.text(min_size=1), st.text(min_size=1))
def test_two_tenants_never_get_the_same_salt(salt_1, salt_2, tenant_1, tenant_2):
    same = worker_salt(tenant_1, salt_1) == worker_salt(tenant_2, salt_2)
    assert same == ((tenant_1, salt_1) == (tenant_2, salt_2))


def test_without_a_tenant_the_clients_salt_goes_through_unchanged():
    assert worker_salt(None, "s") == "s"
    assert worker_salt(None, None) is None
    assert worker_salt("", "") is None


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], [None], [[1, 2]], ["1"]])
def test_ids_that_are_none_are_refused(bad):
    with pytest.raises((OverflowError, TypeError)):
        pack(bad)


def test_bytes_that_are_no_whole_number_of_ids_are_refused():
    with pytest.raises(ValueError, match="four bytes"):
        pack(b"12345")
