"""OpenAI's `/v1/responses`, as far as vLLM 0.32 turns it into a chat request in a simple way.

Covered: instructions, an input that is text or a list of messages, function calls and their outputs, function tools.
Not covered: stored conversations, reasoning items, built-in tools, truncation (`entrypoints/openai/responses/`).
"""

from collections.abc import Mapping
from typing import Any

from gateway.prompt.chat import ChatRequest, JsonMemory, RendererOptions, UnrenderableError, assemble

_STATE = ("previous_response_id", "previous_input_messages", "conversation", "prompt")


def read_responses(body: Mapping[str, Any], memory: JsonMemory, options: RendererOptions) -> ChatRequest:
    """The chat request that the worker makes of the body.

    Unlike chat completions it lets the tokenizer add its special tokens, and its messages pass no model.

    Raises:
        UnrenderableError: anything that needs more than the body, or is not covered.
    """
    if any(body.get(name) is not None for name in _STATE):
        raise UnrenderableError("responses: stored state")
    if body.get("truncation", "disabled") != "disabled":
        raise UnrenderableError("responses: truncation")
    reasoning = body.get("reasoning")
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise UnrenderableError("responses: instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add(item, messages)
    else:
        raise UnrenderableError("responses: input")
    tools = body.get("tools")
    hidden = body.get("tool_choice") == "none" and options.hide_tools_when_none
    return assemble(
        messages,
        memory.tools([_tool(tool) for tool in tools]) if tools and isinstance(tools, list) and not hidden else None,
        template_kwargs=body.get("chat_template_kwargs"),
        effort=reasoning.get("effort") if isinstance(reasoning, dict) else None,
        add_special_tokens=True,
        options=options,
        validated=False,
    )


def _add(item: Any, messages: list[dict[str, Any]]) -> None:
    """Append an input item, or merge it into the assistant's message before it."""
    if not isinstance(item, dict):
        raise UnrenderableError("responses: input item")
    kind = item.get("type", "message")
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if item.get("status") in ("in_progress", "incomplete") or not isinstance(role, str):
            raise UnrenderableError("responses: input item")
        if role != "assistant":
            messages.append({"role": role, "content": content})
            return
        if isinstance(content, list):
            if len(content) != 1 or not isinstance(content[0], dict):
                raise UnrenderableError("responses: input item")
            content = content[0].get("text")
        if not isinstance(content, str):
            raise UnrenderableError("responses: input item")
        if before is not None and before.get("content") is None:
            before["content"] = content
        else:
            messages.append({"role": "assistant", "content": content})
    elif kind == "function_call":
        if item.get("namespace"):
            raise UnrenderableError("responses: namespace")
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "function": function, "type": "function"}
        if before is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            before.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        if not isinstance(output, str):
            raise UnrenderableError("responses: input item")
        messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
    else:
        raise UnrenderableError("responses: input item")


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise UnrenderableError("responses: tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
