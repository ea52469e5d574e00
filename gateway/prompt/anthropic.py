"""Anthropic's `/v1/messages` as the chat request that vLLM 0.32 makes of it (`entrypoints/anthropic/serving.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.prompt.chat import ChatRequest, JsonMemory, RendererOptions, UnrenderableError, assemble
from gateway.prompt.template import ChatTemplate, TemplateError

_BILLING_HEADER = "x-anthropic-billing-header"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class AnthropicTraits:
    """What vLLM finds out about a template at start by rendering probes.

    Attributes:
        merge_systems: the template wants its system message first, so later ones are merged into it.
        disabled_effort: the reasoning effort that stands for ``thinking: {"type": "disabled"}``.
    """

    merge_systems: bool
    disabled_effort: str

    @classmethod
    def probe(
        cls, templates: Sequence[ChatTemplate], special_tokens: Mapping[str, str], kwargs: Mapping[str, Any]
    ) -> "AnthropicTraits":
        """Render vLLM's probes with the templates for requests without and with tools (the first is without).

        Args:
            templates: not empty.
            special_tokens: the tokenizer's, by name.
            kwargs: the server's default template kwargs.
        """
        return cls(
            merge_systems=any(_needs_system_first(template.source) for template in templates),
            disabled_effort=_disabled_effort(templates[0], {**special_tokens, **kwargs}),
        )


def read_messages(
    body: Mapping[str, Any], memory: JsonMemory, options: RendererOptions, traits: AnthropicTraits
) -> ChatRequest:
    """The chat request that the worker makes of a `/v1/messages` (or `/count_tokens`) body.

    Raises:
        UnrenderableError: images, tool changes in the conversation, or what the worker will refuse.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise UnrenderableError("messages: not a list")
    turned: list[dict[str, Any]] = []
    systems = _system_texts(body.get("system"))
    if traits.merge_systems:
        systems += [text for message in messages if _role(message) == "system" and (text := _inline_system(message))]
    if systems:
        turned.append({"role": "system", "content": "".join(systems)})
    for message in messages:
        if _role(message) == "system":
            if not traits.merge_systems and (text := _inline_system(message)):
                turned.append({"role": "system", "content": text})
        else:
            _turn(message, turned)
    tools = body.get("tools")
    return assemble(
        turned,
        _tools(tools, memory) if tools is not None else None,
        template_kwargs=body.get("chat_template_kwargs"),
        effort=_effort(body, traits),
        options=options,
    )


def _needs_system_first(source: str) -> bool:
    """Whether the template, alone in a bare environment as vLLM tries it, fails on a second system message."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    probe = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=probe, add_generation_prompt=False)
    except Exception:  # noqa: BLE001  # vLLM catches template errors only; any other one would have kept the worker from starting
        return True
    return False


def _disabled_effort(template: ChatTemplate, variables: Mapping[str, Any]) -> str:
    """`none`, unless the template refuses it or renders the same for it as for an effort."""

    def rendered(effort: str) -> str | None:
        content: Any = "Hi" if template.content_format == "string" else [{"type": "text", "text": "Hi"}]
        effects = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            return template.render([{"role": "user", "content": content}], variables={**variables, **effects})
        except TemplateError:
            return None

    without = rendered("none")
    if without is None or any(rendered(effort) == without for effort in _EFFORTS):
        return "low"
    return "none"


def _effort(body: Mapping[str, Any], traits: AnthropicTraits) -> Any:
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return traits.disabled_effort
    config = body.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    if effort is not None and effort not in _EFFORTS:
        raise UnrenderableError("output_config: unknown effort")
    return effort


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise UnrenderableError("message: unknown role")
    return str(role)


def _blocks(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise UnrenderableError("content: neither text nor blocks")
    return content


def _string(block: Mapping[str, Any], name: str) -> str | None:
    value = block.get(name)
    if not isinstance(value, str | None):
        raise UnrenderableError("content block: malformed")
    return value


def _system_texts(system: Any) -> list[str]:
    if not system:
        return []
    if isinstance(system, str):
        return [system]
    return _texts(_blocks(system))


def _inline_system(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(_BILLING_HEADER) else content
    return "".join(_texts(_blocks(content)))


def _texts(blocks: list[dict[str, Any]]) -> list[str]:
    """The texts of system blocks without Claude Code's attribution header."""
    if any(block.get("type") in ("tool_addition", "tool_removal") for block in blocks):
        raise UnrenderableError("content block: tool change")
    texts = [_string(block, "text") for block in blocks if block.get("type") == "text"]
    return [text for text in texts if text and not text.startswith(_BILLING_HEADER)]


def _turn(message: Mapping[str, Any], turned: list[dict[str, Any]]) -> None:
    """Append what becomes of a user's or assistant's message: tool results come before the text beside them."""
    role, content = str(message["role"]), message.get("content")
    if isinstance(content, str):
        turned.append({"role": role, "content": content})
        return
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        kind = block.get("type")
        if kind == "text":
            if text := _string(block, "text"):
                texts.append(text)
        elif kind == "thinking":
            if (thought := _string(block, "thinking")) is not None:
                thoughts.append(thought)
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            turned.append(_result(block))
        elif kind == "tool_result":
            # The worker prints Python's own form of a list here.
            texts.append(f"Tool result: {block.get('content') or ''}")
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise UnrenderableError("content block: other than text and tools")
    seen: dict[str, Any] = {"role": role}
    if thoughts:
        seen["reasoning"] = "".join(thoughts)
    if calls:
        seen["tool_calls"] = calls
    if texts:
        seen["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if role == "assistant" or texts:
        turned.append(seen)


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call; vLLM too writes its arguments as JSON and reads them again."""
    identity, given = _string(block, "id"), block.get("input")
    if not identity or not isinstance(given, dict | None):
        raise UnrenderableError("content block: malformed")
    function = {"name": _string(block, "name") or "", "arguments": orjson.dumps(given or {}).decode()}
    return {"id": identity, "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        parts = _blocks(content)
        if any(part.get("type") in ("image", "tool_reference") for part in parts):
            raise UnrenderableError("content block: other than text and tools")
        content = "\n".join(_string(part, "text") or "" for part in parts if part.get("type") == "text")
    elif not isinstance(content, str | None):
        raise UnrenderableError("content block: malformed")
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id") or "", "content": content or ""}


def _tools(tools: Any, memory: JsonMemory) -> Sequence[Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise UnrenderableError("tools: not a list")
    if not tools:
        return []
    turned = []
    for tool in tools:
        schema = tool.get("input_schema") if isinstance(tool, dict) else None
        if not isinstance(schema, dict):
            raise UnrenderableError("tools: not a function")
        parameters = schema if "type" in schema else {**schema, "type": "object"}
        function = {"parameters": parameters} | {
            name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")
        }
        turned.append({"type": "function", "function": function})
    return memory.tools(turned)
