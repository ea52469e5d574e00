"""Where a text may be cut so that the tokens of the pieces, put together, are the tokens of the whole.

`tokenizers` looks for added tokens first: leftmost, longest, those with ``normalized: false`` in the raw text and then
the others in each normalized piece. What lies between two of them is normalized, pre-tokenized and encoded on its own.
So a text may be cut before an added token, as long as

* the token is found in the raw text and takes no white space with it (no `lstrip`, `rstrip` or `single_word`), and
* no step looks further than whether it stands at the very start of the text (Metaspace with ``prepend_scheme: first``
  does that): each piece but the first begins with an added token, so that what follows it is at no start either.

`Splitter.create` returns None for tokenizers of which that is not known.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

SLICE = 16 * 1024
"""Characters that are scanned in one call of `re`, which holds the interpreter's lock until it returns."""

MAX_PIECES = 4096
"""Above this many pieces (a text of special tokens only), only every `WIDE` characters is a cut."""

WIDE = 512

_POSITION_FREE = frozenset(
    {
        "BertNormalizer",
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Lowercase",
        "Metaspace",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Punctuation",
        "Replace",
        "Split",
        "Strip",
        "StripAccents",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    }
)
"""Normalizers and pre-tokenizers that treat a piece alike wherever it stands, but for the start of the text."""


class Splitter:
    """Cuts texts before added tokens.

    Args:
        found: the contents of all added tokens that are looked for in the raw text.
        cuts: those of them before which a text may be cut.
    """

    __slots__ = ("_cuts", "_first", "_longest", "_pattern", "_tokens")

    def __init__(self, found: Iterable[str], cuts: Iterable[str]) -> None:
        tokens = sorted(set(found))
        self._tokens = tuple(tokens)
        self._first = sorted({token[0] for token in tokens})
        self._pattern = re.compile(_alternatives(tokens))
        self._cuts = frozenset(cuts)
        self._longest = max(map(len, tokens))

    @classmethod
    def create(cls, tokenizer: Tokenizer) -> "Splitter | None":
        """For a tokenizer as it will encode; None if cutting its texts is not known to be exact."""
        normalizer = _state(tokenizer.normalizer)
        if not _position_free(normalizer) or not _position_free(_state(tokenizer.pre_tokenizer)):
            return None
        if getattr(tokenizer.model, "dropout", None) or tokenizer.encode_special_tokens:
            return None
        tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        raw = [token for token in tokens if not token.normalized]
        late = [token for token in tokens if token.normalized]
        if _is_identity(normalizer) and not _overlap(raw, late):
            raw += late
        cuts = {
            token.content
            for token in raw
            if not (token.lstrip or token.rstrip or token.single_word) and token.content.strip() == token.content
        }
        return cls([token.content for token in raw], cuts) if cuts else None

    def complete(self, contents: Iterable[str]) -> bool:
        """Whether a text may be cut before each of these added tokens."""
        return self._cuts.issuperset(contents)

    def head(self, text: str) -> tuple[str, str | None]:
        """The added token with which `text` begins (or nothing), and the rest; None for a rest that has others in it."""
        match = self._pattern.match(text)
        head = match.group() if match is not None else ""
        rest = text[len(head) :]
        return (head, None) if self.begins_in(rest) and self._pattern.search(rest) is not None else (head, rest)

    def cuts_before(self, text: str) -> bool:
        """Whether `text` begins with an added token before which it may be cut."""
        match = self._pattern.match(text)
        return match is not None and match.group() in self._cuts

    def begins_in(self, text: str) -> bool:
        """Whether an added token might begin somewhere in `text`, whatever follows it; True if in doubt."""
        for first in self._first:  # noqa: SIM110  # a generator would cost more than the look itself
            if first in text:
                return True
        return False

    def reaches_over(self, text: str) -> bool:
        """Whether an added token might begin in `text` and end after it, whatever follows it."""
        last = len(text)
        for start in range(max(0, last - self._longest + 1), last):
            if text[start] in self._first:
                rest = text[start:]
                if any(len(token) > len(rest) and token.startswith(rest) for token in self._tokens):
                    return True
        return False

    def tries(self, text: str) -> int:
        """At how many places of `text` a token might begin: what `split` costs (counted at memory speed)."""
        return sum(text.count(first) for first in self._first)

    def split(self, text: str) -> list[str]:
        """The pieces of `text`, which put together are `text`; each but the first begins with an added token."""
        starts = self._starts(text)
        if len(starts) > MAX_PIECES:
            starts = _thin(starts)
        if not starts:
            return [text]
        ends = [*starts[1:], len(text)]
        pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        if starts[0]:
            pieces.insert(0, text[: starts[0]])
        return pieces

    def _starts(self, text: str) -> list[int]:
        cuts, pattern = self._cuts, self._pattern
        if len(text) <= SLICE:
            return [match.start() for match in pattern.finditer(text) if match.group() in cuts]
        starts: list[int] = []
        position = 0
        while position < len(text):
            end = position + SLICE
            # A token may reach over the end of the slice, so that matches that start in its last characters count
            # only in the next slice, which begins where this one stopped being sure.
            sure = end if end >= len(text) else end - self._longest + 1
            matches = list(pattern.finditer(text, position, end))
            while matches and matches[-1].start() >= sure:
                matches.pop()
            starts += [match.start() for match in matches if match.group() in cuts]
            position = max(sure, matches[-1].end()) if matches else sure
        return starts


def _alternatives(tokens: Sequence[str]) -> str:
    """A pattern for the longest of `tokens` (sorted, distinct) that matches, as a tree of their characters.

    As a flat list of alternatives, a text of a million beginnings of tokens would have each of them tried each time.
    """
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[:1], []).append(token[1:])
    ends = by_first.pop("", None) is not None
    branches = []
    for first, rests in by_first.items():
        prefix, tails = first, rests
        while len({tail[:1] for tail in tails}) == 1 and tails[0]:
            prefix += tails[0][0]
            tails = [tail[1:] for tail in tails]
        branches.append(re.escape(prefix) + (_alternatives(tails) if any(tails) else ""))
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return f"{body}?" if ends else body


def _thin(starts: Sequence[int]) -> list[int]:
    kept: list[int] = []
    for start in starts:
        if not kept or start - kept[-1] >= WIDE:
            kept.append(start)
    return kept


def _position_free(step: Mapping[str, Any] | None) -> bool:
    if step is None:
        return True
    kind = step["type"]
    if kind == "Sequence":
        return all(_position_free(part) for part in step.get("normalizers") or step.get("pretokenizers") or ())
    return kind in _POSITION_FREE


def _is_identity(normalizer: Mapping[str, Any] | None) -> bool:
    return normalizer is None or (normalizer["type"] == "Sequence" and not normalizer.get("normalizers"))


def _state(step: Any) -> Mapping[str, Any] | None:
    """A normalizer's or pre-tokenizer's description, as in ``tokenizer.json``."""
    return None if step is None else json.loads(step.__getstate__())


def _overlap(raw: Iterable[AddedToken], late: Iterable[AddedToken]) -> bool:
    """Whether an occurrence of one of `raw` can share characters with one of `late`.

    If not, looking for both at once finds what looking for `raw` first and then for `late` between them finds.
    """
    others = [token.content for token in late]
    for token in raw:
        content = token.content
        for other in others:
            if content in other or other in content:
                return True
            for size in range(1, min(len(content), len(other))):
                if content.endswith(other[:size]) or other.endswith(content[:size]):
                    return True
    return False
