"""OTLP's protobuf encoding of spans, written out for the few messages that there are.

With the SDK's span and encoder the three spans of a request took about 600 us of the process's one interpreter, ten times the
request itself; with this 100 to 150 on the same busy machine (`bench/telemetry.py`). Field numbers are those of
``opentelemetry/proto/trace/v1/trace.proto``, which is stable; `tests/telemetry` reads what is written here with the generated
classes.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

Value = str | bool | int | float
Attributes = Mapping[str, Value | None]
"""By name; None stands for one that is not there."""

SERVER: Final = 2
CLIENT: Final = 3
"""Kinds of spans."""

_TIME: Final = struct.Struct("<Q").pack
_FLAGS: Final = struct.Struct("<I").pack
_DOUBLE: Final = struct.Struct("<d").pack
_SMALL: Final = [bytes([number]) for number in range(128)]
_ERROR: Final = b"\x7a\x02\x18\x02"
_IS_REMOTE_KNOWN: Final = 0x100
_IS_REMOTE: Final = 0x200
_INT64: Final = (1 << 64) - 1


def event(name: str, nanoseconds: int, attributes: Attributes) -> bytes:
    """One event of a span."""
    body = b"\x09%b%b%b" % (_TIME(nanoseconds), _text(b"\x12", name), _attributes(b"\x1a", attributes))
    return b"\x5a%b%b" % (_varint(len(body)), body)


def link(trace_id: int, span_id: int) -> bytes:
    """A link of a span to another one."""
    body = b"\x0a\x10%b\x12\x08%b" % (trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big"))
    return b"\x6a%b%b" % (_varint(len(body)), body)


def span(
    name: str,
    kind: int,
    *,
    trace_id: int,
    span_id: int,
    parent: int = 0,
    remote: bool = False,
    flags: int = 0,
    tracestate: str = "",
    start: int,
    end: int,
    attributes: Attributes,
    failed: bool = False,
    more: Iterable[bytes] = (),
) -> bytes:
    """One span.

    Args:
        name: of the span.
        kind: `SERVER` or `CLIENT`.
        trace_id: 128 bits.
        span_id: 64 bits.
        parent: its parent's id, 0 for none.
        remote: the parent is in another process.
        flags: of the trace context.
        tracestate: of the trace context.
        start: nanoseconds since 1970.
        end: the same.
        attributes: of the span.
        failed: its status is an error.
        more: its events, links and `constant` attributes, encoded.
    """
    flags |= _IS_REMOTE_KNOWN | (_IS_REMOTE if remote else 0)
    body = b"".join(
        (
            b"\x0a\x10%b\x12\x08%b" % (trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big")),
            _text(b"\x1a", tracestate) if tracestate else b"",
            b"\x22\x08%b" % parent.to_bytes(8, "big") if parent else b"",
            _text(b"\x2a", name),
            b"\x30%b\x39%b\x41%b" % (_SMALL[kind], _TIME(start), _TIME(end)),
            _attributes(b"\x4a", attributes),
            *more,
            _ERROR if failed else b"",
            b"\x85\x01%b" % _FLAGS(flags),
        )
    )
    return b"\x12%b%b" % (_varint(len(body)), body)


def scope(name: str, version: str) -> bytes:
    """Who made the spans."""
    body = _text(b"\x0a", name) + _text(b"\x12", version)
    return b"\x0a%b%b" % (_varint(len(body)), body)


def resource(attributes: Attributes) -> bytes:
    """Whose spans they are."""
    body = _attributes(b"\x0a", attributes)
    return b"\x0a%b%b" % (_varint(len(body)), body)


def request(resource: bytes, scope: bytes, spans: Sequence[bytes]) -> bytes:
    """An ``ExportTraceServiceRequest`` with spans of one scope and resource."""
    body = b"".join((scope, *spans))
    group = b"%b\x12%b%b" % (resource, _varint(len(body)), body)
    return b"\x0a%b%b" % (_varint(len(group)), group)


@lru_cache(maxsize=1024)
def constant(*pairs: tuple[str, Value | None]) -> bytes:
    """Attributes of a span that many spans have in common, encoded once; to be given to `span` as `more`.

    Beware that 1 and True are the same to the cache: a name must stand for one type.
    """
    return _attributes(b"\x4a", dict(pairs))


def _attributes(tag: bytes, attributes: Attributes) -> bytes:
    """A ``repeated KeyValue`` of the field that `tag` begins."""
    return b"".join([_attribute(tag, name, value) for name, value in attributes.items() if value is not None])


def _attribute(tag: bytes, name: str, value: Value) -> bytes:
    """One ``KeyValue``. What is short, as nearly all are, is formatted at once: each length is a byte then."""
    key = _key(name)
    size = len(key)
    if isinstance(value, str):
        # Clients' JSON may bring lone surrogates; protobuf takes UTF-8 only.
        data = value.encode("utf-8", "replace")
        length = len(data)
        if size + length < 124:
            return b"%b%c%b\x12%c\x0a%c%b" % (tag, size + length + 4, key, length + 2, length, data)
        encoded = b"\x0a%b%b" % (_varint(length), data)
    elif isinstance(value, float):
        if size < 116:
            return b"%b%c%b\x12\x09\x21%b" % (tag, size + 11, key, _DOUBLE(value))
        encoded = b"\x21" + _DOUBLE(value)
    elif isinstance(value, bool):
        encoded = b"\x10\x01" if value else b"\x10\x00"
    else:
        encoded = b"\x18" + _varint(value & _INT64)
    pair = b"%b\x12%b%b" % (key, _varint(len(encoded)), encoded)
    return b"%b%b%b" % (tag, _varint(len(pair)), pair)


def _text(tag: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return b"%b%b%b" % (tag, _varint(len(data)), data)


@lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    return _text(b"\x0a", name)


def _varint(number: int) -> bytes:
    if number < 128:
        return _SMALL[number]
    out = bytearray()
    while number >= 128:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
