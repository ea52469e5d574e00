import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.registry import DRIVERS, driver_named
from backends.token_ids import token_ids

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def paths(driver, path, body):
    return [question.path for question in driver_named(driver).token_questions(path, body)]


@pytest.mark.parametrize("driver", ["vllm", "neuron"])
def test_vllm_is_asked_to_render_first_and_else_to_tokenize(driver):
    assert paths(driver, "/v1/chat/completions", CHAT) == ["/v1/chat/completions/render", "/tokenize"]
    assert paths(driver, "/v1/completions", {"prompt": "x"}) == ["/v1/completions/render", "/tokenize"]
    assert paths(driver, "/v1/messages", CHAT) == ["/v1/messages/render"]
    assert paths(driver, "/v1/responses", {"input": "x"}) == ["/v1/responses/render"]


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning_effort": "low"},
        {"documents": [{"text": "x"}]},
        {"truncate_prompt_tokens": 3},
        {"chat_template": "x"},
        {"tools": TOOLS, "tool_choice": "none"},
    ],
)
def test_tokenize_is_not_asked_about_what_it_does_not_read(more):
    assert paths("vllm", "/v1/chat/completions", CHAT | more) == ["/v1/chat/completions/render"]


def test_tokenize_gets_what_makes_the_prompt_and_nothing_else():
    more = {
        "tools": TOOLS,
        "chat_template_kwargs": {"a": 1},
        "parallel_tool_calls": True,
        "continue_final_message": None,
    }
    question = driver_named("vllm").token_questions("/v1/chat/completions", CHAT | more)[1]
    assert question.body == CHAT | {"tools": TOOLS, "chat_template_kwargs": {"a": 1}}


def test_several_texts_are_only_rendered():
    assert paths("vllm", "/v1/completions", {"prompt": ["a", "b"]}) == ["/v1/completions/render"]
    assert driver_named("vllm").token_questions("/v1/completions", {"prompt": ["a"]})[1].body == {"prompt": "a"}


def test_a_response_that_goes_on_from_an_earlier_one_is_not_asked_for():
    assert paths("vllm", "/v1/responses", {"input": "x", "previous_response_id": "r"}) == []


def test_sglang_tells_tokens_of_texts_only():
    assert paths("sglang", "/v1/completions", {"prompt": ["a", "b"]}) == ["/v1/tokenize"]
    assert paths("sglang", "/v1/completions", {"prompt": [1, 2]}) == []
    assert paths("sglang", "/v1/completions", {"prompt": "a", "add_special_tokens": False}) == []
    assert paths("sglang", "/v1/chat/completions", CHAT) == []


def test_an_openai_endpoint_is_never_asked():
    assert paths("openai", "/v1/chat/completions", CHAT) == []
    assert driver_named("openai").generation_question("/v1/chat/completions", CHAT) is None


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        ({"tokens": [1, 2], "count": 2}, [[1, 2]]),
        ({"tokens": [[1, 2], [3]], "count": [2, 1]}, [[1, 2], [3]]),
        ({"tokens": []}, [[]]),
        ({"token_ids": [4], "features": None}, [[4]]),
        ([{"token_ids": [4]}, {"token_ids": [5, 6]}], [[4], [5, 6]]),
        ({"choices": [{"index": 0}], "prompt_token_ids": [7]}, [[7]]),
        ({"choices": [{"index": 1, "prompt_token_ids": [9]}, {"index": 0, "prompt_token_ids": [8]}]}, [[8], [9]]),
        ({"token_ids": [4], "features": {"mm_hashes": {"image": ["x"]}}}, None),
        ({"choices": [{"index": 0}], "usage": {"prompt_tokens": 3}}, None),
        ({"tokens": [-1]}, None),
        ({"tokens": [2**32]}, None),
        ({"tokens": ["1"]}, None),
        ({"tokens": 5}, None),
        ({"error": {"message": "no"}}, None),
        ([], None),
        (None, None),
    ],
)
def test_answers_of_every_shape_are_understood(answer, ids):
    found = token_ids(answer)
    assert (None if found is None else [each.tolist() for each in found]) == ids


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["tokens", "token_ids", "choices", "prompt_token_ids", "index", "features"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_no_answer_makes_it_raise(value):
    for name in DRIVERS:
        found = driver_named(name).parse_tokens(value)
        assert found is None or all(each.typecode == "I" for each in found)
