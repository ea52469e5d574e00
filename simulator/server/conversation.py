"""What vLLM does to a chat request's messages and tools before the chat template sees them."""

from typing import Any

import orjson

from simulator.server.errors import bad_request
from simulator.server.parameters import Body


def template_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages for the template: texts flattened, arguments parsed, other names for the same thing unified.

    Raises:
        ApiError: there is none, or one is no object or has no role.
    """
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request("Each message must be an object with a role.", "messages")
    role = "system" if message["role"] == "developer" else message["role"]
    result: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    calls = message.get("tool_calls")
    if role == "assistant" and isinstance(calls, list) and calls:
        result["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        result["reasoning"] = result["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            result[name] = message[name]
    return result


def text_of(content: Any) -> str:
    """The text of a message: a string, or the texts of its parts, one a line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            texts.extend(str(part[key]) for key in ("text", "refusal", "thinking") if isinstance(part.get(key), str))
    return "\n".join(texts)


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise bad_request("Each tool call must be an object with a function.", "messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = orjson.loads(arguments) if arguments else {}
        except orjson.JSONDecodeError as error:
            raise bad_request(f"Tool call arguments are no JSON: {error}") from None
    elif arguments is None:
        function["arguments"] = {}
    return {**call, "function": function}


def template_tools(body: Body) -> list[dict[str, Any]] | None:
    """The tools with vLLM's fields in vLLM's order, or None.

    Raises:
        ApiError: a tool is malformed, or `tool_choice` names no tool that is there.
    """
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return None
    result = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request("Each tool must be an object with a function that has a name.", "tools")
        kept = {name: function.get(name) for name in ("name", "description", "parameters")}
        kept |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
        result.append({"type": "function", "function": kept})
    return result


def chosen_function(body: Body, tools: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """The function that must be called, or None when text will do.

    Raises:
        ApiError: `tool_choice` names a function that is not among the tools.
    """
    choice = body.get("tool_choice")
    if not tools or choice in (None, "none", "auto"):
        return None
    functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
    if choice == "required":
        return functions[0]
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    for function in functions:
        if function["name"] == name:
            return function
    raise bad_request("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
