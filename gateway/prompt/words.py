r"""Short ASCII texts to ids by their words, for byte-level BPE tokenizers: a third of what `tokenizers` takes.

Most of the time of encoding a question goes into the regular expression that cuts it into words, run by a library that
knows all of Unicode. In ASCII, ``\p{L}`` is ``A-Za-z`` and normalization changes nothing, so that Python's `re` can cut the
text with the same pattern; and words repeat, so that their ids come from a dict.

Where all white space is single spaces, not even that is needed. In the patterns of these tokenizers white space stands only
at the beginning of a word, in a run of white space, or as the line ends behind punctuation, so that a word never goes on over a space
between two other characters: a text may be cut there, and its parts repeat as words do. `create` tries that, too.
Measured on a question of 120 characters with Qwen3's tokenizer: PLACEHOLDER us instead of 34 us.

Which tokenizers: one `Split` by a pattern of which every class is known here, then `ByteLevel`; BPE; normalizer none or
NFC. A tokenizer for which `create` finds a word that comes out otherwise is left alone.
"""

import json
import random
import re
from array import array
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tokenizers import Tokenizer

MAX_CHARACTERS = 2048
"""Longer texts are left to `tokenizers`, which holds no lock."""

_MAX_WORDS = 50_000
_MAX_WORD = 32

_CLASSES = {
    r"\p{L}": "A-Za-z",
    r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z",
    r"\p{Lt}": "",
    r"\p{Lm}": "",
    r"\p{Lo}": "",
    r"\p{M}": "",
    r"\p{N}": "0-9",
    r"\s": r"\t-\r ",
}
"""Unicode classes, and what is left of them in ASCII. Python's own ``\\s`` has four control characters more."""

_TOKEN = re.compile(r"\\p\{\w+\}|\\.|\[\^?|\]|.", re.DOTALL)


V = TypeVar("V")


class _Ids(dict[str, V], Generic[V]):
    """Texts to packed ids, made when they are first asked for.

    Args:
        make: gives the ids of a text that is not there.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[str], V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, text: str) -> V:
        made = self._make(text)
        if len(text) <= _MAX_WORD:
            if len(self) >= _MAX_WORDS:
                self.clear()
            self[text] = made
        return made


class Words:
    """The ids of short ASCII texts.

    Args:
        tokenizer: gives the ids of words.
        pattern: finds a text's words.
    """

    __slots__ = ("_ids", "_model", "_parts", "_starts", "_words")

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        self._model = tokenizer.model
        self._words = pattern.findall
        self._ids: _Ids[bytes] = _Ids(self._word)
        self._starts: _Ids[bytes] = _Ids(self._in_words)
        self._parts: _Ids[bytes | None] | None = _Ids(self._part)

    @classmethod
    def create(cls, tokenizer: Tokenizer) -> "Words | None":
        """For a tokenizer; None if it is not of the known kind, or does otherwise on random texts."""
        pattern = _pattern(tokenizer)
        if pattern is None:
            return None
        words = cls(tokenizer, pattern)
        rng = random.Random(0)
        alphabet = "".join(map(chr, range(128))) + " \n'" * 12 + "aeZ09sdtl" * 6
        for _ in range(200):
            text = "".join(rng.choices(alphabet, k=rng.randint(1, 60)))
            right = tokenizer.encode(text, add_special_tokens=False).ids
            if list(array("I", words._in_words(text))) != right:
                return None
            spaced = words._in_parts(text)
            if spaced is not None and list(array("I", spaced)) != right:
                words._parts = None
        return words

    def encode(self, text: str) -> "array[int]":
        """The ids (uint32) of an ASCII text without added tokens."""
        packed = self._in_parts(text)
        return array("I", self._in_words(text) if packed is None else packed)

    def _in_parts(self, text: str) -> bytes | None:
        """The packed ids, if the text may be cut at all of its spaces."""
        if self._parts is None:
            return None
        first, space, rest = text.partition(" ")
        if not space:
            return None
        parts = list(map(self._parts.__getitem__, rest.split(" ")))
        if None in parts or not first or first[-1] in _BLANKS:
            return None
        return self._starts[first] + b"".join(parts)  # type: ignore[arg-type]  # none is None

    def _in_words(self, text: str) -> bytes:
        return b"".join(map(self._ids.__getitem__, self._words(text)))

    def _part(self, part: str) -> bytes | None:
        """The packed ids of a space and what follows it up to the next one; None if that is or touches white space."""
        if not part or part[0] in _BLANKS or part[-1] in _BLANKS:
            return None
        return self._in_words(f" {part}")

    def _word(self, word: str) -> bytes:
        return array("I", [token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))]).tobytes()


_BLANKS = "\t\n\v\f\r "
_BYTE_LEVEL = {code: 0x100 + code if code <= 0x20 else 0x121 for code in (*range(0x21), 0x7F)}
"""How GPT-2's byte alphabet writes the bytes that are not printable: shifted to U+0100, in their order."""


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The tokenizer's word pattern for ASCII, or None if it is not of the known kind."""
    if type(tokenizer.model).__name__ != "BPE" or getattr(tokenizer.model, "dropout", None):
        return None
    normalizer, step = tokenizer.normalizer, tokenizer.pre_tokenizer
    if (normalizer is not None and json.loads(normalizer.__getstate__())["type"] != "NFC") or step is None:
        return None
    steps: list[dict[str, Any]] = json.loads(step.__getstate__()).get("pretokenizers") or []
    if [part["type"] for part in steps] != ["Split", "ByteLevel"]:
        return None
    split, level = steps
    if level["add_prefix_space"] or level["use_regex"] or split["behavior"] != "Isolated" or split["invert"]:
        return None
    source = split["pattern"].get("Regex")
    translated = _to_ascii(source) if source else None
    return None if translated is None else re.compile(translated, re.ASCII)


def _to_ascii(source: str) -> str | None:
    """A pattern that matches in ASCII what `source` matches there; None if it has classes that are not known."""
    written: list[str] = []
    inside = False
    for part in _TOKEN.findall(source):
        if part in _CLASSES:
            members = _CLASSES[part]
            if not inside and not members:
                return None
            written.append(members if inside else f"[{members}]")
        elif part == r"\S" and not inside:
            written.append(r"[^\t-\r ]")
        elif len(part) > 1 and part[0] == "\\" and part[1].isalpha() and part not in (r"\r", r"\n", r"\t"):
            return None
        else:
            inside = part[0] == "[" or (inside and part != "]")
            written.append(part)
    return "".join(written)
