import pytest

from gateway.prompt.chat import JsonMemory, RendererOptions, UnrenderableError, read_chat
from gateway.prompt.completion import read_completion
from gateway.prompt.conversation import conversation

USER = {"role": "user", "content": "q"}


def request(options=None, **body):
    return read_chat({"messages": [USER], **body}, JsonMemory(), options or RendererOptions())


def seen(*messages, parts=False, developer=False):
    memory = JsonMemory()
    chat = read_chat({"messages": list(messages)}, memory, RendererOptions())
    return conversation(chat, "openai" if parts else "string", knows_developer=developer, memory=memory)


def test_only_fields_that_templates_may_see_are_left():
    message = {"role": "user", "content": "q", "name": "bob", "extra": 1, "reasoning": "x", "tool_calls": [1]}
    assert seen(message) == [{"role": "user", "content": "q", "name": "bob"}]


def test_text_parts_are_joined_by_line_feeds_and_empty_ones_left_out():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    assert seen({"role": "user", "content": parts})[0]["content"] == "a\nb"


def test_a_template_that_wants_parts_gets_parts_with_what_the_client_added():
    parts = [
        {"text": "a", "cache_control": {"type": "ephemeral"}, "type": "text"},
        {"type": "refusal", "refusal": "no"},
    ]
    assert seen({"role": "assistant", "content": parts}, parts=True)[0]["content"] == [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "no"},
    ]
    assert seen(USER, parts=True)[0]["content"] == [{"type": "text", "text": "q"}]


def test_a_tool_message_of_texts_is_a_string_in_any_format():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "tool", "content": parts, "tool_call_id": "1"}
    for wanted in (False, True):
        assert seen(message, parts=wanted) == [{"role": "tool", "content": "a\nb", "tool_call_id": "1"}]


def call(arguments, **more):
    return {"type": "function", "index": 0, "id": "1", "function": {"name": "f", "arguments": arguments}, **more}


def test_arguments_of_tool_calls_are_parsed_and_fields_ordered_as_pydantic_orders_them():
    (message,) = seen({"role": "assistant", "tool_calls": [call('{"b": 1, "a": [2]}')]})
    (tool_call,) = message["tool_calls"]
    assert tool_call == {
        "id": "1",
        "function": {"arguments": {"b": 1, "a": [2]}, "name": "f"},
        "type": "function",
        "index": 0,
    }
    assert list(tool_call) == ["id", "function", "type", "index"]
    assert list(tool_call["function"]) == ["arguments", "name"]
    assert message["content"] == ""


@pytest.mark.parametrize("arguments", ["", "{}", "not json", "[1]", "42", "null", "[" * 100_000])
def test_arguments_that_are_no_object_are_an_empty_one(arguments):
    (message,) = seen({"role": "assistant", "content": "", "tool_calls": [call(arguments)]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_empty_tool_calls_are_none():
    for calls in ([], None):
        assert seen({"role": "assistant", "content": "a", "tool_calls": calls}) == [
            {"role": "assistant", "content": "a"}
        ]


def test_reasoning_is_seen_by_both_names():
    for name in ("reasoning", "reasoning_content"):
        (message,) = seen({"role": "assistant", "content": "a", name: "r"})
        assert (message["reasoning"], message["reasoning_content"]) == ("r", "r")


def test_developer_messages_become_one_system_message_where_the_template_does_not_know_them():
    messages = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}]
    assert seen(*messages) == [{"role": "system", "content": "a\n\nb"}, USER]
    assert seen({"role": "developer", "content": "b"}, USER) == [{"role": "system", "content": "b"}, USER]
    assert seen({"role": "developer", "content": "b"}, developer=True) == [
        {"role": "developer", "content": "b", "tools": None}
    ]


def test_system_messages_alone_are_not_merged():
    systems = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    assert seen(*systems) == systems


def test_the_billing_header_of_claude_code_is_dropped():
    header = "x-anthropic-billing-header: cch=1"
    assert seen({"role": "system", "content": f"{header}\nrules"})[0]["content"] == "rules"
    assert (
        seen({"role": "system", "content": [{"type": "text", "text": header}, {"type": "text", "text": "b"}]})[0][
            "content"
        ]
        == "b"
    )
    assert seen({"role": "user", "content": header})[0]["content"] == header


@pytest.mark.parametrize(
    "message",
    [
        "text",
        None,
        {},
        {"role": 5, "content": "x"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "tool", "content": [{"type": "tool_reference", "name": "x"}]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": ["x"]},
        {"role": "assistant", "tool_calls": [{"type": "custom", "id": "1", "custom": {}}]},
        {"role": "assistant", "tool_calls": [call({"a": 1})]},
        {"role": "assistant", "tool_calls": [{**call("{}"), "id": None}]},
        {"role": "developer", "content": "x", "tools": [{}]},
        {"role": "user", "content": "x", "name": 5},
    ],
)
def test_what_is_no_text_or_will_be_refused_cannot_be_rendered(message):
    with pytest.raises(UnrenderableError):
        seen(message)


def test_tools_have_the_order_of_pydantics_models():
    tool = {
        "zz": 1,
        "function": {"parameters": {"b": 1, "a": 2}, "strict": True, "name": "f", "zz": 1},
        "type": "function",
        "defer_loading": False,
    }
    (dumped,) = request(tools=[tool]).tools
    assert dumped == {
        "type": "function",
        "function": {
            "name": "f",
            "description": None,
            "parameters": {"b": 1, "a": 2},
            "strict": True,
            "defer_loading": False,
        },
        "defer_loading": False,
    }
    assert list(dumped) == ["type", "function", "defer_loading"]
    assert list(dumped["function"]) == ["name", "description", "parameters", "strict", "defer_loading"]
    assert request(tools=[{"function": {"name": "f"}}]).tools == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    ]


@pytest.mark.parametrize(
    "tools",
    [
        [],
        {},
        "x",
        [1],
        [{}],
        [{"function": {}}],
        [{"type": "web", "function": {"name": "f"}}],
        [{"function": {"name": "f", "strict": 1}}],
    ],
)
def test_tools_of_another_shape_cannot_be_rendered(tools):
    with pytest.raises(UnrenderableError):
        request(tools=tools)


def test_tools_stay_when_none_may_be_chosen_unless_the_server_hides_them():
    tools = [{"function": {"name": "f"}}]
    assert request(tools=tools, tool_choice="none").tools
    assert request(RendererOptions(hide_tools_when_none=True), tools=tools, tool_choice="none").tools is None


def test_what_templates_may_read_is_merged_in_the_workers_order():
    options = RendererOptions(template_kwargs={"a": 1, "b": 1, "c": 1})
    chat = request(options, chat_template_kwargs={"b": 2, "c": None, "d": "auto", "add_generation_prompt": False})
    assert chat.variables == {"a": 1, "b": 2, "c": 1}
    assert chat.add_generation_prompt
    assert request(documents=[{"text": "x"}]).documents == [{"text": "x"}]
    assert request(chat_template_kwargs={"tools": [{"x": 1}]}, tools=[{"function": {"name": "f"}}]).tools == [{"x": 1}]


def test_a_reasoning_effort_switches_thinking():
    assert request(reasoning_effort="none").variables == {"reasoning_effort": "none", "enable_thinking": False}
    assert request(reasoning_effort="low").variables == {"reasoning_effort": "low", "enable_thinking": True}
    chosen = request(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert chosen.variables == {"reasoning_effort": "low", "enable_thinking": False}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "x"},
        {"messages": None},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": [1]},
        {"chat_template_kwargs": {"tools": "x"}},
        {"reasoning_effort": "silly"},
        {"reasoning_effort": ["low"]},
        {"add_generation_prompt": "yes"},
        {"continue_final_message": 1},
        {"documents": "x"},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 5, "truncation_side": "middle"},
    ],
)
def test_a_body_that_steers_what_is_not_known_cannot_be_rendered(body):
    with pytest.raises(UnrenderableError):
        request(**body)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_completions_have_texts_or_ids(prompt, prompts):
    read = read_completion({"prompt": prompt})
    assert [one if isinstance(one, str) else one.tolist() for one in read.prompts] == prompts
    assert read.add_special_tokens


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": 5},
        {"prompt": [1, "a"]},
        {"prompt": ["a", 1]},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"prompt": [2**32]},
        {"prompt": [True]},
        {"prompt": [1.5]},
        {"prompt": [None]},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "prompt_embeds": "b"},
        {"prompt": "a", "add_special_tokens": "no"},
    ],
)
def test_other_completions_cannot_be_known(body):
    with pytest.raises(UnrenderableError):
        read_completion(body)
