"""Members put into a JSON body without touching any other byte of it: usage wanted, token ids given, a tenant's salt, hints."""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import count
from typing import Any

import orjson

_OPTIONS = "stream_options"
_INCLUDE = "include_usage"
_TRANSFER = "kv_transfer_params"
_IDS = "prompt_token_ids"
_SALT = "cache_salt"
_LONGEST_VALUE = 4096
"""Bytes of a value that is to be replaced; clients write some 30. Longer ones are left alone: Python walks them token by token."""

_PARTS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_PLAIN = re.compile(rb"[^\s,\]}]+")


def with_include_usage(body: bytes, parsed: Mapping[str, Any], *, worker_default: bool = True) -> bytes:
    """`body` with ``stream_options.include_usage`` set to true, or `body` itself where that is not to be done.

    It is not done for an answer that is no stream, where the client asks for usage itself, where a type is odd (the worker judges it), and where
    the client sets ``continuous_usage_stats``: vLLM would then write usage into every event, which could not be taken out again.

    Args:
        body: a JSON object that `gateway.http.body.parse_json` takes.
        parsed: what it is parsed to; members that were spliced into `body` since may be missing.
        worker_default: what the worker takes ``include_usage`` for in a ``stream_options`` object without it. True for vLLM: such a client gets
            usage already, and must go on getting it, so the body stays as it is. False for SGLang.
    """
    if parsed.get("stream") is not True:
        return body
    options = parsed.get(_OPTIONS)
    if options is None:
        return _with_member(body, parsed, _OPTIONS, b'{"%b":true}' % _INCLUDE.encode())
    if not isinstance(options, dict) or options.get("continuous_usage_stats"):
        return body
    if _INCLUDE in options:
        # An equality would take 0 for False.
        if options[_INCLUDE] is not None and options[_INCLUDE] is not False:
            return body
    elif worker_default:
        return body
    return _with_inner(body, parsed, _OPTIONS, _INCLUDE, b"true")


def with_token_ids(body: bytes, parsed: Mapping[str, Any], ids_json: bytes) -> bytes:
    """`body` with ``kv_transfer_params.prompt_token_ids`` set, or `body` itself where they are given or the parameters are no object.

    Args:
        body: a chat request that `gateway.http.body.parse_json` takes.
        parsed: what it is parsed to; members that were spliced into `body` since may be missing.
        ids_json: the prompt's token ids as a JSON list.
    """
    if _TRANSFER not in parsed:
        return _with_member(body, parsed, _TRANSFER, b'{"%b":%b}' % (_IDS.encode(), ids_json))
    parameters = parsed[_TRANSFER]
    if not isinstance(parameters, dict) or _IDS in parameters:
        return body
    return _with_inner(body, parsed, _TRANSFER, _IDS, ids_json)


def with_cache_salt(body: bytes, parsed: Mapping[str, Any], salt: str) -> bytes | None:
    """`body` with ``cache_salt`` set to `salt`, whatever it was; None where it was so long that it can't be replaced.

    Args:
        body: a JSON object that `gateway.http.body.parse_json` takes.
        parsed: what it is parsed to; members that were spliced into `body` since may be missing.
        salt: the text.
    """
    salted = _with_member(body, parsed, _SALT, orjson.dumps(salt))
    # A body that stays as it is was too long, or has had the salt before.
    return None if salted is body and parsed.get(_SALT) != salt else salted


def with_member(body: bytes, parsed: Mapping[str, Any], name: str, value: bytes) -> bytes:
    """`body` with its top-level member `name` set to `value`, which is JSON; `body` itself where what is there is too long to be replaced.

    Args:
        body: a JSON object that `gateway.http.body.parse_json` takes.
        parsed: what it is parsed to; members that were spliced into `body` since may be missing, unless they are called `name`.
        name: ASCII letters and ``_``.
        value: JSON.
    """
    return _with_member(body, parsed, name, value)


def _with_inner(body: bytes, parsed: Mapping[str, Any], name: str, inner: str, value: bytes) -> bytes:
    """`body` with the member `inner` of the object in its member `name` set."""
    start = _value_start(body, parsed, name)
    if inner not in parsed[name]:
        return _inserted(body, start, inner, value, alone=not parsed[name])
    end = _value_end(body, start)
    if end is None:
        return body
    return b"".join((body[:start], _with_member(body[start:end], parsed[name], inner, value), memoryview(body)[end:]))


def _with_member(body: bytes, parsed: Mapping[str, Any], name: str, value: bytes) -> bytes:
    """`body` with its member `name` set to `value`, which is JSON; `body` itself where a present value is too long."""
    if name not in parsed:
        # Before the first brace of a JSON object there is nothing but white space.
        return _inserted(body, body.index(b"{"), name, value, alone=not parsed)
    start = _value_start(body, parsed, name)
    end = _value_end(body, start)
    return body if end is None else b"".join((body[:start], value, memoryview(body)[end:]))


def _inserted(body: bytes, brace: int, name: str, value: bytes, *, alone: bool) -> bytes:
    """`body` with a new first member in the object that begins at `brace`; `alone`: it has no other."""
    comma = b"" if alone else b","
    return b"".join((body[: brace + 1], b'"%b":%b%b' % (name.encode(), value, comma), memoryview(body)[brace + 1 :]))


def _value_start(body: bytes, parsed: Mapping[str, Any], name: str) -> int:
    """Where the value of the top-level member `name` begins; of a repeated one the last, which is the one that counts for a parser.

    As `gateway.http.body.with_model` finds the model: a regular expression finds every key that is spelled so. When there is only one, it is
    the top-level one. Else each gets a name of its own, and the names that a parser then finds at the top tell.
    """
    key = _key(name)
    found = list(key.finditer(body))
    if len(found) > 1:
        mark = name
        while any(other.startswith(mark) and other != name for other in parsed):
            mark += "#"
        mark += "#"
        numbers = count()
        marked = orjson.loads(key.sub(lambda _: b'"%b%d":' % (mark.encode(), next(numbers)), body))
        numbered = [int(other[len(mark) :]) for other in marked if other.startswith(mark)]
        return found[max(numbered)].end()
    return found[0].end()


def _value_end(body: bytes, start: int) -> int | None:
    """Where the value that begins at `start` ends; None when it is longer than what is looked through."""
    limit = start + _LONGEST_VALUE
    if body[start] not in b'"[{':
        match = _PLAIN.match(body, start, limit)
        return None if match is None or match.end() == limit else match.end()
    depth = 0
    for part in _PARTS.finditer(body, start, limit):
        if part[0] in {b"{", b"["}:
            depth += 1
        elif part[0] in {b"}", b"]"}:
            depth -= 1
        if not depth:
            return part.end()
    return None


@lru_cache(maxsize=16)
def _key(name: str) -> re.Pattern[bytes]:
    """A pattern for ``"<name>":`` with any of the escapes that JSON allows and the white space behind it; `name` is ASCII letters and ``_``."""
    letters = b"".join(b"(?:%b|\\\\u(?i:%04x))" % (letter.encode(), ord(letter)) for letter in name)
    return re.compile(b'"%b"\\s*:\\s*' % letters)
