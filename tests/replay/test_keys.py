"""Content ids become block hashes that agree exactly as far as the tokens do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.blocks import Hasher
from simulator.fleet.keys import KeyMaker
from simulator.workloads.workload import WorkRequest

SIZES = st.sampled_from([(512, 512), (512, 16), (512, 32), (512, 256), (64, 512), (64, 128), (96, 32), (100, 100)])


def request(name, tokens, ids, output=1, **fields):
    fields.setdefault("session", name)
    return WorkRequest(id=name, time=0.0, prompt_tokens=tokens, output_tokens=output, blocks=ids, **fields)


@st.composite
def pairs(draw):
    """Two prompts that begin with the same ids, and how many of their tokens are the same."""
    run, size = draw(SIZES)
    shared = draw(st.integers(0, 12))
    prompts = []
    for start in (1_000, 2_000):
        own = draw(st.integers(0, 12))
        count = max(1, shared + own)
        tokens = (count - 1) * run + draw(st.integers(1, run))
        prompts.append((tokens, [*range(shared), *range(start, start + own)][:count] or [start]))
    common = 0
    for left, right in zip(prompts[0][1], prompts[1][1], strict=False):
        if left != right:
            break
        common += run
    return run, size, prompts, min(common, prompts[0][0], prompts[1][0])


@given(pairs(), st.booleans())
def test_keys_are_equal_as_far_as_the_tokens_are_and_no_further(pair, same_session):
    run, size, prompts, common = pair
    maker = KeyMaker(Hasher(0), run_tokens=run, block_size=size)
    one, two = (
        maker.keys(request(f"r{index}", tokens, ids, session="s" if same_session else f"s{index}"))
        for index, (tokens, ids) in enumerate(prompts)
    )
    equal = [left == right for left, right in zip(one.chain.hashes, two.chain.hashes, strict=False)]
    assert equal[: common // size] == [True] * (common // size)
    assert not any(equal[common // size :])


@given(pairs())
def test_a_sessions_history_does_not_change_its_keys(pair):
    run, size, prompts, _ = pair
    (before, ids_before), (tokens, ids) = prompts
    maker = KeyMaker(Hasher(0), run_tokens=run, block_size=size)
    maker.keys(request("r0", before, ids_before, session="s"))
    fresh = KeyMaker(Hasher(0), run_tokens=run, block_size=size)
    assert maker.keys(request("r1", tokens, ids, session="s")).chain == fresh.keys(request("r1", tokens, ids)).chain


@given(pairs(), st.integers(1, 2000))
def test_there_is_a_key_for_every_full_block_and_none_twice(pair, output):
    run, size, prompts, _ = pair
    maker = KeyMaker(Hasher(0), run_tokens=run, block_size=size)
    keys = maker.keys(request("r", prompts[0][0], prompts[0][1], output))
    assert len(keys.blocks) == (prompts[0][0] + output) // size
    assert len(set(keys.blocks)) == len(keys.blocks)
    assert keys.chain.hashes == keys.blocks[: prompts[0][0] // size]
    assert keys.known == len(keys.chain.hashes)


@given(pairs(), st.integers(1, 2000))
def test_answers_of_unknown_content_are_like_no_other(pair, output):
    run, size, prompts, _ = pair
    maker = KeyMaker(Hasher(0), run_tokens=run, block_size=size)
    first = maker.keys(request("a", prompts[0][0], prompts[0][1], output))
    second = maker.keys(request("b", prompts[0][0], prompts[0][1], output))
    assert first.chain == second.chain
    assert not set(first.blocks[first.known :]) & set(second.blocks[second.known :])


@pytest.mark.parametrize(("run", "size"), [(64, 64), (64, 16), (64, 128)])
def test_the_next_turns_prompt_contains_the_answer_where_its_content_is_known(run, size):
    maker = KeyMaker(Hasher(0), run_tokens=run, block_size=size)
    turn = maker.keys(request("a", 200, [1, 2, 3, 4], 184, output_blocks=[5, 6, 7], session="s"))
    following = maker.keys(request("b", 448, [1, 2, 3, 5, 6, 7, 8], session="s"))
    assert turn.blocks == following.chain.hashes[: 384 // size]
    assert turn.known == 384 // size


def test_models_share_nothing():
    maker = KeyMaker(Hasher(0), run_tokens=64, block_size=64)
    one = maker.keys(request("a", 640, range(10), model="m"))
    two = maker.keys(request("b", 640, range(10), model="n"))
    assert not set(one.blocks) & set(two.blocks)


def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"48 tokens neither divide .* 512 tokens"):
        KeyMaker(Hasher(0), run_tokens=512, block_size=48)
