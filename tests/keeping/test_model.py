import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.keeping import hash_of, next_uses, oracle, pooled
from bench.keeping_model.model import FACTS, KEPT, MOST_DIRECTIVES, KeepingModel, facts_of, key_of, with_output

BLOCK = 512


def chain(name, blocks):
    return [hash_of(hash((name, index)) & 0xFFFFFFFF) for index in range(blocks)]


@given(st.integers(1, 10**6), st.integers(0, 40), st.integers(0, 15), st.integers(0, 5), st.integers(0, 15))
def test_a_key_holds_the_facts_and_an_output_changes_its_own_only(uses, length, output, share, other):
    key = key_of(uses, length, output, share)
    assert with_output(key, other) == key_of(uses, length, other, share)
    facts = facts_of(key)
    assert len(set(facts)) == 6
    assert all(0 <= fact < FACTS for fact in facts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60), st.floats(0, 200), st.integers(1, 3000)), max_size=80))
def test_directives_are_in_order_disjoint_few_and_never_longer_further_on(requests):
    model = KeepingModel(BLOCK, BLOCK * 40)
    now = 0.0
    for name, blocks, gap, output in requests:
        now += gap
        kept = model.asked(chain(name, blocks), now)
        for directives in (list(kept.directives), model.answered(kept, output, now + 1)):
            stop, ttl = 0, float("inf")
            assert len(directives) <= MOST_DIRECTIVES
            for run in directives:
                assert stop <= run.start < run.stop <= blocks
                assert run.ttl <= ttl
                assert run.priority in {KEPT, 50}
                stop, ttl = run.stop, run.ttl
        now += 1


def test_nothing_is_said_while_all_fits_into_memory():
    model = KeepingModel(BLOCK, BLOCK * 10_000)
    for turn in range(500):
        kept = model.asked(chain(turn % 100, 20), turn * 1.0)
        assert not kept.directives
        assert not model.answered(kept, 10, turn + 0.5)


def test_a_block_size_of_sixteen_is_looked_at_once_in_512_tokens():
    model = KeepingModel(16, 16 * 32 * 40)
    for turn in range(400):
        kept = model.asked(chain(turn % 60, 640), turn * 1.0)
        assert kept.marks == 20
    assert all(run.start % 32 == 0 for run in kept.directives)


def test_state_stays_within_its_bytes_whatever_comes():
    model = KeepingModel(BLOCK, BLOCK * 100, most_bytes=200_000)
    for turn in range(5000):
        model.answered(model.asked(chain(turn, 10), turn * 0.1), 5, turn * 0.1)
        assert model.bytes <= 200_000
    waiting = sum(len(notes) for notes in model._waiting)
    assert waiting <= 5000
    assert sys.getsizeof(model._lifetimes) < 200_000


def traffic(seed, requests=4000):
    """Documents that are asked about again and again, beside prompts that nobody repeats; the answers differ in length."""
    generator = random.Random(seed)
    now, found = 0.0, []
    for number in range(requests):
        now += generator.expovariate(2.0)
        if generator.random() < 0.4:
            name, output = f"document {generator.randrange(60)}", generator.randrange(4, 12)
        else:
            name, output = f"once {number}", generator.randrange(200, 800)
        found.append((now, 20 * BLOCK + 1, output, chain(name, 20)))
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_documents_are_kept_from_prompts_that_never_return_most_of_the_way_to_the_optimum(seed):
    requests = traffic(seed)
    cap = 700  # 35 of the 60 documents
    lru = pooled(requests, cap, None)
    ours = pooled(requests, cap, KeepingModel(BLOCK, BLOCK * cap))
    nexts = next_uses(requests)
    best = oracle(requests, cap, lambda index: [-use for use in nexts[index]])
    assert ours[1] > lru[1] + 0.4 * (best[1] - lru[1])


def test_where_all_are_alike_it_is_as_good_as_lru():
    generator = random.Random(3)
    requests = [(turn * 0.5, 10 * BLOCK + 1, 100, chain(generator.randrange(200), 10)) for turn in range(4000)]
    lru = pooled(requests, 800, None)
    ours = pooled(requests, 800, KeepingModel(BLOCK, BLOCK * 800))
    assert ours[0] > lru[0] - 0.01
