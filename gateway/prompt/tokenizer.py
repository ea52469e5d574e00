"""A model's tokenizer, set up from its directory as transformers 5 sets it up, and its chat templates.

transformers does more than read ``tokenizer.json``: tokens that only ``tokenizer_config.json`` names are added, and named
special tokens become added tokens (`tokenization_utils_tokenizers.py`). What that brings is known from the two files, so
that neither transformers nor torch is needed here. `add_bos_token` and `add_eos_token` have no effect: since version 5
the post-processor of ``tokenizer.json`` decides alone (DeepSeek's configuration says true, and no BOS is added).
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from gateway.prompt.splitting import Splitter
from gateway.prompt.template import ChatTemplates, TemplateError
from gateway.prompt.words import MAX_CHARACTERS, Words

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

_LLAMA_CLASSES = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})

_NOT_LLAMA = frozenset(
    {
        "deepseek_ocr",
        "deepseek_ocr2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "deepseek_vl_v2",
        "ernie4_5",
        "ernie4_5_moe",
        "h2ovl_chat",
        "internlm2",
        "jamba",
        "janus",
        "llava",
        "llava_next",
        "minicpm3",
        "minicpmv",
        "nemotron",
        "opencua",
        "openvla",
        "paddleocr_vl",
        "phi3",
        "phi3_v",
        "phimoe",
        "vipllava",
    }
)
"""Model types whose configuration names Llama's class and is known to be wrong: transformers keeps their file as it is."""

_PROBES = (
    "a",
    "Hello, world.",
    " leading and trailing \n",
    "\n\n",
    "1234 \u6771\u4eac na\u00efve e\u0301 \U0001f469\u200d\U0001f4bb",
)
"""Texts with which a freshly loaded tokenizer is checked: plain, spaces at the edges, digits, combining characters."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message says what is missing and where."""


class PromptTokenizer:
    """Text to token ids, exactly as the worker's tokenizer does it.

    Attributes:
        name: where it came from, for logs.
        templates: the model's chat templates; empty if it has none.
        special_tokens: the named ones (`bos_token`, ...), which templates may read.
        prefix: ids that `add_special_tokens` puts before a text.
        suffix: ids that it puts after a text.
        splitter: cuts texts without changing their tokens; None if this tokenizer does not allow it.
    """

    __slots__ = (
        "_added",
        "_tokenizer",
        "_words",
        "name",
        "prefix",
        "special_tokens",
        "splitter",
        "suffix",
        "templates",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        special_tokens: Mapping[str, str],
        name: str = "",
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.name = name
        self.templates = templates
        self.special_tokens = dict(special_tokens)
        self.prefix, self.suffix = self._surroundings()
        splitter = Splitter.create(tokenizer)
        self._words: Words | None = None
        self.splitter = splitter if splitter is not None and self._splits_exactly(splitter) else None
        self._added = {
            token.content: array("I", [index]) for index, token in tokenizer.get_added_tokens_decoder().items()
        }
        if self.splitter is not None and self.splitter.complete(self._added):
            self._words = Words.create(tokenizer)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "PromptTokenizer":
        """The tokenizer and the templates in a model's directory. Takes up to a second and some hundred MB for a while.

        Raises:
            TokenizerError: there is no ``tokenizer.json``, or one of the files cannot be understood.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory}: no tokenizer.json there")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path}: {error}") from error
        try:
            config = _read_config(directory)
            special_tokens = _adopt(tokenizer, config)
            templates = ChatTemplates.from_directory(directory)
        except TemplateError as error:
            raise TokenizerError(f"{directory}: {error}") from error
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise TokenizerError(f"{directory}: tokenizer_config.json cannot be understood: {error}") from error
        return cls(tokenizer, templates, special_tokens, name=str(directory))

    def encode(self, text: str) -> "array[int]":
        """The ids of `text` (uint32) without added special tokens.

        Thread-safe. Holds the interpreter's lock for short texts only.
        """
        if self._words is not None and len(text) <= MAX_CHARACTERS and text.isascii():
            head, rest = self._head(text)
            if rest is not None:
                return head + self._words.encode(rest)
        # The batch call is the one that builds no offsets: a fifth faster, and freed in no time.
        return array("I", self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _head(self, text: str) -> tuple["array[int]", str | None]:
        """The id of the added token with which a text begins, if any, and what follows; None if others do."""
        splitter = self.splitter
        assert splitter is not None
        content, rest = splitter.head(text)
        if rest is None or not content:
            return array("I"), rest
        return self._added[content], rest

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def split(self, text: str) -> list[str]:
        """`text` in pieces whose ids, put together, are the ids of the whole; one piece if it cannot be cut."""
        return [text] if self.splitter is None else self.splitter.split(text)

    def _surroundings(self) -> tuple["array[int]", "array[int]"]:
        """What the post-processor puts before and after a text.

        Raises:
            TokenizerError: it does something else than that.
        """
        prefix: list[int] = []
        suffix: list[int] = []
        for position, probe in enumerate(_PROBES):
            bare = self._tokenizer.encode(probe, add_special_tokens=False).ids
            full = self._tokenizer.encode(probe, add_special_tokens=True).ids
            if position == 0:
                added = len(full) - len(bare)
                start = next((at for at in range(added + 1) if full[at : at + len(bare)] == bare), 0)
                prefix, suffix = full[:start], full[start + len(bare) :]
            if full != [*prefix, *bare, *suffix]:
                raise TokenizerError(f"{self.name}: its post-processor does more than add tokens around a text")
        return array("I", prefix), array("I", suffix)

    def _splits_exactly(self, splitter: Splitter) -> bool:
        """Whether pieces and whole agree on texts that put each kind of added token between the probes."""
        tokens = list(self._tokenizer.get_added_tokens_decoder().values())
        kinds = {(token.lstrip, token.rstrip, token.normalized, token.single_word): token.content for token in tokens}
        for content in {*kinds.values(), tokens[0].content, tokens[-1].content}:
            for left in _PROBES:
                text = "".join(f"{left}{content}{right}{content}" for right in _PROBES)
                pieces = splitter.split(text)
                if self.encode(text) != sum((self.encode(piece) for piece in pieces), array("I")):
                    return False
        return True


def _read_config(directory: Path) -> dict[str, Any]:
    """``tokenizer_config.json``; older models name their special tokens in ``special_tokens_map.json`` too."""
    config: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if not path.is_file() or (name == "special_tokens_map.json" and "added_tokens_decoder" in config):
            continue
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise TypeError(f"{name} is no object")
        config |= values
    path = directory / "config.json"
    if path.is_file():
        config["model_type"] = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    return config


def _adopt(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Apply the configuration to a tokenizer and return its named special tokens."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = {
        entry["content"]: _added_token(entry)
        for _, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    }
    missing = [token for content, token in declared.items() if content not in known]
    if missing:
        tokenizer.add_tokens(missing)
        known.update(token.content for token in missing)
    named: dict[str, str] = {}
    for name, value in config.items():
        if not (name in _NAMED or name.endswith("_token")) or not isinstance(value, str | dict):
            continue
        token = AddedToken(value, special=True, normalized=False) if isinstance(value, str) else _added_token(value)
        named[name] = token.content
        if token.content not in known:
            tokenizer.add_special_tokens([declared.get(token.content, token)])
            known.add(token.content)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    for value in extra.values() if isinstance(extra, dict) else extra:
        token = AddedToken(value, special=True, normalized=False) if isinstance(value, str) else _added_token(value)
        if token.content not in known:
            tokenizer.add_special_tokens([token])
            known.add(token.content)
    if isinstance(extra, dict):
        named |= {name: value if isinstance(value, str) else value["content"] for name, value in extra.items()}
    if config.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    if config.get("tokenizer_class") in _LLAMA_CLASSES and config.get("model_type") not in _NOT_LLAMA:
        _make_llama(tokenizer, config)
    return named


def _make_llama(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """What transformers' `LlamaTokenizer` puts in the place of the file's normalizer and pre-tokenizer."""
    space = config.get("add_prefix_space")
    scheme = "never" if space is False else "always" if config.get("legacy", False) else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
    return AddedToken(entry["content"], normalized=bool(entry.get("normalized", not flags["special"])), **flags)
