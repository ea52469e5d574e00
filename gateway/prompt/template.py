"""Chat templates: found in a model's directory as Hugging Face finds them, compiled once, rendered as it renders them.

The rules are those of transformers 5 (`tokenization_utils_base.py`, `utils/chat_template_utils.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from gateway.prompt.content_format import ContentFormat, detect
from gateway.prompt.sandbox import SandboxedEnvironment, bare_environment
from gateway.prompt.tracing import Trace, Tracer

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateError(ValueError):
    """A template cannot be found, compiled or, with these messages, rendered; the worker would answer 400."""


def local_now() -> datetime:
    """The local time without a zone, which is what templates that print a date are given."""
    return datetime.now().astimezone().replace(tzinfo=None)


class ChatTemplate:
    """One compiled template.

    Attributes:
        source: the template's text.
        variables: the names that it reads and does not define; vLLM passes no other ones.
        content_format: whether it wants content as a string or as parts.
        knows_developer: whether it names the role `developer`; if not, such messages become system messages.
        reads_clock: whether it prints the time of rendering, so that the prompt changes by the day.
    """

    __slots__ = (
        "_environment",
        "_globals",
        "_template",
        "_tracer",
        "content_format",
        "knows_developer",
        "reads_clock",
        "source",
        "variables",
    )

    def __init__(self, source: str, now: Callable[[], datetime] = local_now) -> None:
        environment = SandboxedEnvironment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._environment = environment
        self._globals = dict(self._template.globals)
        self._tracer: Tracer | None = None
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(bare_environment().parse(source)))
        self.content_format: ContentFormat = detect(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.reads_clock = "strftime_now" in self.variables

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: as `gateway.prompt.chat` leaves them.
            tools: tool definitions, or None.
            documents: documents for retrieval templates, or None.
            add_generation_prompt: end with the head of the assistant's next message.
            continue_final_message: end in the middle of the last message, without its end token.
            variables: the tokenizer's special tokens and the request's `chat_template_kwargs`; those that the template
                does not read are left out.

        Raises:
            TemplateError: the template refuses the messages or fails on them.
        """
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        final = ""
        if continue_final_message:
            messages, final = self._open_final(messages)
        values = self._values(
            variables, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt
        ) | {"messages": messages}
        try:
            # What `render` does, without looking up each global in a chain of dicts for each context.
            context = self._environment.context_class(
                self._environment, {**self._globals, **values}, self._template.name, self._template.blocks
            )
            text = "".join(self._template.root_render_func(context))
        except Exception as error:  # templates may fail in any way on a client's messages
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        return _cut_final(text, final) if continue_final_message else text

    def trace(
        self,
        messages: Sequence[dict[str, Any]],
        contents: Sequence[str],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Trace | None:
        """What `render` would give for other `contents` of these messages, without tools and documents.

        Returns:
            None if the template does with them what cannot be followed.
        """
        if self._tracer is None:
            self._tracer = Tracer(self.source)
        return self._tracer.trace(
            messages, contents, self._values(variables, add_generation_prompt=add_generation_prompt)
        )

    def _values(
        self,
        variables: Mapping[str, Any] | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> dict[str, Any]:
        """All that the template may read besides the messages."""
        values = {name: value for name, value in (variables or {}).items() if name in self.variables}
        values |= {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        return values

    def _open_final(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Messages whose last one ends in a tag at which the text will be cut, and the text before the tag."""
        if "content" not in self.source:
            raise TemplateError("the chat template does not read the content that should be continued")
        content = messages[-1].get("content")
        tagged: str | list[dict[str, Any]]
        if isinstance(content, str):
            final = content
            tagged = content + _CONTINUE_TAG
        elif isinstance(content, list):
            last = max((index for index, part in enumerate(content) if "text" in part), default=-1)
            if last < 0:
                raise TemplateError("the final message has no text to continue")
            final = content[last]["text"]
            tagged = [*content]
            tagged[last] = {**content[last], "text": final + _CONTINUE_TAG}
        else:
            raise TemplateError("the final message has no content to continue")
        return [*messages[:-1], {**messages[-1], "content": tagged}], final


def _cut_final(text: str, final: str) -> str:
    """The text before the tag; without the spaces before it where the template trimmed the message."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise TemplateError("the chat template does not render the final message as it is")
    at = text.rindex(tag)
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()


class ChatTemplates:
    """A model's templates by name: `default`, perhaps `tool_use` and others."""

    __slots__ = ("_by_name",)

    def __init__(self, sources: Mapping[str, str], now: Callable[[], datetime] = local_now) -> None:
        self._by_name = {name: ChatTemplate(source, now) for name, source in sources.items()}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    @classmethod
    def from_directory(cls, directory: Path, now: Callable[[], datetime] = local_now) -> "ChatTemplates":
        """The templates of a model's directory; none if it has none.

        ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` take precedence over `chat_template` in
        ``tokenizer_config.json``, which is a string or a list of ``{"name": ..., "template": ...}``.

        Raises:
            TemplateError: a template does not compile, or the configuration has another shape.
        """
        return cls(_sources(directory), now)

    def select(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """The template for a request with these tools (None: without any).

        Raises:
            TemplateError: the model has none, or several and no default.
        """
        if tools is not None and len(self._by_name) > 1 and "tool_use" in self._by_name:
            return self._by_name["tool_use"]
        if "default" in self._by_name:
            return self._by_name["default"]
        raise TemplateError("the model has no default chat template")

    @property
    def default(self) -> ChatTemplate | None:
        """The template for requests without tools, if the model has one."""
        return self._by_name.get("default")

    def all(self) -> list[ChatTemplate]:
        """Those that `select` may return."""
        return [self._by_name[name] for name in ("default", "tool_use") if name in self._by_name]


def _sources(directory: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    default = directory / "chat_template.jinja"
    if default.is_file():
        files["default"] = default.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path.read_text(encoding="utf-8")
    if files:
        return files
    path = directory / "tokenizer_config.json"
    declared = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    if isinstance(declared, list):
        try:
            return {entry["name"]: entry["template"] for entry in declared}
        except (KeyError, TypeError) as error:
            raise TemplateError(f"{path}: chat_template is a list of other things than name and template") from error
    raise TemplateError(f"{path}: chat_template is neither a string nor a list")
