import gc
import random
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prefix.holders import Tier
from gateway.prefix.map import BLOCK_BYTES, PrefixMap
from policies.base import NO_MATCH, Match


def chain(start, count=64):
    return list(range(start * 1000, start * 1000 + count))


@pytest.fixture
def prefix_map():
    return PrefixMap(16)


def test_nothing_is_held_of_an_unknown_or_empty_prompt(prefix_map):
    holder = prefix_map.join("w")
    assert prefix_map.match([]).held() == {}
    assert prefix_map.match(chain(1)).held() == {}
    prefix_map.store(holder, chain(1))
    assert prefix_map.match(chain(1), 0).held() == {}
    assert prefix_map.match(chain(1)).of(holder) == Match(device=64 * 16, source="event")


def test_a_match_begins_at_the_first_block(prefix_map):
    holder = prefix_map.join("w")
    prefix_map.store(holder, chain(1)[1:])
    assert prefix_map.match(chain(1)).of(holder) == NO_MATCH


def test_each_worker_of_a_thousand_has_its_own_length_and_tier(prefix_map):
    prompt = chain(1, 512)
    holders = [prefix_map.join(f"w{number}") for number in range(1200)]
    rng = random.Random(5)
    for holder in holders:
        device = rng.randrange(1, 200)
        prefix_map.store(holder, prompt[:device])
        prefix_map.store(holder, prompt[:300], Tier.L1) if rng.random() < 0.3 else None
        prefix_map.store(holder, prompt[300:400], Tier.L2)
    held = prefix_map.match(prompt).held()
    assert len(held) == 1200
    lengths = {(match.device, match.l1, match.l2) for match in held.values()}
    assert all(device + l1 in (device, 300 * 16) and l2 == (1600 if l1 else 0) for device, l1, l2 in lengths)
    assert len(lengths) > 200


def test_a_shared_l2_counts_for_every_member_behind_its_own_device_blocks(prefix_map):
    members = [prefix_map.join("a"), prefix_map.join("b")]
    stranger = prefix_map.join("c")
    pool = prefix_map.join_pool("files", members)
    prompt = chain(1)
    prefix_map.store(pool, prompt, Tier.L2)
    prefix_map.store(members[0], prompt[:10])
    prefix_map.store(stranger, prompt[:3])
    assert prefix_map.match(prompt).held() == {
        "a": Match(device=160, l2=54 * 16, source="event"),
        "b": Match(l2=64 * 16, source="event"),
        "c": Match(device=48, source="event"),
    }


def test_what_was_sent_a_moment_ago_is_expected_then_confirmed_by_the_event(prefix_map):
    holder = prefix_map.join("w")
    prompt = chain(1, 10)
    prefix_map.store(holder, prompt[:4])
    expectation = prefix_map.expect(holder, prompt[4:])
    assert prefix_map.match(prompt).of(holder) == Match(device=160, source="expected")
    prefix_map.store(holder, prompt[4:])
    assert prefix_map.match(prompt).of(holder) == Match(device=160, source="event")
    expectation.settle(now=10.0)
    prefix_map.expire(now=13.0)
    assert prefix_map.match(prompt).of(holder) == Match(device=160, source="event")


def test_what_is_not_confirmed_within_two_seconds_after_the_first_byte_is_forgotten(prefix_map):
    holder = prefix_map.join("w")
    expectation = prefix_map.expect(holder, chain(1))
    prefix_map.expire(now=9.0)  # its request waits for its prefill, however long
    assert prefix_map.match(chain(1)).of(holder).tokens == 64 * 16
    expectation.settle(now=10.0)
    prefix_map.expire(now=11.9)
    assert prefix_map.match(chain(1)).of(holder).tokens == 64 * 16
    prefix_map.expire(now=12.0)
    assert prefix_map.match(chain(1)).of(holder) == NO_MATCH
    assert len(prefix_map) == 0
    assert prefix_map.counters.expired == 64


def test_what_was_expected_of_a_worker_that_was_cleared_since_settles_nothing(prefix_map):
    holder = prefix_map.join("w")
    expectation = prefix_map.expect(holder, chain(1))
    prefix_map.clear(holder)
    prefix_map.expect(holder, chain(1))
    expectation.settle(now=10.0)
    prefix_map.expire(now=20.0)
    assert prefix_map.match(chain(1)).of(holder).tokens == 64 * 16


def test_what_a_sibling_is_expected_to_bring_as_well_outlives_the_first_ones_time(prefix_map):
    holder = prefix_map.join("w")
    prefix_map.expect(holder, chain(1)).settle(now=10.0)
    sibling = prefix_map.expect(holder, chain(1))
    prefix_map.expire(now=20.0)
    assert prefix_map.match(chain(1)).of(holder).tokens == 64 * 16
    sibling.settle(now=20.0)
    prefix_map.expire(now=22.0)
    assert prefix_map.match(chain(1)).of(holder) == NO_MATCH


def test_clearing_a_worker_costs_the_same_however_much_it_holds(prefix_map):
    small, large = prefix_map.join("small"), prefix_map.join("large")
    prefix_map.store(small, chain(1))
    for start in range(2, 200):
        prefix_map.store(large, chain(start, 500))

    def steps(holder):
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += 1
            return trace

        sys.settrace(trace)
        try:
            prefix_map.clear(holder)
        finally:
            sys.settrace(None)
        return count

    assert steps(large) <= steps(small) + 5
    assert prefix_map.match(chain(2, 500)).held() == {}


def test_a_slot_is_used_again_only_after_every_trace_of_its_last_holder_was_swept(prefix_map):
    first = prefix_map.join("first")
    other = prefix_map.join("other")
    prefix_map.store(first, chain(1))
    prefix_map.store(other, chain(1)[:10])
    prefix_map.leave(first)
    slots = set()
    for number in range(20):
        late = prefix_map.join(f"late{number}")
        slots.add(late.slot)
        assert prefix_map.match(chain(1)).of(late) == NO_MATCH
        prefix_map.sweep(7)
    assert 0 in slots
    assert len(prefix_map) == 10
    assert prefix_map.match(chain(1)).held() == {"other": Match(device=160, source="event")}


@settings(deadline=None)
@given(st.sets(st.integers(0, 40)), st.integers(1, 41))
def test_with_gaps_on_the_device_a_match_reaches_at_least_the_gap_and_at_most_the_last_held_block(held, count):
    prefix_map = PrefixMap(1)
    holder, bystander = prefix_map.join("w"), prefix_map.join("b")
    prompt = list(range(count))
    present = [block for block in prompt if block in held]
    prefix_map.store(holder, present)
    prefix_map.store(bystander, prompt[: count // 2])
    run = next((block for block in prompt if block not in held), count)
    tokens = prefix_map.match(prompt).of(holder).tokens
    assert run <= tokens <= (present[-1] + 1 if 0 in held else 0)
    assert prefix_map.match(prompt).of(bystander).tokens == count // 2
    # What an over-estimate leads to: the worker computes the gap and says so. Each gap is paid for at most once.
    gaps = sum(block not in held for block in prompt)
    for _ in range(gaps + 1):
        tokens = prefix_map.match(prompt).of(holder).tokens
        prefix_map.store(holder, prompt[:tokens])
    held |= set(prompt[:tokens])
    assert tokens == next((block for block in prompt if block not in held), count) or 0 not in held


@settings(deadline=None)
@given(st.data())
def test_the_budget_is_never_exceeded(data):
    budget = data.draw(st.integers(40_000, 400_000))
    prefix_map = PrefixMap(16, budget=budget)
    holders = [prefix_map.join(f"w{number}") for number in range(data.draw(st.integers(1, 40)))]
    rng = random.Random(data.draw(st.integers(0, 1000)))
    now = 0.0
    for _ in range(60):
        now += 0.1
        blocks = chain(rng.randrange(40), rng.randrange(1, 300))
        holder = rng.choice(holders)
        action = rng.random()
        if action < 0.6:
            prefix_map.store(holder, blocks, rng.choice([Tier.DEVICE, Tier.L1, Tier.L2]))
        elif action < 0.7:
            prefix_map.store(holder, blocks, Tier.L2, expires=now + rng.random() * 100)
        elif action < 0.8:
            prefix_map.expect(holder, blocks).settle(now)
        elif action < 0.95:
            prefix_map.remove(holder, blocks)
        else:
            prefix_map.clear(holder)
            prefix_map.sweep(50)
        prefix_map.touch(blocks, len(blocks))
        assert prefix_map.bytes <= budget


def test_under_pressure_what_was_touched_stays_and_the_oldest_goes(prefix_map):
    prefix_map = PrefixMap(16, budget=BLOCK_BYTES * 4000)
    holder = prefix_map.join("w")
    hot = chain(1, 100)
    prefix_map.store(holder, hot)
    cold = chain(2, 100)
    prefix_map.store(holder, cold)
    for start in range(3, 60):
        prefix_map.store(holder, chain(start, 100))
        prefix_map.touch(hot, 100)
    assert prefix_map.match(hot).of(holder).device == 1600
    assert prefix_map.match(cold).of(holder) == NO_MATCH
    assert prefix_map.counters.evicted > 2000


def test_the_memory_that_is_counted_is_no_less_than_the_memory_that_is_taken():
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        prefix_map = PrefixMap(16)
        holders = [prefix_map.join(f"w{number}") for number in range(64)]
        rng = random.Random(3)
        for _ in range(300):
            blocks = [rng.getrandbits(56) for _ in range(50)]
            for holder in rng.sample(holders, 3):
                prefix_map.store(holder, blocks)
        prefix_map._forget_transitions()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert prefix_map.sets >= 250
    assert taken <= prefix_map.bytes + 64 * 3000  # the holders themselves are not counted


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([1, 3, 8, 40]), st.sampled_from([1, 2, 5, 17, 64]), st.booleans())
def test_every_workers_runs_are_found_where_devices_hold_prefixes_and_slow_tiers_anything(seed, workers, length, slow):
    rng = random.Random(seed)
    prefix_map = PrefixMap(1)
    held = {prefix_map.join(f"w{number}"): (set(), set(), set()) for number in range(workers)}
    prompts = [[rng.getrandbits(40) for _ in range(length)]]
    for _ in range(4):
        shared = rng.choice(prompts)[: rng.randrange(length + 1)]
        prompts.append([*shared, *(rng.getrandbits(40) for _ in range(length - len(shared)))])
    for holder, tiers in held.items():
        for _ in range(rng.randrange(4)):
            part = rng.choice(prompts)[: rng.randrange(length + 1)]
            prefix_map.store(holder, part)
            tiers[0].update(part)
        for tier in (1, 2):
            if slow and rng.random() < 0.4:
                start = rng.randrange(length)
                part = rng.choice(prompts)[start : start + rng.randrange(1, length + 1)]
                prefix_map.store(holder, part, Tier(tier))
                tiers[tier].update(part)
    for prompt in prompts:
        matches = prefix_map.match(prompt)
        for holder, (device, l1, l2) in held.items():
            d, e, f = (
                next((depth for depth, block in enumerate(prompt) if block not in blocks), length)
                for blocks in (device, device | l1, device | l1 | l2)
            )
            match = matches.of(holder)
            assert (match.device, match.l1, match.l2) == (d, e - d, f - e)


def test_a_run_is_not_cut_short_where_a_set_seen_before_comes_again(prefix_map):
    """Found by the model test: a holder set met on the way up was taken for the one at the upper end."""
    first, second, third = (prefix_map.join(name) for name in ("first", "second", "third"))
    trunk, branch, twig = chain(1, 12), chain(2, 12), chain(3, 12)
    prompt = [*trunk[:5], *branch[5:8], *twig[8:]]
    prefix_map.store(first, [*branch[6:]], Tier.L1)
    prefix_map.store(first, prompt[:10])
    prefix_map.store(second, trunk[:1], Tier.L1)
    prefix_map.store(second, prompt[:11])
    prefix_map.store(first, trunk[:8], Tier.L2)
    prefix_map.store(third, trunk[:3])
    prefix_map.store(first, prompt[4:], Tier.L2)
    assert prefix_map.match(prompt).held() == {
        "first": Match(device=160, l2=32, source="event"),
        "second": Match(device=176, source="event"),
        "third": Match(device=48, source="event"),
    }
