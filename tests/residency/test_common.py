"""What prompts of one kind have in common."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.residency import common as common_module
from gateway.residency import heat as heat_module
from gateway.residency.common import Commons, same
from gateway.residency.heat import Heat


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_the_shared_part_of_two_chains_is_found_by_halving(shared, one, other):
    first = [*range(shared), *range(1000, 1000 + one)]
    second = [*range(shared), *range(2000, 2000 + other)]
    assert same(first, second) == same(second, first) == shared
    assert same(first, first) == len(first)


def test_turns_of_one_conversation_are_not_compared(subject_of):
    commons = Commons(10, subjects=True)
    one, other = object(), object()
    assert commons.saw("k", subject_of(1, 50, common=20), one).tokens == 0
    assert commons.saw("k", subject_of(1, 60, common=20), one).tokens == 0
    assert commons.saw("k", subject_of(2, 60, common=20), other).tokens == 20 * 16
    assert commons.saw("other", subject_of(2, 60, common=20), other).tokens == 0
    assert commons.saw("k", subject_of(2, 0), other) is None
    assert commons.get("k").subject.tokens == 60 * 16 + 3


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60), st.integers(1, 5), st.integers(1, 60))
def test_kinds_and_their_hashes_are_bounded(subject_of, prompts, most, blocks):
    kept, common_module.MOST_BYTES = common_module.MOST_BYTES, 40 * blocks
    try:
        commons = Commons(most, subjects=False)
        for kind, length in prompts:
            commons.saw(str(kind), subject_of(kind, length), object())
            known = [each for number in range(10) if (each := commons.get(str(number))) is not None]
            assert commons.blocks == sum(len(each.hashes) for each in known)
            assert len(known) == len(commons) <= most
            assert commons.blocks <= blocks or len(commons) == 1
            assert all(each.subject is None for each in known)
    finally:
        common_module.MOST_BYTES = kept


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60)), max_size=120))
def test_prompts_that_are_kept_for_hot_prefixes_are_bounded_in_bytes(subject_of, history):
    heat = Heat(kept=4, most_bytes=40_000)
    for now, (conversation, blocks) in enumerate(history):
        heat.saw(subject_of(conversation, 60), blocks * 16, float(now))
        heat.settle(float(now), up=0.1, down=0.01, replicas=2, sessions=2, most=4)
        kept = [each.subject for each in heat._seen.values() if each.subject is not None]
        assert heat.bytes == sum(map(heat_module.weight, kept)) <= 40_000
        assert all(each.subject is not None for each in heat.cared)
