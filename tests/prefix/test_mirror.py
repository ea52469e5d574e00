import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prefix.events import Batch, Cleared, Removed, Stored
from gateway.prefix.holders import Tier
from gateway.prefix.index import PrefixIndex
from gateway.prefix.orphans import Orphans
from gateway.prompt.blocks import Hasher, pack
from policies.base import Match

SIZE = 16
PROMPT = list(range(1000, 1000 + SIZE * 8))


def engine_hash(tokens, salt=""):
    """Any function that differs from ours will do for the worker's own hashes."""
    return hash((tuple(tokens), salt)) & (1 << 60) - 1


def engine_hashes(tokens, size=SIZE, salt=""):
    return [engine_hash(tokens[:end], salt) for end in range(size, len(tokens) + 1, size)]


def stored(tokens=PROMPT, start=0, end=None, tier=Tier.DEVICE, size=SIZE, salt="", **fields):
    """The event for blocks `start` to `end` of a prompt."""
    hashes = engine_hashes(tokens, size, salt)
    end = len(hashes) if end is None else end
    parent = hashes[start - 1] if start else None
    return Stored(hashes[start:end], parent, pack(tokens[start * size : end * size]), size, tier, **fields)


def removed(tokens=PROMPT, start=0, end=None, tier=Tier.DEVICE, size=SIZE, salt="", **fields):
    return Removed(engine_hashes(tokens, size, salt)[start:end], tier, **fields)


@pytest.fixture
def follow(index):
    """Makes a mirror; `say` applies events and `held` gives what the map then says of the prompt."""

    class Following:
        def __init__(self, **options):
            self.mirror = index.follow("w", "m", **options)

        def say(self, *events, now=0.0):
            self.mirror.apply(Batch(list(events)), now)
            return self

        def held(self, tokens=PROMPT, lora=None, salt=None):
            root = index.hasher.root("m", lora, salt)
            # One token more, so that the last full block may be counted.
            match = index.match(index.hasher.chains(root, [*tokens, 0], index.block_sizes)).get("w", Match())
            return match.device // SIZE, match.l1 // SIZE, match.l2 // SIZE

    return Following


def test_what_is_stored_is_held_and_what_is_removed_is_not(follow):
    worker = follow().say(stored())
    assert worker.held() == (8, 0, 0)
    assert worker.say(removed(start=5)).held() == (5, 0, 0)
    assert worker.say(stored(start=5, end=6)).held() == (6, 0, 0)
    assert worker.mirror.blocks(Tier.DEVICE) == 6


def test_removals_of_unknown_blocks_are_counted_and_ignored(follow):
    worker = follow().say(removed(), stored(end=2), Removed([1, 2, 3], Tier.L1))
    assert worker.held() == (2, 0, 0)
    assert worker.mirror.counters.removed_unknown == 11


def test_a_block_that_the_engine_has_twice_is_gone_after_its_second_removal(follow):
    worker = follow().say(stored(), stored(), removed(start=4))
    assert worker.held() == (8, 0, 0)
    assert worker.say(removed(start=4)).held() == (4, 0, 0)


def test_without_counting_copies_one_removal_is_enough(follow):
    worker = follow(count_copies=False).say(stored(), stored(), removed(start=4))
    assert worker.held() == (4, 0, 0)


def test_the_same_block_on_the_device_and_in_l1_may_have_one_hash_or_two(follow):
    worker = follow().say(stored(), stored(tier=Tier.L1), removed(start=3))
    assert worker.held() == (3, 5, 0)
    assert worker.say(removed(start=6, tier=Tier.L1)).held() == (3, 3, 0)
    worker = follow().say(stored(), stored(tier=Tier.L1, salt="another hash"), removed(start=3))
    assert worker.held() == (3, 5, 0)
    assert worker.say(removed(start=6, tier=Tier.L1, salt="another hash")).held() == (3, 3, 0)


def test_a_block_may_be_stored_behind_one_that_was_removed_already(follow):
    worker = follow().say(stored(tier=Tier.L1, end=4), removed(tier=Tier.L1, start=3, end=4))
    worker.say(stored(tier=Tier.L1, start=4), stored(tier=Tier.L1, start=3, end=4))
    assert worker.held() == (0, 8, 0)
    assert worker.mirror.orphans == 0


def test_orphans_are_placed_when_their_parent_comes_in_whatever_order(follow):
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        worker = follow()
        for piece in order:
            worker.say(stored(start=piece * 2, end=piece * 2 + 2))
        assert worker.held() == (8, 0, 0)
        assert worker.mirror.orphans == 0


def test_an_orphan_that_was_removed_in_the_meantime_is_not_held_afterwards(follow):
    worker = follow(block_size=SIZE).say(stored(start=4), removed(start=6), stored(end=4))
    assert worker.held() == (6, 0, 0)


def test_orphans_are_bounded_and_the_oldest_are_given_up():
    orphans = Orphans(max_blocks=10)
    assert [orphans.add(stored(start=start, end=start + 3)) for start in (1, 2, 3, 4)] == [0, 0, 0, 3]
    assert orphans.blocks == 9
    assert orphans.adopt(engine_hashes(PROMPT)[:1]) == []
    assert len(orphans.adopt(engine_hashes(PROMPT))) == 3
    assert orphans.blocks == 0
    assert Orphans(max_blocks=2).add(stored(start=1)) == 7


def test_salt_and_adapter_keep_prompts_apart_as_the_worker_does(follow):
    worker = follow().say(
        stored(salt="a", extra_keys=[["tenant"]] + [None] * 7),
        stored(salt="b", end=5, lora="sql", extra_keys=[["sql"]] * 5),
        stored(salt="c", end=2, lora="sql", extra_keys=[["sql", "tenant"], ["sql"]]),
    )
    assert worker.held() == (0, 0, 0)
    assert worker.held(salt="tenant") == (8, 0, 0)
    assert worker.held(lora="sql") == (5, 0, 0)
    assert worker.held(lora="sql", salt="tenant") == (2, 0, 0)
    assert worker.say(removed(salt="a", start=1)).held(salt="tenant") == (1, 0, 0)


def test_blocks_with_an_image_match_up_to_the_image_only(follow):
    worker = follow().say(stored(extra_keys=[None, None, [["image", 4]], *[None] * 5]))
    assert worker.held() == (2, 0, 0)


def test_a_tier_with_chunks_of_several_blocks_is_matched_block_by_block(follow):
    worker = follow().say(stored(end=1), stored(tier=Tier.L1, size=SIZE * 4))
    assert worker.held() == (1, 7, 0)
    assert worker.say(removed(tier=Tier.L1, size=SIZE * 4, start=1)).held() == (1, 3, 0)


def test_the_block_size_is_learned_from_the_device_even_when_a_slower_tier_speaks_first(follow):
    worker = follow().say(stored(tier=Tier.L1, size=SIZE * 4), stored(end=3))
    assert worker.mirror.block_size == SIZE
    assert worker.held() == (3, 0, 0)


def test_blocks_of_another_size_or_group_or_with_tokens_that_do_not_fit_are_counted_and_left_out(follow):
    worker = follow().say(stored(end=2, group=0, kind="full_attention"))
    worker.say(
        stored(size=SIZE // 2),
        stored(group=1, kind="sliding_window"),
        stored(group=2, kind="full_attention"),
        removed(group=2),
        Stored(engine_hashes(PROMPT), None, pack(PROMPT[:-1]), SIZE, Tier.DEVICE),
        Stored([], None, b"", 0, Tier.DEVICE),
    )
    assert worker.held() == (2, 0, 0)
    counters = worker.mirror.counters
    assert (counters.other_block_size, counters.other_group, counters.misaligned) == (16, 24, 8)


def test_hash_only_events_are_understood_for_blocks_that_are_known(follow):
    hashes = engine_hashes(PROMPT)
    worker = follow().say(stored(end=4), Stored(hashes, None, b"", 0, Tier.L2), removed(start=1))
    assert worker.held() == (1, 0, 3)
    assert worker.mirror.counters.unresolved == 4


def test_a_reset_of_the_engines_cache_empties_the_device_and_nothing_else(follow):
    worker = follow().say(stored(), stored(tier=Tier.L1, end=5), Cleared())
    assert worker.held() == (0, 5, 0)
    assert worker.say(stored(end=2)).held() == (2, 3, 0)
    assert follow().say(stored(), Cleared()).held() == (0, 0, 0)


def test_a_tier_without_removals_is_forgotten_after_its_time(follow, index):
    worker = follow(ttl={Tier.L1: 60.0}).say(stored(end=2), stored(tier=Tier.L1), now=10.0)
    assert worker.held() == (2, 6, 0)
    index.tick(now=69.0)
    assert worker.held() == (2, 6, 0)
    index.tick(now=70.0)
    assert worker.held() == (2, 0, 0)


def test_a_restart_forgets_everything_and_the_same_hashes_may_then_mean_other_blocks(follow):
    worker = follow().say(stored())
    worker.mirror.forget()
    assert worker.held() == (0, 0, 0)
    other = [*range(500, 500 + SIZE)]
    worker.say(Stored(engine_hashes(PROMPT)[:1], None, pack(other), SIZE, Tier.DEVICE))
    assert worker.held(other) == (1, 0, 0)
    assert worker.held() == (0, 0, 0)


def test_a_worker_that_claims_too_much_loses_its_oldest_blocks(follow):
    worker = follow(max_blocks=64)
    for number in range(40):
        worker.say(stored(list(range(number * 5000, number * 5000 + SIZE * 4))))
    assert worker.mirror.blocks(Tier.DEVICE) <= 64
    assert worker.held(list(range(SIZE * 4))) == (0, 0, 0)
    assert worker.held(list(range(39 * 5000, 39 * 5000 + SIZE * 4))) == (4, 0, 0)
    assert worker.mirror.counters.overflowed >= 96


def test_what_is_written_through_to_a_pool_counts_for_the_other_members_until_its_time(index):
    first, second = (
        index.follow(name, "m", pool="files", write_through=True, ttl={Tier.L2: 60.0}, block_size=SIZE) for name in "ab"
    )
    first.apply(Batch([stored(tier=Tier.L1)]), 0.0)
    chains = index.hasher.chains(index.hasher.root("m"), [*PROMPT, 0], [SIZE])
    assert index.match(chains) == {"a": Match(l1=128, source="event"), "b": Match(l2=128, source="event")}
    first.forget()
    assert index.match(chains)["a"] == index.match(chains)["b"] == Match(l2=128, source="event")
    index.tick(now=60.0)
    assert index.match(chains) == {}
    second.leave()


def test_write_through_needs_a_time_limit(index):
    with pytest.raises(ValueError, match="ttl"):
        index.follow("w", "m", write_through=True)


def test_two_workers_with_hashes_and_block_sizes_of_their_own_are_asked_at_once(index):
    index.follow("a", "m").apply(Batch([stored()]), 0.0)
    index.follow("b", "m").apply(Batch([stored(size=32, salt="b", end=3)]), 0.0)
    index.imagine("c", SIZE)
    chains = index.hasher.chains(index.hasher.root("m"), [*PROMPT, 0], index.block_sizes)
    index.sent("c", chains)
    assert index.match(chains) == {
        "a": Match(device=128, source="event"),
        "b": Match(device=96, source="event"),
        "c": Match(device=128, source="history"),
    }
    for name in "abc":
        index.remove(name)
    index.remove("unknown")
    assert index.match(chains) == {}


def test_a_burst_of_siblings_sees_where_the_first_one_went(index):
    worker = index.follow("w", "m", block_size=SIZE)
    chains = index.hasher.chains(index.hasher.root("m"), [*PROMPT, 0], [SIZE])
    expectation = index.sent("w", chains)
    assert index.match(chains) == {"w": Match(device=128, source="expected")}
    worker.apply(Batch([stored(end=3)]), 5.5)
    expectation.settle(5.5)
    index.tick(now=8.0)
    assert index.match(chains) == {"w": Match(device=48, source="event")}


class Engine:
    """A worker's block cache as vLLM runs it: a prefix is stored from its beginning and evicted from its end."""

    def __init__(self, rng, seed):
        self.rng = rng
        self.seed = seed
        self.cached = {}  # engine hash -> tokens up to and including the block

    def serve(self, tokens):
        hashes = engine_hashes(tokens, salt=self.seed)
        new = [number for number, each in enumerate(hashes) if each not in self.cached]
        if not new:
            return []
        self.cached.update({each: tokens[: (number + 1) * SIZE] for number, each in enumerate(hashes)})
        return [stored(tokens, new[0], salt=self.seed)]

    def evict(self, count):
        events = []
        for _ in range(min(count, len(self.cached))):
            leaf = self.rng.choice(
                [
                    h
                    for h, t in self.cached.items()
                    if not any(len(o) > len(t) and o[: len(t)] == t for o in self.cached.values())
                ]
            )
            del self.cached[leaf]
            events.append(Removed([leaf], Tier.DEVICE))
        return events

    def held(self, tokens):
        return next(
            (n for n, each in enumerate(engine_hashes(tokens, salt=self.seed)) if each not in self.cached),
            len(tokens) // SIZE,
        )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_random_engines_are_followed_exactly(seed):
    rng = random.Random(seed)
    index = PrefixIndex(Hasher(seed % 2**32))
    engines = {name: Engine(rng, name) for name in "abc"}
    mirrors = {name: index.follow(name, "m") for name in engines}
    stems = [[rng.randrange(50_000) for _ in range(SIZE * 3)] for _ in range(2)]
    prompts = [[*rng.choice(stems), *(rng.randrange(50_000) for _ in range(SIZE * rng.randrange(5)))] for _ in range(8)]
    for _ in range(30):
        name = rng.choice("abc")
        engine = engines[name]
        events = engine.serve(rng.choice(prompts)) if rng.random() < 0.7 else engine.evict(rng.randrange(1, 5))
        mirrors[name].apply(Batch(events), 0.0)
        prompt = rng.choice(prompts)
        held = index.match(index.hasher.chains(index.hasher.root("m"), [*prompt, 0], index.block_sizes))
        assert {name: match.device // SIZE for name, match in held.items()} == {
            name: engine.held(prompt) for name, engine in engines.items() if engine.held(prompt)
        }
