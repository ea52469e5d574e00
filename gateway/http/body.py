"""Request bodies: reading them within limits, finding the model in them, and renaming it without touching anything else."""

import asyncio
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp.web_protocol import RequestPayloadError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.http.errors import client_error

if TYPE_CHECKING:
    from aiohttp.streams import StreamReader

_RATE_WINDOW = 5.0
_MODEL_FIELD_LIMIT = 1024


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
        body = payload.read_nowait(-1)
        if len(body) > limit:
            raise _too_large(limit)
        return body
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


def with_model(body: bytes, parsed: Mapping[str, Any], model: str) -> bytes:
    """`body` with its top-level `model` replaced and every other byte as it was.

    Each place that looks like the member is tried, and the result parsed again: only a body that means the same but for the model counts.
    Where no single place does (the key is repeated, or written with escapes), the object is serialised anew.
    """
    old = parsed.get("model")
    if old == model:
        return body
    wanted = {**parsed, "model": model}
    value = orjson.dumps(model)
    if old is None and "model" not in parsed:
        brace = body.index(b"{")
        comma = b"," if parsed else b""
        return b'%b{"model":%b%b%b' % (body[:brace], value, comma, body[brace + 1 :])
    literal = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(old)))
    for found in literal.finditer(body):
        candidate = body[: found.end(1)] + value + body[found.end() :]
        if _loads_or_none(candidate) == wanted:
            return candidate
    return orjson.dumps(wanted)


def _loads_or_none(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


class MultipartModel:
    """The `model` field of a multipart form, and where its value stands."""

    __slots__ = ("_data", "_disposition", "_field", "_header", "_name", "_offset", "_value", "end", "model", "start")

    def __init__(self, content_type: bytes, body: bytes) -> None:
        """Parse `body` just far enough.

        Raises:
            GatewayError: 400 when it is not a multipart form.
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
        self._offset = 0
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
            },
        )
        try:
            parser.write(body)
            parser.finalize()
        except ValueError as error:
            raise client_error(400, "invalid_body", "The multipart body is malformed.") from error

    def replaced(self, model: str) -> bytes:
        """The body with another model in its `model` field, and everything else as it was."""
        if self.model is None:
            return self._data
        return self._data[: self.start] + model.encode() + self._data[self.end :]

    def _part_begin(self) -> None:
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
            self.model = self._field.decode("utf-8", "replace")
