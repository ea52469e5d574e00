r"""Short ASCII texts to ids by their words, for byte-level BPE tokenizers: a third of what `tokenizers` takes.

Most of the time of encoding a question goes into the regular expression that cuts it into words, run by a library that
knows all of Unicode. In ASCII, ``\p{L}`` is ``A-Za-z`` and normalization changes nothing, so that Python's `re` can cut the
text with the same pattern; and words repeat, so that their ids come from a dict. Measured on a question of 120
characters with Qwen3's tokenizer: 9 us instead of 31 us.

Which tokenizers: one `Split` by a pattern of which every class is known here, then `ByteLevel`; BPE; normalizer none or
NFC. A tokenizer for which `create` finds a word that comes out otherwise is left alone.
"""

import json
import random
import re
from array import array
from collections.abc import Callable
from typing import Any

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

_WHITE = "\t\n\v\f\r "

_SPACED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Alternatives of the patterns of Qwen, Llama 3 and GPT-4o. None of them matches a space after anything but white space, so
that a space after another character begins a word; and none looks further than its match, except to see whether a
character that is no white space follows, which neither the space nor the text's end is."""

_TOKEN = re.compile(r"\\p\{\w+\}|\\.|\[\^?|\]|.", re.DOTALL)


class _Ids(dict[str, bytes]):
    """Texts to packed ids, made when they are first asked for.

    Args:
        make: gives the ids of a text that is not there.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[str], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, text: str) -> bytes:
        made = self._make(text)
        if len(text) <= _MAX_WORD:
            if len(self) >= _MAX_WORDS:
                self.clear()
            self[text] = made
        return made


class _UnevenError(Exception):
    """A space has white space beside it, or the text's edge."""


class Words:
    """The ids of short ASCII texts.

    Args:
        tokenizer: gives the ids of words.
        pattern: finds a text's words.
        spaced: a space between two characters that are no white space always begins a word, and nothing before it depends on
            what follows it (`_SPACED`). Such texts are cut at their spaces, which takes a third of what the pattern takes.
    """

    __slots__ = ("_chunks", "_ids", "_model", "_spaced", "_words")

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str], *, spaced: bool = False) -> None:
        self._model = tokenizer.model
        self._words = pattern.findall
        self._ids = _Ids(self._word)
        self._chunks = _Ids(self._chunk)
        self._spaced = spaced

    @classmethod
    def create(cls, tokenizer: Tokenizer) -> "Words | None":
        """For a tokenizer; None if it is not of the known kind, or does otherwise on random texts."""
        source = _source(tokenizer)
        translated = None if source is None else _to_ascii(source)
        if source is None or translated is None:
            return None
        words = cls(tokenizer, re.compile(translated, re.ASCII), spaced=_is_spaced(source))
        rng = random.Random(0)
        alphabet = "".join(map(chr, range(128))) + " \n'" * 12 + "aeZ09sdtl" * 6
        for _ in range(200):
            text = "".join(rng.choices(alphabet, k=rng.randint(1, 60)))
            if list(words.encode(text)) != tokenizer.encode(text, add_special_tokens=False).ids:
                return None
        return words

    def encode(self, text: str) -> "array[int]":
        """The ids (uint32) of an ASCII text without added tokens."""
        if self._spaced:
            first, space, rest = text.partition(" ")
            if space and first and first[-1] not in _WHITE:
                try:
                    return array("I", self._all(first) + b"".join(map(self._chunks.__getitem__, rest.split(" "))))
                except _UnevenError:
                    pass
        return array("I", self._all(text))

    def _all(self, text: str) -> bytes:
        return b"".join(map(self._ids.__getitem__, self._words(text)))

    def _chunk(self, chunk: str) -> bytes:
        """The ids of what follows a space, and of the space.

        Raises:
            _UnevenError: it has white space at an edge.
        """
        if not chunk or chunk[0] in _WHITE or chunk[-1] in _WHITE:
            raise _UnevenError
        return self._all(f" {chunk}")

    def _word(self, word: str) -> bytes:
        return array("I", [token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))]).tobytes()


_BYTE_LEVEL = {code: 0x100 + code if code <= 0x20 else 0x121 for code in (*range(0x21), 0x7F)}
"""How GPT-2's byte alphabet writes the bytes that are not printable: shifted to U+0100, in their order."""


def _source(tokenizer: Tokenizer) -> str | None:
    """The tokenizer's word pattern, or None if it is not of the known kind."""
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
    source: str | None = split["pattern"].get("Regex")
    return source or None


def _is_spaced(source: str) -> bool:
    """Whether a pattern consists of alternatives of `_SPACED` only."""
    while source:
        known = next((one for one in _SPACED if source == one or source.startswith(f"{one}|")), None)
        if known is None:
            return False
        source = source[len(known) + 1 :]
    return True


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
