"""A chat request's messages as templates see them in vLLM 0.32 (`renderers/chat_utils.py`, `renderers/hf.py`).

Each message is rebuilt from the few fields that templates may see; contents become one string, or a list of parts where
the template wants that; arguments of tool calls are parsed; `developer` becomes `system` for templates that do not know it.
"""

from collections.abc import Iterable
from typing import Any

from gateway.prompt.chat import ChatRequest, JsonMemory, UnrenderableError
from gateway.prompt.content_format import ContentFormat

_PART_FIELDS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    }
)
"""Fields of content parts that vLLM knows; all others are handed to templates that want parts."""

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Part type to the field that holds its text."""

_PLAIN_ROLES = frozenset({"assistant", "user"})
"""Roles of messages that stay as they are if they have a text and nothing else."""

BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code's first system line; it changes in every request, so vLLM drops it."""


def conversation(
    request: ChatRequest, content_format: ContentFormat, *, knows_developer: bool, memory: JsonMemory
) -> list[dict[str, Any]]:
    """The messages as a template sees them.

    Raises:
        UnrenderableError: a message holds something else than text and tool calls, or is malformed.
    """
    parts = content_format == "openai"
    messages = [_message(message, memory, parts=parts, validated=request.validated) for message in request.messages]
    if not knows_developer and any(message["role"] == "developer" for message in messages):
        return _merge_systems(messages)
    return messages


def _message(message: Any, memory: JsonMemory, *, parts: bool, validated: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UnrenderableError("message: not an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise UnrenderableError("message: no role")
    content = message.get("content")
    if len(message) == 2 and type(content) is str and not parts and role in _PLAIN_ROLES:
        return {"role": role, "content": content}
    if type(content) is str and not parts and role != "system":
        seen: dict[str, Any] = {"role": role, "content": content}
    else:
        if content is None and validated and "content" in message and role != "assistant":
            raise UnrenderableError("content: null")
        seen = {"role": role, "content": _content(content, role, parts=parts, validated=validated)}
    if role == "assistant":
        _add_assistant_fields(seen, message, memory, validated=validated)
    elif role == "tool":
        if "tool_call_id" in message:
            seen["tool_call_id"] = message["tool_call_id"]
        content = seen["content"]
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            seen["content"] = "\n".join(part["text"] for part in content)
    elif role == "developer":
        if message.get("tools") is not None:
            raise UnrenderableError("developer message: tools")
        seen["tools"] = None
    for name in ("name", "task"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise UnrenderableError(f"{name}: not a string")
        seen[name] = value
    return seen


def _add_assistant_fields(
    seen: dict[str, Any], message: dict[str, Any], memory: JsonMemory, *, validated: bool
) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise UnrenderableError("tool_calls: not a list")
        if calls:
            seen["tool_calls"] = [_tool_call(call, memory, validated=validated) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content") if validated else None
    if reasoning is not None:
        seen["reasoning"] = reasoning
        seen["reasoning_content"] = reasoning


def _content(content: Any, role: str, *, parts: bool, validated: bool) -> str | list[dict[str, Any]]:
    """A message's content as one string (texts joined by line feeds), or as a list of parts."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif content is None:
        content = []
    elif not isinstance(content, list):
        raise UnrenderableError("content: neither text nor parts")
    if role == "system":
        content = _without_billing_header(content)
    if parts:
        return [_part(part, validated=validated) for part in content]
    return "\n".join(text for part in content if (text := _text(part, validated=validated)))


def _text(part: Any, *, validated: bool) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UnrenderableError("content part: not an object")
    kind = part.get("type")
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise UnrenderableError(
            "content part: tool reference" if kind == "tool_reference" else "content part: other than text"
        )
    if part.get("uuid") is not None or (validated and kind in {"input_text", "output_text"}):
        raise UnrenderableError("content part: type not accepted here")
    text = part.get(name)
    if not isinstance(text, str):
        raise UnrenderableError("content part: text is no string")
    return text


def _part(part: Any, *, validated: bool) -> dict[str, Any]:
    text = _text(part, validated=validated)
    seen = {"type": "text", "text": text}
    if isinstance(part, dict):
        seen.update({name: value for name, value in part.items() if name not in _PART_FIELDS})
    return seen


def _without_billing_header(parts: Iterable[Any]) -> list[Any]:
    kept: list[Any] = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            kept.append(part)
            continue
        rest = text.partition("\n")[2]
        if rest:
            kept.append({**part, "text": rest} if is_text else rest)
    return kept


def _tool_call(call: Any, memory: JsonMemory, *, validated: bool) -> dict[str, Any]:
    """A call in pydantic's field order, its arguments parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", None if validated else "function") != "function":
        raise UnrenderableError("tool call: not a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(call.get("id"), str) or not isinstance(arguments, str):
        raise UnrenderableError("tool call: malformed")
    parsed = memory.arguments(arguments)
    if not validated:
        return {**call, "function": {**function, "arguments": parsed}}
    seen_function = {"arguments": parsed, "name": name}
    if len(function) > 2:
        seen_function.update({key: value for key, value in function.items() if key not in seen_function})
    seen = {"id": call["id"], "function": seen_function, "type": "function"}
    if len(call) > 3:
        seen.update({key: value for key, value in call.items() if key not in seen})
    return seen


def _merge_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as system messages, and all system messages as one at the front if there are others."""
    turned = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [index for index, message in enumerate(turned) if message["role"] == "system"]
    if systems == [0]:
        return turned
    texts = [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        for content in (turned[index]["content"] for index in systems)
    ]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in turned if message["role"] != "system")]
