"""What vLLM does to a chat request before its template sees it, for a body that is already parsed JSON.

The order of events in vLLM 0.32 (`entrypoints/openai/chat_completion/protocol.py`, `renderers/chat_utils.py`,
`renderers/hf.py`): pydantic puts the known fields of tools, tool calls and parts into its own order; `reasoning_content`
becomes `reasoning`; each message is rebuilt from the few fields that templates may see; contents become one string, or a
list of parts where the template wants that; arguments of tool calls are parsed; `developer` becomes `system` for
templates that do not know it.

Everything that cannot be reproduced (images, audio, what the worker is going to refuse) raises `UnrenderableError`: the
request is routed without exact tokens and the worker judges it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import orjson

from gateway.prompt.content_format import ContentFormat
from gateway.prompt.lru import ByteLru
from gateway.prompt.sandbox import JsonObject

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})

_RENDERER_ARGUMENTS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Names in `chat_template_kwargs` that would steer transformers' function and not the template."""


_STEERING = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "reasoning_effort",
        "tools",
        "truncate_prompt_tokens",
    }
)
"""The keys of a chat request that change its prompt, besides `messages`; others only say how to read these."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class UnrenderableError(ValueError):
    """The prompt of this body cannot be known here.

    Attributes:
        reason: a short fixed phrase, fit for a metric's label.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RendererOptions:
    """How the workers were started, as far as it changes prompts.

    Attributes:
        template_kwargs: ``--default-chat-template-kwargs``.
        content_format: ``--chat-template-content-format``.
        hide_tools_when_none: ``--exclude-tools-when-tool-choice-none``.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    content_format: ContentFormat | None = None
    hide_tools_when_none: bool = False


class ChatRequest(msgspec.Struct, frozen=True):
    """A chat request with checked fields, its messages still as the client sent them.

    Attributes:
        messages: the client's.
        tools: in the order of vLLM's models, or None.
        documents: for retrieval templates.
        add_generation_prompt: end with the head of the assistant's message.
        continue_final_message: leave the last message open.
        variables: what else the template may read.
        add_special_tokens: let the tokenizer add its own, such as BOS.
        truncate: keep this many tokens, or None.
        truncate_left: drop tokens from the left.
        validated: the messages went through pydantic's models (not so for `/v1/responses`).
    """

    messages: Sequence[Any]
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]
    add_special_tokens: bool
    truncate: int | None = None
    truncate_left: bool = True
    validated: bool = True


class JsonMemory:
    """Tools and arguments that were parsed before: they come again in every turn of a conversation.

    Args:
        max_bytes: budget for each of the two.
    """

    __slots__ = ("_arguments", "_tools")

    def __init__(self, max_bytes: int = 8 * 1024 * 1024) -> None:
        self._arguments: ByteLru[JsonObject] = ByteLru(max_bytes)
        self._tools: ByteLru[list[JsonObject]] = ByteLru(max_bytes)

    def arguments(self, text: str) -> JsonObject:
        """A tool call's arguments as an object; an empty one where they are no JSON object, as vLLM does it."""
        known = self._arguments.get(text)
        if known is not None:
            return known
        try:
            value = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            value = {}
        parsed = JsonObject(value if isinstance(value, dict) else {})
        # Parsed and with its text remembered it takes eight times its text (measured with tracemalloc), and the key.
        self._arguments.put(text, parsed, 10 * len(text))
        return parsed

    def tools(self, tools: Any) -> list[JsonObject]:
        """`tools` of a chat request as vLLM's models dump them.

        Raises:
            UnrenderableError: they have another shape than functions.
        """
        if not isinstance(tools, list) or not tools:
            raise UnrenderableError("tools: not a list of functions")
        try:
            key = orjson.dumps(tools).decode()
        except (TypeError, ValueError) as error:
            raise UnrenderableError("tools: not JSON") from error
        known = self._tools.get(key)
        if known is None:
            known = [JsonObject(_tool(tool)) for tool in tools]
            self._tools.put(key, known, 10 * len(key))
        return known


def read_chat(body: Mapping[str, Any], memory: JsonMemory, options: RendererOptions) -> ChatRequest:
    """The fields of a `/v1/chat/completions` body that make its prompt.

    Raises:
        UnrenderableError: some of them cannot be reproduced here, or the worker will refuse them.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise UnrenderableError("messages: not a list")
    if not options.template_kwargs and _STEERING.isdisjoint(body):
        # Most requests have none of these, and then there is nothing to read.
        return ChatRequest(messages, None, None, True, False, _NOTHING, False)
    if body.get("chat_template") is not None:
        raise UnrenderableError("chat_template: in the request")
    tools = body.get("tools")
    hidden = body.get("tool_choice") == "none" and options.hide_tools_when_none
    effort = body.get("reasoning_effort")
    truncate, left = read_truncation(body)
    return assemble(
        messages,
        memory.tools(tools) if tools is not None and not hidden else None,
        template_kwargs=body.get("chat_template_kwargs"),
        effort=effort,
        documents=body.get("documents"),
        add_generation_prompt=_flag(body, "add_generation_prompt", default=True),
        continue_final_message=_flag(body, "continue_final_message", default=False),
        add_special_tokens=_flag(body, "add_special_tokens", default=False),
        options=options,
        truncate=truncate,
        truncate_left=left,
    )


def assemble(
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    template_kwargs: Any,
    effort: Any,
    options: RendererOptions,
    documents: Any = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    truncate: int | None = None,
    truncate_left: bool = True,
    validated: bool = True,
) -> ChatRequest:
    """Merge what the template may read: the server's defaults, the request's kwargs, then the request's own fields."""
    given = template_kwargs or {}
    if not isinstance(given, dict):
        raise UnrenderableError("chat_template_kwargs: not an object")
    if not _RENDERER_ARGUMENTS.isdisjoint(given):
        raise UnrenderableError("chat_template_kwargs: steers the renderer")
    if effort is not None and not (isinstance(effort, str) and effort in _EFFORTS):
        raise UnrenderableError("reasoning_effort: unknown")
    variables = {**options.template_kwargs}
    if tools is not None:
        variables["tools"] = tools
    variables |= {name: value for name, value in given.items() if value is not None and value != "auto"}
    if documents is not None:
        variables["documents"] = documents
    if effort is not None:
        variables["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            variables["enable_thinking"] = effort != "none"
    for name in ("add_generation_prompt", "continue_final_message"):
        variables.pop(name, None)
    return ChatRequest(
        messages=messages,
        tools=_objects(variables.pop("tools", None), "tools"),
        documents=_objects(variables.pop("documents", None), "documents"),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        add_special_tokens=add_special_tokens,
        truncate=truncate,
        truncate_left=truncate_left,
        validated=validated,
    )


def read_truncation(body: Mapping[str, Any]) -> tuple[int | None, bool]:
    """How many tokens of the prompt the worker keeps (None: all), and whether it drops them from the left."""
    keep = body.get("truncate_prompt_tokens")
    side = body.get("truncation_side")
    if keep is None:
        return None, True
    if type(keep) is not int or keep < 1 or side not in (None, "left", "right"):
        raise UnrenderableError("truncate_prompt_tokens: depends on the worker")
    return keep, side != "right"


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as `ChatCompletionToolsParam.model_dump()` gives it: known fields, in the order of the model."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise UnrenderableError("tools: not a function")
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    deferred = tool.get("defer_loading")
    function_deferred = function.get("defer_loading")
    if (
        not isinstance(name, str)
        or not isinstance(description, str | None)
        or not isinstance(parameters, dict | None)
        or not all(isinstance(flag, bool | None) for flag in (strict, deferred, function_deferred))
    ):
        raise UnrenderableError("tools: malformed")
    if function_deferred is None:
        function_deferred = deferred
    seen: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        seen["strict"] = strict
    if function_deferred is not None:
        seen["defer_loading"] = function_deferred
    dumped: dict[str, Any] = {"type": "function", "function": seen}
    if deferred is not None:
        dumped["defer_loading"] = deferred
    return dumped


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise UnrenderableError(f"{name}: not a boolean")
    return value


def _objects(value: Any, name: str) -> Sequence[Mapping[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UnrenderableError(f"{name}: not a list of objects")
    return value
