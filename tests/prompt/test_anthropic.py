import json

import pytest

from gateway.prompt.anthropic import AnthropicTraits, read_messages
from gateway.prompt.chat import JsonMemory, RendererOptions, UnrenderableError
from gateway.prompt.responses import read_responses
from gateway.prompt.template import ChatTemplate

FREE = AnthropicTraits(merge_systems=False, disabled_effort="none")
FIRST = AnthropicTraits(merge_systems=True, disabled_effort="low")


def read(traits=FREE, **body):
    return read_messages(
        {"messages": [{"role": "user", "content": "q"}], **body}, JsonMemory(), RendererOptions(), traits
    )


def turned(*messages, **body):
    return read(messages=list(messages), **body).messages


def test_texts_stay_and_the_system_field_comes_first():
    assert turned({"role": "user", "content": "q"}, system="rules") == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "q"},
    ]
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    assert turned({"role": "user", "content": "q"}, system=blocks)[0] == {"role": "system", "content": "ab"}


def test_blocks_become_texts_thoughts_and_calls():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1}},
        {"type": "redacted_thinking", "data": "x"},
    ]
    (message,) = turned({"role": "assistant", "content": blocks})
    assert message["reasoning"] == "hm"
    assert message["content"] == "a"
    (call,) = message["tool_calls"]
    assert (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) == ("t1", "f", {"b": 1})
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turned({"role": "user", "content": texts})[0]["content"] == texts


def test_tool_results_come_before_the_text_beside_them():
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
    }
    tool = {"role": "tool", "tool_call_id": "t1", "content": "x\ny"}
    assert turned({"role": "user", "content": [{"type": "text", "text": "and"}, result]}) == [
        tool,
        {"role": "user", "content": "and"},
    ]
    assert turned({"role": "user", "content": [result]}) == [tool]
    assert turned({"role": "assistant", "content": []}) == [{"role": "assistant"}]


def test_later_system_messages_stay_or_are_merged_as_the_template_needs_it():
    messages = [{"role": "user", "content": "q"}, {"role": "system", "content": "late"}]
    assert [m["role"] for m in turned(*messages, system="s")] == ["system", "user", "system"]
    assert read(FIRST, messages=messages, system="s").messages == [{"role": "system", "content": "slate"}, messages[0]]


def test_tools_are_functions_with_an_object_schema():
    (tool,) = read(tools=[{"name": "f", "input_schema": {"properties": {}}}]).tools
    assert tool["function"] == {"name": "f", "description": None, "parameters": {"properties": {}, "type": "object"}}
    assert read(tools=[]).tools == []


def test_thinking_and_effort_become_a_reasoning_effort():
    assert read(thinking={"type": "disabled"}).variables == {"reasoning_effort": "none", "enable_thinking": False}
    assert read(FIRST, thinking={"type": "disabled"}).variables["reasoning_effort"] == "low"
    assert read(output_config={"effort": "high"}).variables == {"reasoning_effort": "high", "enable_thinking": True}
    assert read(thinking={"type": "adaptive"}).variables == {}


def test_probes_tell_what_a_template_needs(qwen3):
    assert AnthropicTraits.probe(qwen3.templates.all(), qwen3.special_tokens, {}) == FREE
    first = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert AnthropicTraits.probe([first], {}, {}) == FIRST


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "x"},
        {"messages": [5]},
        {"messages": [{"role": "critic", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
        {"system": 5},
        {"tools": "x"},
        {"tools": [{"name": "f"}]},
        {"output_config": {"effort": "silly"}},
    ],
)
def test_what_is_no_text_or_will_be_refused_cannot_be_rendered(body):
    with pytest.raises(UnrenderableError):
        read(**body)


def responses(**body):
    return read_responses(body, JsonMemory(), RendererOptions())


def test_responses_become_chat_messages():
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    chat = responses(
        instructions="s",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            call,
            {"type": "function_call_output", "call_id": "1", "output": "r"},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": None}],
        reasoning={"effort": "low"},
    )
    assert chat.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}, "type": "function"}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    assert chat.tools[0]["function"]["name"] == "f"
    assert chat.variables == {"reasoning_effort": "low", "enable_thinking": True}
    assert chat.add_special_tokens
    assert responses(input="q").messages == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": [5]},
        {"input": "q", "previous_response_id": "r"},
        {"input": "q", "truncation": "auto"},
        {"input": "q", "instructions": 5},
        {"input": "q", "tools": [{"type": "web_search"}]},
        {"input": [{"type": "reasoning"}]},
        {"input": [{"role": "assistant", "content": "x", "status": "incomplete"}]},
        {"input": [{"role": "assistant", "content": []}]},
        {"input": [{"type": "function_call_output", "output": []}]},
        {"input": [{"type": "function_call", "namespace": "n"}]},
    ],
)
def test_other_responses_cannot_be_rendered(body):
    with pytest.raises(UnrenderableError):
        responses(**body)
