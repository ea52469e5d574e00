import json
import sys

from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.approximate import BYTES_PER_TOKEN, pseudo_tokens
from gateway.prompt.lru import ENTRY_OVERHEAD, ByteLru
from gateway.prompt.prompt import How, approximate

LIMIT = 1 << 20
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=30)}),
    min_size=1,
    max_size=6,
)


def common(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(MESSAGES, st.integers(1, 5))
def test_a_growing_conversation_keeps_the_pseudo_tokens_it_had(messages, end):
    before = pseudo_tokens({"messages": messages[:end]}, LIMIT)
    after = pseudo_tokens({"messages": messages}, LIMIT)
    assert common(before, after) >= len(before) - 1, "all but one that was filled up"
    size = len(json.dumps(messages[:end], ensure_ascii=False).encode())
    assert len(before) <= size // BYTES_PER_TOKEN + end + 1


@given(MESSAGES, MESSAGES)
def test_different_conversations_are_different(left, right):
    same = pseudo_tokens({"messages": left}, LIMIT) == pseudo_tokens({"messages": right}, LIMIT)
    assert same == (left == right)


def test_marks_that_clients_move_between_turns_do_not_count():
    def body(marked):
        parts = [{"type": "text", "text": "a", **({"cache_control": {"type": "ephemeral"}} if marked else {})}]
        return {"messages": [{"role": "user", "content": parts}]}

    assert pseudo_tokens(body(True), LIMIT) == pseudo_tokens(body(False), LIMIT)


def test_an_image_counts_by_its_digest():
    def body(data):
        return {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + data}}]}]
        }

    assert len(pseudo_tokens(body("A" * 10**6), LIMIT)) < 60
    assert pseudo_tokens(body("A" * 10**6), LIMIT) != pseudo_tokens(body("B" * 10**6), LIMIT)


def test_the_bytes_that_count_are_bounded():
    assert len(pseudo_tokens({"prompt": "x" * 10**6}, 1000)) == 250


def test_tools_and_system_come_first():
    first = pseudo_tokens({"system": "s" * 40, "messages": []}, LIMIT)
    assert (
        common(first, pseudo_tokens({"messages": [{"role": "user", "content": "q"}], "system": "s" * 40}, LIMIT)) == 10
    )


def test_a_body_without_any_text_has_no_prompt():
    assert approximate(pseudo_tokens({}, LIMIT), "why").how is How.NONE


def test_nesting_without_end_ends():
    deep = "x"
    for _ in range(5000):
        deep = [deep]
    assert len(pseudo_tokens({"messages": [deep]}, LIMIT)) > 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 500)), max_size=60), st.integers(500, 4000))
def test_a_byte_lru_keeps_the_latest_that_fit(steps, budget):
    lru = ByteLru(budget)
    model = {}
    for key, size in steps:
        lru.put(key, size, size)
        cost = size + ENTRY_OVERHEAD + sys.getsizeof(key)
        if cost <= budget:
            model.pop(key, None)
            model[key] = (size, cost)
        while sum(cost for _, cost in model.values()) > budget:
            model.pop(next(iter(model)))
        assert lru.bytes == sum(cost for _, cost in model.values()) <= budget
        assert len(lru) == len(model)
        for known in list(model):
            assert lru.get(known) == model[known][0]
    lru.clear()
    assert (lru.bytes, len(lru)) == (0, 0)
