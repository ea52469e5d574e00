"""What is claimed is kept by its worth: against a plain model that looks at every block each time, and through the engine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import Engine, FirstToken, Removed, Retention
from simulator.engine.cache import DeviceCache

CHAINS = [
    tuple((family, *([0] * min(depth, fork)), depth) for depth in range(8)) for family in range(2) for fork in range(4)
]
"""Eight chains of eight keys: those of a family begin alike, for as many keys as their forks agree."""


class Plain:
    """The rules themselves: of the unused blocks that nothing continues, the least worth goes, among equals the longest unused."""

    def __init__(self, total):
        self.total, self.users, self.parents, self.claims, self.left, self.clock = total, {}, {}, {}, {}, 0

    def worth(self, key, now):
        priority, until = self.claims.get(key, (50, float("inf")))
        return priority if now < until else 50

    def candidates(self):
        parents = set(self.parents.values())
        return [key for key, users in self.users.items() if not users and key not in parents]

    def evict(self, now):
        key = min(self.candidates(), key=lambda each: (self.worth(each, now), self.left[each]))
        del self.users[key]
        self.claims.pop(key, None)
        return key, self.parents.pop(key)

    def store(self, keys, held, now):
        evicted = []
        for key in keys[:held]:
            self.users[key] += 1
        while self.total - len(self.users) < len(keys) - held:
            evicted.append(self.evict(now))
        for index in range(held, len(keys)):
            self.users[keys[index]] = 1
            self.parents[keys[index]] = keys[index - 1] if index else None
        return evicted

    def release(self, keys):
        for key in reversed(keys):
            self.users[key] -= 1
            if not self.users[key]:
                self.clock += 1
                self.left[key] = self.clock

    def claim(self, keys, start, stop, priority, until):
        for key in keys[start:stop]:
            if key in self.users:
                self.claims[key] = (priority, until)


uses = st.tuples(st.just("use"), st.integers(0, 7), st.integers(1, 8), st.integers(0, 3))
leaves = st.tuples(st.just("leave"), st.integers(0, 5), st.just(0), st.just(0))
lifetimes = st.one_of(st.just(float("inf")), st.integers(0, 8))
claims = st.tuples(
    st.just("claim"), st.integers(0, 7), st.integers(0, 8), st.integers(0, 8), st.integers(0, 100), lifetimes
)


@settings(max_examples=400, deadline=None)
@given(st.integers(6, 24), st.lists(st.one_of(uses, leaves, claims), max_size=80))
def test_the_least_worth_goes_first_then_the_least_recently_used_and_no_parent_before_its_child(total, steps):
    cache, plain = DeviceCache(total), Plain(total)
    running = []
    for now, (kind, first, second, *rest) in enumerate(steps):
        if kind == "leave":
            if running:
                keys = running.pop(first % len(running))
                cache.release(keys, len(keys), 0)
                plain.release(keys)
        elif kind == "claim":
            keys, (stop, priority, lifetime) = CHAINS[first], rest
            cache.claim(keys, second, stop, priority, now + lifetime)
            plain.claim(keys, second, stop, priority, now + lifetime)
        else:
            keys = CHAINS[first][:second]
            held = cache.held(keys, len(keys))
            if not cache.fits(keys, held, len(keys) - held):
                continue
            cache.take(keys, held)
            evicted = cache.allocate(len(keys) - held, now)
            cache.store(keys, held, len(keys))
            assert evicted == plain.store(keys, held, now)
            running.append(keys)
        assert cache.keys == set(plain.users)
        assert all(parent is None or parent in cache for parent in plain.parents.values())


@settings(max_examples=200, deadline=None)
@given(st.integers(6, 24), st.lists(st.one_of(uses, leaves), max_size=80), st.integers(0, 79))
def test_blocks_that_are_all_worth_the_same_leave_in_the_order_of_plain_lru(total, steps, begin):
    plain, equal = DeviceCache(total), DeviceCache(total)
    running = []
    for now, (kind, first, second, _) in enumerate(steps):
        if now == begin:
            for chain in CHAINS:
                equal.claim(chain, 0, 8, 50, float("inf"))
        if kind == "leave":
            if running:
                keys = running.pop(first % len(running))
                plain.release(keys, len(keys), 0)
                equal.release(keys, len(keys), 0)
            continue
        keys = CHAINS[first][:second]
        held = plain.held(keys, len(keys))
        if plain.fits(keys, held, len(keys) - held):
            for cache in (plain, equal):
                cache.take(keys, held)
            assert plain.allocate(len(keys) - held, now) == equal.allocate(len(keys) - held, now)
            for cache in (plain, equal):
                cache.store(keys, held, len(keys))
            running.append(keys)


@settings(max_examples=200, deadline=None)
@given(st.integers(6, 24), st.lists(st.one_of(uses, claims), max_size=60), st.integers(1, 24), st.integers(0, 100))
def test_room_is_made_only_out_of_what_is_worth_no_more(total, steps, blocks, priority):
    cache, plain = DeviceCache(total), Plain(total)
    for now, (kind, first, second, *rest) in enumerate(steps):
        keys = CHAINS[first]
        if kind == "claim":
            cache.claim(keys, second, rest[0], rest[1], now + rest[2])
            plain.claim(keys, second, rest[0], rest[1], now + rest[2])
            continue
        keys = keys[:second]
        held = cache.held(keys, len(keys))
        if cache.fits(keys, held, len(keys) - held):
            cache.take(keys, held)
            cache.allocate(len(keys) - held, now)
            cache.store(keys, held, len(keys))
            plain.store(keys, held, now)
            cache.release(keys, len(keys), 0)
            plain.release(keys)
    now = len(steps)
    wanted = []
    while total - len(plain.users) < blocks and any(plain.worth(key, now) <= priority for key in plain.candidates()):
        wanted.append(plain.evict(now))
    made, evicted = cache.spare(blocks, priority, now)
    assert evicted == wanted
    assert made == min(blocks, total - len(plain.users))
    assert cache.free == total - len(plain.users) - made


def test_a_request_that_is_worth_more_outlives_later_ones(gpu, ask, only):
    profile = gpu(kv_blocks=8)
    engine = Engine(profile)
    kept = ask(profile, "kept", 49, retention=(Retention(0, 2, 90, 1000.0), Retention(2, 9, 10, 1000.0)))
    engine.submit(kept, 0.0)
    for index in range(1, 5):
        engine.submit(ask(profile, f"other {index}", 65), index * 10.0)
    engine.submit(ask(profile, "again", 49, after=kept, shared=3), 60.0)
    outputs = engine.advance(100.0)
    removed = [key for event in only(outputs, Removed) for key in event.keys]
    assert removed[0] == ("kept", 2)
    assert only(outputs, FirstToken, "again")[0].cached_device == 32


def test_a_claim_that_has_lapsed_keeps_nothing(gpu, ask, only):
    profile = gpu(kv_blocks=8)
    engine = Engine(profile)
    kept = ask(profile, "kept", 49, retention=(Retention(0, 3, 90, 25.0),))
    engine.submit(kept, 0.0)
    for index in range(1, 5):
        engine.submit(ask(profile, f"other {index}", 65), index * 10.0)
    removed = [(event.time, key) for event in only(engine.advance(100.0), Removed) for key in event.keys]
    assert [time for time, key in removed if key[0] == "kept"] == [30.0] * 3


def test_what_is_demoted_goes_before_what_was_used_longer_ago(gpu, ask, only):
    profile = gpu(kv_blocks=8)
    engine = Engine(profile)
    old, over = ask(profile, "old", 49), ask(profile, "over", 49)
    engine.submit(old, 0.0)
    engine.submit(over, 10.0)
    engine.advance(19.0)
    assert engine.demote(over.blocks, 1, 9, 19.0) == 2
    engine.submit(ask(profile, "new", 64), 20.0)
    removed = [key for event in only(engine.advance(100.0), Removed) for key in event.keys]
    assert removed == [("over", 2), ("over", 1)]


def test_a_later_word_replaces_an_earlier_one(gpu, ask, only):
    profile = gpu(kv_blocks=8)
    engine = Engine(profile)
    first, second = ask(profile, "first", 49), ask(profile, "second", 49)
    engine.submit(first, 0.0)
    engine.submit(second, 10.0)
    assert engine.demote(second.blocks, 0, 3, 20.0) == 3
    assert engine.retain(second.blocks, 0, 3, 80, 1000.0, 21.0) == 3
    engine.submit(ask(profile, "new", 64), 30.0)
    removed = [key for event in only(engine.advance(100.0), Removed) for key in event.keys]
    assert removed == [("first", 2), ("first", 1)]


def test_words_about_blocks_that_are_not_there_change_nothing(gpu, ask):
    profile = gpu(kv_blocks=8)
    engine = Engine(profile)
    assert engine.retain(ask(profile, "never", 64).blocks, 0, 4, 100, 1000.0, 1.0) == 0
    assert engine.memory.device.priority(("never", 0), 1.0) == 50


@pytest.mark.parametrize(("said", "counts"), [(-5, 0), (0, 0), (100, 100), (1000, 100)])
def test_priorities_are_brought_into_their_range(gpu, ask, said, counts):
    profile = gpu()
    engine = Engine(profile)
    request = ask(profile, "a", 64, retention=(Retention(0, 1, said),))
    engine.submit(request, 0.0)
    engine.advance(10.0)
    assert engine.memory.device.priority(("a", 0), 10.0) == counts
