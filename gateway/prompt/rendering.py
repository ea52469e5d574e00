"""From a parsed body to the texts that its worker encodes, cut into pieces. No clock, no thread of its own."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.prompt.anthropic import AnthropicTraits, read_messages
from gateway.prompt.chat import ChatRequest, JsonMemory, RendererOptions, UnrenderableError, read_chat
from gateway.prompt.completion import CompletionRequest, read_completion
from gateway.prompt.conversation import conversation
from gateway.prompt.responses import read_responses
from gateway.prompt.shapes import Key, Shapes, read_shape
from gateway.prompt.tokenizer import PromptTokenizer

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
RESPONSES: Final = "/v1/responses"
INVOCATIONS: Final = "/invocations"

PATHS: Final = frozenset({CHAT, COMPLETIONS, MESSAGES, COUNT_TOKENS, RESPONSES, INVOCATIONS})
"""The paths whose bodies have a prompt that the worker's prefix cache sees."""

MAX_TRIES: Final = 100_000
"""Places where a special token might begin that are looked at without asking for patience (0.05 us each at worst)."""


class Text(msgspec.Struct, frozen=True):
    """A text in pieces, with what becomes of its tokens.

    Attributes:
        pieces: put together they are the text; their ids put together are its ids.
        special: the tokenizer adds its own special tokens around them.
        truncate: keep this many tokens, or None.
        truncate_left: drop tokens from the left.
    """

    pieces: Sequence[str]
    special: bool
    truncate: int | None
    truncate_left: bool


Request = ChatRequest | CompletionRequest
Source = Text | array  # type: ignore[type-arg]  # a text, or uint32 ids that the client sent


class Renderer:
    """What turns bodies into texts for one model.

    Args:
        tokenizer: the model's; None makes every text unrenderable.
        options: how the workers were started.

    Attributes:
        shapes: what it knows of conversations of plain texts; None without a template for them.
    """

    __slots__ = ("_options", "_tokenizer", "_traits", "shapes")

    def __init__(self, tokenizer: PromptTokenizer | None, options: RendererOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        templates = tokenizer.templates.all() if tokenizer else []
        self._traits = (
            AnthropicTraits.probe(templates, tokenizer.special_tokens, options.template_kwargs)
            if tokenizer and templates
            else AnthropicTraits(merge_systems=True, disabled_effort="low")
        )
        default = tokenizer.templates.default if tokenizer else None
        self.shapes = Shapes(default, tokenizer.splitter) if tokenizer and default else None

    def read(self, path: str, body: Mapping[str, Any], memory: JsonMemory) -> Request:
        """The part of a body that makes its prompt.

        Raises:
            UnrenderableError: it has none, or not one that can be known here.
        """
        if path == INVOCATIONS:
            path = CHAT if "messages" in body else COMPLETIONS
        if path == COMPLETIONS:
            completion = read_completion(body)
            if self._tokenizer is None and any(isinstance(prompt, str) for prompt in completion.prompts):
                raise UnrenderableError("no tokenizer")
            return completion
        if self._tokenizer is None:
            raise UnrenderableError("no tokenizer")
        if not self._tokenizer.templates:
            raise UnrenderableError("no chat template")
        if path == CHAT:
            return read_chat(body, memory, self._options)
        if path == RESPONSES:
            return read_responses(body, memory, self._options)
        if path in (MESSAGES, COUNT_TOKENS):
            return read_messages(body, memory, self._options, self._traits)
        raise UnrenderableError("path")

    def sources(self, request: Request, memory: JsonMemory, *, max_items: int | None) -> list[Source] | None:
        """The request's texts in pieces, or its ids; None if that would take long.

        Args:
            request: what to render.
            memory: what was parsed before.
            max_items: more messages, parts, calls and tools than this take long, and so does cutting some texts; None if
                the caller is patient.

        Raises:
            UnrenderableError: messages hold something else than text.
            TemplateError: the template refuses them.
        """
        patient = max_items is None
        if type(request) is CompletionRequest:
            if max_items is not None and items(request) > max_items:
                return None
            return self._completion(request, patient=patient)
        assert isinstance(request, ChatRequest)
        # Shapes belong to the loop; whoever is patient is in a thread, or wants to know what the template says.
        seen = None if patient or self.shapes is None else read_shape(request)
        rendered = self.shapes.render(*seen) if seen is not None and self.shapes is not None else None
        if type(rendered) is list:
            pieces: list[str] | None = rendered
        else:
            if max_items is not None and items(request) > max_items:
                return None
            text = rendered if type(rendered) is str else self._render(request, memory, seen)
            pieces = self._cut(text, patient=patient)
        if pieces is None:
            return None
        return [Text(pieces, request.add_special_tokens, request.truncate, request.truncate_left)]

    def _render(self, request: ChatRequest, memory: JsonMemory, seen: tuple[Key, list[str]] | None) -> str:
        """What the template makes of a request, from which its shape can be learnt."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        template = tokenizer.templates.select(request.tools)
        messages = conversation(
            request,
            self._options.content_format or template.content_format,
            knows_developer=template.knows_developer,
            memory=memory,
        )
        variables = {**tokenizer.special_tokens, **request.variables}
        text = template.render(
            messages,
            tools=request.tools,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=variables,
        )
        if seen is not None and self.shapes is not None:
            self.shapes.learn(*seen, text, messages, variables)
        return text

    def _completion(self, request: CompletionRequest, *, patient: bool) -> list[Source] | None:
        sources: list[Source] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                pieces = self._cut(prompt, patient=patient)
                if pieces is None:
                    return None
                sources.append(Text(pieces, request.add_special_tokens, request.truncate, request.truncate_left))
            else:
                sources.append(truncated(prompt, request.truncate, left=request.truncate_left))
        return sources

    def _cut(self, text: str, *, patient: bool) -> list[str] | None:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        splitter = tokenizer.splitter
        if splitter is None:
            return [text]
        if not patient and len(text) > MAX_TRIES and splitter.tries(text) > MAX_TRIES:
            return None
        return splitter.split(text)


def items(request: Request) -> int:
    """How many messages, parts, calls, tools or prompts a request has: what rendering it costs, besides its length."""
    if isinstance(request, CompletionRequest):
        return len(request.prompts)
    count = len(request.messages) + len(request.tools or ())
    for message in request.messages:
        if type(message) is dict:
            content, calls = message.get("content"), message.get("tool_calls")
            count += len(content) if type(content) is list else 0
            count += len(calls) if type(calls) is list else 0
    return count


def truncated(ids: "array[int]", keep: int | None, *, left: bool) -> "array[int]":
    """The last (or first) `keep` of `ids`; all if None."""
    if keep is None or len(ids) <= keep:
        return ids
    return ids[-keep:] if left else ids[:keep]
