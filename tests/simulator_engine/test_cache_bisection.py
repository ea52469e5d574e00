"""The cache bisects chains; that is right only as long as cached keys, and keys in use, are the beginnings of their chains."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.cache import DeviceCache

CHAINS = [
    tuple((family, *([0] * min(depth, fork)), depth) for depth in range(8)) for family in range(2) for fork in range(4)
]
"""Eight chains of eight keys: those of a family begin alike, for as many keys as their forks agree."""


def walked(cache, keys):
    held = 0
    while held < len(keys) and keys[held] in cache:
        held += 1
    return held


@given(st.integers(4, 24), st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8), st.booleans()), max_size=60))
def test_bisecting_finds_what_walking_finds(total, steps):
    cache = DeviceCache(total)
    running = []
    for chain, length, leave in steps:
        keys = CHAINS[chain][:length]
        if leave and running:
            cache.release(*running.pop(0))
        else:
            held = cache.held(keys, len(keys))
            if cache.fits(keys, held, len(keys) - held):
                cache.take(keys, held)
                cache.allocate(len(keys) - held)
                cache.store(keys, held, len(keys))
                running.append((keys, len(keys), 0))
        for each in CHAINS:
            held = cache.held(each, len(each))
            assert held == walked(cache, each)
            unused = [key for key in each[:held] if key in cache._unused]
            for blocks in range(total + 1):
                room = cache.free + len(cache._unused) - len(unused)
                assert cache.fits(each, held, blocks) == (room >= blocks)
