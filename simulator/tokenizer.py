"""The simulated worker's tokenizer and chat template, loaded from a folder in Hugging Face's layout."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

DATA = Path(__file__).parent / "data"
CACHED_CHARACTERS = 2_000_000
"""How much text a tokenizer remembers the ids of: at three characters and 36 bytes a token, some 25 MB at most."""


class TemplateError(ValueError):
    """The chat template refused a conversation; the message is for the client."""


class WorkerTokenizer:
    """Text to token ids and back, and a conversation to text.

    Ids of repeated texts come from a cache, so lists that `encode` returns are shared: never change one.
    """

    def __init__(self, folder: Path = DATA) -> None:
        """Load ``tokenizer.json`` and the chat template from `folder` (default: the small one that is shipped).

        Raises:
            OSError: a file is missing.
            ValueError: a file is broken, or there is no chat template.
        """
        try:
            self._tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
        except OSError:
            raise
        except Exception as error:  # tokenizers raises bare Exception for a broken file
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        self.folder = folder
        self.vocabulary_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._template = _environment().from_string(_template_of(folder))
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_characters = 0
        words = (DATA / "words.txt").read_text(encoding="utf-8").split()
        self.first_words = self._single_tokens([word.capitalize() for word in words])
        """(id, text) of each word that may begin an answer."""
        self.words = self._single_tokens([f" {word}" for word in words])
        """(id, text) of each word that may follow another, with the space before it."""
        if not self.words:
            raise ValueError(f"{folder}: not one common English word is a single token there")

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`; special tokens in it are recognised, none is added."""
        cached = self._cache.get(text)
        if cached is not None:
            self._cache.move_to_end(text)
            return cached
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._cache[text] = ids
        self._cached_characters += len(text)
        while self._cached_characters > CACHED_CHARACTERS:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_characters -= len(oldest)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included.

        Raises:
            ValueError: an id is negative or too large for a token.
        """
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        except (OverflowError, TypeError) as error:
            raise ValueError(str(error)) from error
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary entry of each id, in the byte-level alphabet; empty for an id that has none."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, as ``apply_chat_template(tokenize=False)`` gives it.

        Args:
            messages: role, content (text) and what else the template reads.
            tools: the tools as OpenAI shapes them, or None.
            add_generation_prompt: end with the head of an assistant's message.
            continue_final_message: cut after the last message's content, so that the model goes on with it.
            extra: more variables for the template (``chat_template_kwargs``).

        Raises:
            TemplateError: the template refuses these messages.
        """
        variables = dict(extra or {})
        variables.update(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        )
        try:
            text = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
            raise TemplateError(str(error)) from error
        if not continue_final_message:
            return text
        final = str(messages[-1].get("content") or "").strip()
        return text[: text.rindex(final) + len(final)] if final in text else text

    def _single_tokens(self, words: list[str]) -> list[tuple[int, str]]:
        """Those of `words` that are one token."""
        encoded = self._tokenizer.encode_batch(words, add_special_tokens=False)
        return [(item.ids[0], word) for word, item in zip(words, encoded, strict=True) if len(item.ids) == 1]


def _template_of(folder: Path) -> str:
    """The chat template of a model's folder: ``chat_template.jinja`` first, then ``tokenizer_config.json``."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ValueError(f"{folder}: no chat template")  # noqa: TRY004  # the file is wrong, not the caller
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates expect it: no escapes for letters outside ASCII, none for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)
