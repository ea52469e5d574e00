from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix.hot import HALF_LIFE, HotPrefixes
from policies.base import NO_MATCH, Match


@dataclass
class Chain:
    hashes: list[int]


def chains(*hashes, size=16):
    return {size: Chain(list(hashes))}


def test_a_prefix_is_the_part_of_the_prompt_that_was_held():
    hot = HotPrefixes()
    hot.saw("m", chains(1, 2, 3), Match(device=32, source="event"), 1.0)
    hot.saw("m", chains(1, 2, 9, 8), Match(device=16, l1=16, source="event"), 2.0)
    (prefix,) = hot.hottest(10, 2.0)
    assert (prefix.block_hash, prefix.tokens, prefix.hits, prefix.saved, prefix.first, prefix.last) == (
        2,
        32,
        2,
        64,
        1.0,
        2.0,
    )


def test_a_prompt_of_which_nothing_was_held_has_none():
    hot = HotPrefixes()
    hot.saw("m", chains(1, 2), NO_MATCH, 1.0)
    hot.saw("m", {}, Match(device=32), 1.0)
    hot.saw("m", chains(1), Match(device=64), 1.0)
    assert len(hot) == 0


def test_what_nobody_asks_for_any_more_cools_down():
    hot = HotPrefixes()
    for _ in range(3):
        hot.saw("m", chains(1), Match(device=16), 0.0)
    hot.saw("m", chains(2), Match(device=16), 2 * HALF_LIFE)
    assert [prefix.block_hash for prefix in hot.hottest(2, 2 * HALF_LIFE)] == [2, 1]


@given(st.lists(st.integers(1, 40), max_size=400))
def test_memory_is_bounded_and_what_comes_all_the_time_stays(others):
    hot = HotPrefixes(kept=4)
    for number, other in enumerate(others):
        hot.saw("m", chains(0), Match(device=16), float(number))
        hot.saw("m", chains(1000 + other), Match(device=16), float(number))
        assert len(hot) <= 16
    if others:
        (first, *_) = hot.hottest(1, float(len(others)))
        assert first.hits <= len(others) or first.block_hash != 0
        assert any(
            prefix.block_hash == 0 and prefix.hits == len(others) for prefix in hot.hottest(16, float(len(others)))
        )
