"""What an answer says about its own tokens, read from its end: nothing is parsed while it streams.

A usage object stands near the end of every dialect's answers, but the beginning of the JSON document that it belongs to may be long gone. Put
behind the brackets that were open at that place, the rest of the document is a document again, and only if the member stands exactly where it
must: a ``"usage"`` inside a tool's arguments leaves brackets over, and one inside a text has escaped quotes.
"""

import re
from typing import Any, Final

import msgspec
import orjson

from gateway.http.routes import Dialect

_KEY: Final = b'"usage"'
_OBJECT: Final = re.compile(rb"\s*:\s*\{")
_BACKSLASH: Final = ord("\\")
_TRIES: Final = 8

_TOP: Final = b"{"
_IN_MESSAGE: Final = b'{"message":{'
_IN_RESPONSE: Final = b'{"response":{'


class Usage(msgspec.Struct, frozen=True):
    """The tokens of one request, as its worker counted them.

    Attributes:
        prompt_tokens: all of the prompt, cached ones included, in every dialect.
        completion_tokens: generated; 0 where nothing is.
        cached_tokens: those of the prompt that were in the worker's cache, in any tier; None when it does not tell (vLLM needs
            ``--enable-prompt-tokens-details``, SGLang ``--enable-cache-report``).
        created_tokens: those that it newly put there; None when it does not tell.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    created_tokens: int | None = None


def read_usage(last: bytes, dialect: Dialect, *, stream: bool, first: bytes = b"") -> Usage | None:
    """The usage in an answer, or None when there is none to be found.

    Args:
        last: the end of its body, without framing, cut anywhere (`gateway.http.tail.Tail.last`).
        dialect: of the route.
        stream: the answer is a stream of server-sent events.
        first: the beginning of its body; only streams of messages say something there.
    """
    if dialect is Dialect.ANTHROPIC:
        found = _find(last, _TOP, stream=stream) or {}
        if stream:
            # What the end does not repeat was said at the beginning.
            start = _find(first, _IN_MESSAGE, stream=True) or _find(last, _IN_MESSAGE, stream=True) or {}
            found = {**start, **{name: value for name, value in found.items() if value is not None}}
        return _of_messages(found)
    if dialect is Dialect.RESPONSES:
        return _of_responses(_find(last, _IN_RESPONSE if stream else _TOP, stream=stream) or {})
    return _of_completions(_find(last, _TOP, stream=stream) or {})


def _find(data: bytes, opening: bytes, *, stream: bool) -> dict[str, Any] | None:
    """The last usage object that stands within `opening`: ``{`` for the top level of its document."""
    end = len(data)
    tries = 0
    while tries < _TRIES:
        end = data.rfind(_KEY, 0, end)
        if end <= 0:
            # At 0 nobody knows whether the quote is an escaped one.
            return None
        if data[end - 1] == _BACKSLASH or not _OBJECT.match(data, end + len(_KEY)):
            continue
        tries += 1
        stop = data.find(b"\n", end) if stream else -1
        rest = data[end:stop] if stop >= 0 else data[end:]
        try:
            document = orjson.loads(opening + rest)
        except orjson.JSONDecodeError:
            continue
        while "usage" not in document:
            # One level for each bracket of `opening`.
            (document, *_) = document.values()
        usage = document["usage"]
        if isinstance(usage, dict):
            return usage
    return None


def _of_completions(found: dict[str, Any]) -> Usage | None:
    prompt = _count(found.get("prompt_tokens"))
    if prompt is None:
        return None
    details = _details(found, "prompt_tokens_details")
    return Usage(
        prompt,
        _count(found.get("completion_tokens")) or 0,
        _count(details.get("cached_tokens")),
        _count(details.get("created_cache_tokens")),
    )


def _of_responses(found: dict[str, Any]) -> Usage | None:
    prompt = _count(found.get("input_tokens"))
    if prompt is None:
        return None
    details = _details(found, "input_tokens_details")
    return Usage(
        prompt,
        _count(found.get("output_tokens")) or 0,
        _count(details.get("cached_tokens")),
        _count(details.get("created_cache_tokens")),
    )


def _of_messages(found: dict[str, Any]) -> Usage | None:
    """Anthropic's ``input_tokens`` leaves out what was read from the cache and what was put there."""
    rest = _count(found.get("input_tokens"))
    if rest is None:
        return None
    cached = _count(found.get("cache_read_input_tokens"))
    created = _count(found.get("cache_creation_input_tokens"))
    return Usage(rest + (cached or 0) + (created or 0), _count(found.get("output_tokens")) or 0, cached, created)


def _details(found: dict[str, Any], name: str) -> dict[str, Any]:
    details = found.get(name)
    return details if isinstance(details, dict) else {}


def _count(value: Any) -> int | None:
    """A number of tokens; None for anything else."""
    return value if type(value) is int and value >= 0 else None
