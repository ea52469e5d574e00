"""Request bodies: reading them within limits, finding the model in them, and renaming it without touching anything else."""

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp.web_protocol import RequestPayloadError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.http.errors import client_error

if TYPE_CHECKING:
    from aiohttp.streams import StreamReader

_RATE_WINDOW = 5.0
_MODEL_FIELD_LIMIT = 1024
# Python parses parts one callback at a time, some 10 us each; Starlette, and so vLLM, takes 1,000 fields and 1,000 files.
_MAX_PARTS = 2000


def body_at_hand(payload: "StreamReader", limit: int) -> bytes:
    """The whole of a body that has arrived with its head.

    Raises:
        GatewayError: 413 above `limit` bytes.
    """
    body = payload.read_nowait(-1)
    if len(body) > limit:
        raise _too_large(limit)
    return body


async def read_body(payload: "StreamReader", *, limit: int, rate: int) -> bytes:
    """The whole body.

    Args:
        payload: aiohttp's stream.
        limit: most bytes that are taken.
        rate: least bytes a second, measured over windows of 5 s; 0 for any.

    Raises:
        GatewayError: 413 above `limit`, 408 when it comes too slowly, 400 when its framing is broken.
    """
    if payload.is_eof():
        return body_at_hand(payload, limit)
    payload.set_read_chunk_size(min(limit, 4 * 1024 * 1024))
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            due = size + rate * _RATE_WINDOW
            try:
                async with asyncio.timeout(_RATE_WINDOW):
                    while not payload.is_eof() or not payload.at_eof():
                        piece = await payload.readany()
                        size += len(piece)
                        if size > limit:
                            raise _too_large(limit)
                        pieces.append(piece)
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            except TimeoutError:
                if size < due:
                    raise client_error(408, "body_timeout", "The request body came too slowly.", close=True) from None
    except RequestPayloadError as error:
        # A malformed chunk, or the end of the connection before the end of the body.
        raise client_error(400, "invalid_body", "The request body is not framed correctly.", close=True) from error


def _too_large(limit: int) -> Exception:
    return client_error(413, "body_too_large", f"The request body is larger than {limit} bytes.", close=True)


def check_length(length: int | None, limit: int) -> None:
    """Refuse a body by its announced length, before it is read.

    Raises:
        GatewayError: 413.
    """
    if length is not None and length > limit:
        raise _too_large(limit)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        GatewayError: 400 with what is wrong, without the client's bytes.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if not body:
            raise client_error(400, "invalid_json", "The request body is empty; a JSON object is expected.") from None
        raise client_error(
            400, "invalid_json", f"The request body is not valid JSON (line {error.lineno}, column {error.colno})."
        ) from None
    if not isinstance(parsed, dict):
        raise client_error(400, "invalid_json", "The request body must be a JSON object.")
    return parsed


def requested_model(parsed: Mapping[str, Any]) -> str | None:
    """The `model` of a body; None when it is absent or null.

    Raises:
        GatewayError: 400 when it is not a string.
    """
    model = parsed.get("model")
    if model is None or isinstance(model, str):
        return model or None
    raise client_error(400, "invalid_request", "`model` must be a string.", param="model")


def with_model(body: bytes, old: str, new: str) -> bytes:
    """`body` with the value of its top-level `model` changed and every other byte as it was.

    Members that spell ``"model": "<old>"`` are found by a regular expression. When there is only one, it is the top-level one. Else all of them
    get a mark in one pass, and the mark that a parser then finds at the top says which one counts: the last one, where the key is repeated, as for the
    worker. Trying them one after the other would cost a parse each, and a client may nest as many as the body has room for.

    Args:
        body: a JSON object that `parse_json` takes.
        old: the value of its top-level `model`.
        new: what that becomes.
    """
    if old == new:
        return body
    member = _member(old)
    found = list(member.finditer(body))
    if len(found) > 1:
        numbers = count()
        marked = orjson.loads(member.sub(lambda match: b'%b"%d"' % (match[1], next(numbers)), body))
        found = [found[int(marked["model"])]]
    (match,) = found
    return b"%b%b%b" % (body[: match.end(1)], orjson.dumps(new), body[match.end() :])


@lru_cache(maxsize=1024)
def _member(name: str) -> re.Pattern[bytes]:
    """A pattern for a member ``"model": "<name>"`` with any of the escapes that JSON allows; group 1 ends before the value."""
    return re.compile(b'("%b"\\s*:\\s*)"%b"' % (_spellings("model"), _spellings(name)))


def _spellings(text: str) -> bytes:
    return b"".join(_spelling(character) for character in text)


def _spelling(character: str) -> bytes:
    units = character.encode("utf-16-be")
    escaped = b"".join(b"\\\\u(?i:%04x)" % int.from_bytes(units[i : i + 2]) for i in range(0, len(units), 2))
    # orjson's own spelling: the character itself, or the short escape of one that needs it.
    choices = [re.escape(orjson.dumps(character)[1:-1]), escaped]
    if character == "/":
        choices.append(rb"\\/")
    return b"(?:%b)" % b"|".join(choices)


class MultipartModel:
    """The `model` field of a multipart form, and where its value stands."""

    __slots__ = (
        "_complete",
        "_data",
        "_disposition",
        "_field",
        "_header",
        "_name",
        "_parts",
        "_value",
        "end",
        "model",
        "start",
    )

    def __init__(self, content_type: bytes, body: bytes) -> None:
        """Parse `body` just far enough.

        Raises:
            GatewayError: 400 when it is not a multipart form, or one that breaks off: readers differ in what they make of its last part.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise client_error(400, "invalid_body", "A multipart/form-data body with a boundary is expected.")
        self.model: str | None = None
        self.start = self.end = 0
        self._data = body
        self._field = self._header = self._value = self._disposition = b""
        self._name: bytes | None = None
        self._parts = 0
        self._complete = False
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
            parser.write(body)
            parser.finalize()
        except ValueError as error:
            raise client_error(400, "invalid_body", "The multipart body is malformed.") from error
        if not self._complete:
            raise client_error(400, "invalid_body", "The multipart body ends before its last boundary.")

    def replaced(self, model: str) -> bytes:
        """The body with another model in its `model` field, and everything else as it was."""
        if self.model is None:
            return self._data
        return self._data[: self.start] + model.encode() + self._data[self.end :]

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise client_error(400, "invalid_body", f"The multipart body has more than {_MAX_PARTS} parts.")
        self._header = self._value = self._disposition = b""
        self._name = None
        self._field = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name")
        self._header = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != b"model" or len(self._field) > _MODEL_FIELD_LIMIT:
            return
        if not self._field:
            self.start = start
        self._field += data[start:end]
        self.end = end

    def _part_end(self) -> None:
        if self._name == b"model":
            # Of a repeated field the last one counts, as for the worker. An empty one is as good as none.
            self.model = self._field.decode("utf-8", "replace") or None

    def _end(self) -> None:
        self._complete = True
