import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.prompt.prompt import How
from gateway.prompt.prompter import Prompter, PromptLimits

SLOW_START = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

PIECES = st.sampled_from(
    ["hello", " world", "\n\n", "  ", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "\n</think>\n\n", "東京", "e\u0301", "'s", "12",
     "<tool_call>", "</tool_response>", "<tool_response>", "👩\u200d👧", "\x1c", "<|", "\r\n", "\t"]
)  # fmt: skip
TEXT = st.lists(PIECES | st.text(max_size=5), max_size=6).map("".join)
CALL = st.builds(
    lambda text: {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}, TEXT
)
MESSAGE = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "assistant", "system", "tool"]),
        TEXT,
    ),
    st.builds(
        lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls},
        TEXT,
        st.lists(CALL, max_size=2),
    ),
    st.builds(lambda text, thought: {"role": "assistant", "content": text, "reasoning_content": thought}, TEXT, TEXT),
)
CONVERSATION = st.lists(MESSAGE, min_size=1, max_size=8)


def whole(tokenizer, prompter, body):
    """The ids of the rendered text in one go, by the library alone."""
    (text,) = prompter.texts("/v1/chat/completions", body)
    return tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@SLOW_START
@given(CONVERSATION)
def test_each_turn_of_a_growing_conversation_has_the_ids_of_the_whole_text(qwen3, messages):
    prompter = Prompter(qwen3)
    for end in range(1, len(messages) + 1):
        body = {"messages": messages[:end]}
        prompt = prompter.now("/v1/chat/completions", body)
        assert prompt.how is How.EXACT
        assert prompt.ids.tolist() == whole(qwen3, prompter, body)
        assert prompt.boundaries[-1] == prompt.token_count == len(prompt.ids)


@SLOW_START
@given(st.lists(CONVERSATION, min_size=2, max_size=4), st.integers(1000, 8000))
def test_a_cache_that_forgets_changes_no_ids(qwen3, conversations, budget):
    prompter = Prompter(qwen3, limits=PromptLimits(cache=budget))
    for messages in [*conversations, *conversations]:
        body = {"messages": messages}
        assert prompter.now("/v1/chat/completions", body).ids.tolist() == whole(qwen3, prompter, body)
        assert prompter.stats["bytes"] <= budget


def test_a_new_turn_is_all_that_is_encoded_and_old_segments_are_the_same_objects(qwen3):
    prompter = Prompter(qwen3)
    messages = [{"role": "system", "content": "rules " * 300}, {"role": "user", "content": "question " * 200}]
    first = prompter.now("/v1/chat/completions", {"messages": messages})
    messages += [{"role": "assistant", "content": "answer"}, {"role": "user", "content": "one more thing"}]
    second = prompter.now("/v1/chat/completions", {"messages": messages})
    assert first.new_tokens > 500
    assert second.new_tokens < 15
    assert second.token_count > first.token_count
    # All but the generation prompt at the end of the first one.
    assert second.segments[: len(first.segments) - 1] == first.segments[:-1]
    assert [segment.serial for segment in second.segments[:4]] == [segment.serial for segment in first.segments[:4]]
    again = prompter.now("/v1/chat/completions", {"messages": messages})
    assert again.new_tokens == 0
    assert again.segments == second.segments
