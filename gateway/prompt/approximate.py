"""Pseudo-tokens for prompts whose real tokens are not known: four bytes of a canonical form of the request each.

Two requests whose conversations begin alike have pseudo-tokens that begin alike, and a conversation that grows keeps
the ones it had, which is all that matching prefixes needs. They say nothing of how a worker cuts its blocks: matches
are good enough to keep a conversation on its worker, and must never be mixed with real tokens under one namespace.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

BYTES_PER_TOKEN = 4
"""English text has 4.0 to 4.5 bytes a token with today's vocabularies, so that counts come out about right too."""

_LONG_DATA = 1024
"""Images and the like that are longer than this are replaced by a digest: their length says nothing of their tokens."""

_DATA_FIELDS = frozenset({"data", "url", "image_url", "video_url", "audio_url", "file_data", "input_audio"})

_DEPTH = 64
"""Deeper nesting is left out."""


def pseudo_tokens(body: Mapping[str, Any], max_bytes: int) -> "array[int]":
    """The pseudo-tokens (uint32) of a request body, of its first `max_bytes` canonical bytes at most.

    Never raises on any JSON.
    """
    data = bytearray()
    for piece in _pieces(body):
        data += piece
        if len(data) >= max_bytes:
            del data[max_bytes:]
            break
    data += b"\0" * (-len(data) % BYTES_PER_TOKEN)
    tokens = array("I")
    tokens.frombytes(bytes(data))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    """The parts of a body that make its prompt, in the order in which templates print them."""
    for name in ("tools", "system", "instructions"):
        if body.get(name):
            yield _canonical(body[name])
    for name in ("messages", "input", "prompt", "inputs"):
        value = body.get(name)
        for item in value if isinstance(value, list) else (value,):
            if item is not None:
                yield _canonical(item)


def _canonical(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return orjson.dumps(_clean(value, 0), option=orjson.OPT_SORT_KEYS) + b"\n"
    except (TypeError, ValueError):  # not JSON (a caller's own object): it has no text to go by
        return b"\n"


def _clean(value: Any, depth: int) -> Any:
    """`value` without what changes between turns or says nothing of the prompt's length."""
    if depth >= _DEPTH:
        return None
    if isinstance(value, dict):
        return {
            name: _digest(item) if name in _DATA_FIELDS and isinstance(item, str) else _clean(item, depth + 1)
            for name, item in value.items()
            if name != "cache_control"
        }
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    return value


def _digest(data: str) -> str:
    if len(data) <= _LONG_DATA:
        return data
    return hashlib.blake2b(data.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
