"""From a tree with places to plain data of the schema's types, with a complaint for whatever does not fit.

The types come from `msgspec.inspect`, so that `gateway.config.schema` is written once. What does not fit becomes `INVALID`
in the result: later checks go on with the rest, and all problems of a file are reported together.
"""

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect

from gateway.config import units
from gateway.config.problems import Mark, Where, choices, clip, did_you_mean, listed, nearest
from gateway.config.source import Mapping, Node, Scalar, Sequence, Source, Unusable

if TYPE_CHECKING:
    from collections.abc import Callable


class Invalid:
    """The type of `INVALID`."""

    def __repr__(self) -> str:
        return "INVALID"


INVALID: Final = Invalid()
"""Stands where a value was that has been complained about."""

MAX_SECONDS = 365 * 86400.0
MAX_INTEGER = 2**53
"""Whole numbers up to here survive JSON, and no size or count is larger."""

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


class Walker:
    """Converts one tree.

    Attributes:
        marks: where each value begins, by its path.
        key_marks: where each key begins, by its path.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._homes: dict[str, str] = {}
        self.marks: dict[Where, Mark] = {}
        self.key_marks: dict[Where, Mark] = {}

    def convert(self, node: Node, struct: type[msgspec.Struct]) -> Any:
        """Plain data for `struct` (dicts, lists, scalars, `INVALID`)."""
        kind = inspect.type_info(struct)
        self._homes = _homes(kind)
        return self._walk(node, kind, ())

    def _walk(self, node: Node, kind: inspect.Type, where: Where, *, secret: bool = False) -> Any:
        self.marks[where] = node.mark
        if isinstance(node, Unusable):
            return INVALID
        unit = ""
        if isinstance(kind, inspect.Metadata):
            unit = (kind.extra_json_schema or {}).get("unit", "")
            kind = kind.type
        if isinstance(kind, inspect.UnionType):
            if _is_null(node):
                return None
            option = _option(kind, node)
            if isinstance(option, inspect.LiteralType):
                return self._scalar(node, option, where, unit, secret=secret, expected=f"expected {describe(kind)}")
            return self._walk(node, option, where, secret=secret)
        match kind:
            case inspect.StructType():
                return self._struct(node, kind, where)
            case inspect.VarTupleType():
                return self._list(node, kind, where, secret=secret)
            case inspect.DictType():
                return self._dict(node, kind, where, secret=secret)
            case inspect.AnyType():
                return self._anything(node, where)
            case _:
                return self._scalar(node, kind, where, unit, secret=secret)

    def _struct(self, node: Node, kind: inspect.StructType, where: Where) -> Any:
        if not isinstance(node, Mapping):
            known = choices(field.name for field in kind.fields)
            remedy = "; remove the key to get the defaults" if _is_null(node) and where else ""
            return self._refuse(node, where, f"expected a mapping with the keys {known}", remedy=remedy)
        fields = {field.encode_name: field for field in kind.fields}
        secrets: frozenset[str] = getattr(kind.cls, "secrets", frozenset())
        data: dict[str, Any] = {}
        meant: set[str | None] = set()
        for key, mark in node.keys.items():
            self.key_marks[*where, key] = mark
            if key not in fields:
                meant.add(nearest(key, fields))
                self._source.complain(mark, (*where, key), self._unknown(key, fields))
                continue
            value = node.entries[key]
            if key in secrets:
                self._mask(value)
            data[key] = self._walk(value, fields[key].type, (*where, key), secret=key in secrets)
        for name, field in fields.items():
            if field.required and name not in node.keys and name not in meant:
                message = f"missing, and needed; add `{name}:` with {describe(field.type)}"
                self._source.complain(node.mark, (*where, name), message)
            if field.required:
                data.setdefault(name, INVALID)
        return data

    def _unknown(self, key: str, fields: dict[str, Any]) -> str:
        known = f"Known keys: {choices(fields)}"
        if nearest(key, fields) is None and (home := self._homes.get(key)):
            return f"unknown key here; `{key}` belongs in {home}. {known}"
        return f"unknown key{did_you_mean(key, fields) or '; remove it.'} {known}"

    def _list(self, node: Node, kind: inspect.VarTupleType, where: Where, *, secret: bool) -> Any:
        if not isinstance(node, Sequence):
            if isinstance(node, Scalar) and not _is_null(node):
                remedy = "; put it in [ ], or on a line of its own after `- `"
            else:
                remedy = ""
            return self._refuse(node, where, f"expected {describe(kind)}", remedy=remedy, secret=secret)
        return [
            self._walk(item, kind.item_type, (*where, index), secret=secret) for index, item in enumerate(node.items)
        ]

    def _dict(self, node: Node, kind: inspect.DictType, where: Where, *, secret: bool) -> Any:
        if not isinstance(node, Mapping):
            return self._refuse(node, where, f"expected {describe(kind)}", secret=secret)
        data: dict[str, Any] = {}
        for key, value in node.entries.items():
            self.key_marks[*where, key] = node.keys[key]
            data[key] = self._walk(value, kind.value_type, (*where, key), secret=secret)
        return data

    def _anything(self, node: Node, where: Where) -> Any:
        """JSON-like data for parameters whose types only a plug-in knows."""
        self.marks[where] = node.mark
        match node:
            case Unusable():
                return INVALID
            case Sequence():
                return [self._anything(item, (*where, index)) for index, item in enumerate(node.items)]
            case Mapping():
                self.key_marks.update({(*where, key): mark for key, mark in node.keys.items()})
                return {key: self._anything(value, (*where, key)) for key, value in node.entries.items()}
        if not node.plain or node.substituted:
            return node.text
        if node.text in _NULLS:
            return None
        if node.text in _BOOLEANS:
            return _BOOLEANS[node.text]
        integer = units.parse_integer(node.text)
        number = integer if integer is not None else units.parse_number(node.text)
        return number if number is not None else node.text

    def _scalar(
        self, node: Node, kind: inspect.Type, where: Where, unit: str, *, secret: bool, expected: str = ""
    ) -> Any:
        expected = expected or f"expected {describe(kind, unit)}"
        if not isinstance(node, Scalar) or _is_null(node):
            return self._refuse(node, where, expected, secret=secret)
        free = node.plain or node.substituted  # may stand for something else than text
        match kind:
            case inspect.StrType():
                return self._text(node, kind, where, expected, secret=secret)
            case inspect.BoolType():
                if free and node.text in _BOOLEANS:
                    return _BOOLEANS[node.text]
                meant = _YAML_1_1_BOOLEANS.get(node.text.lower())
                return self._refuse(node, where, expected, remedy=f"; write `{meant}`" if meant else "")
            case inspect.LiteralType():
                return self._choice(node, kind, where, expected, free=free)
            case inspect.IntType() | inspect.FloatType():
                return self._number(node, kind, where, unit, expected, free=free)
        msg = f"the schema uses a type that the walker does not know: {kind}"
        raise TypeError(msg)

    def _text(self, node: Scalar, kind: inspect.StrType, where: Where, expected: str, *, secret: bool) -> Any:
        if (
            node.plain
            and not node.substituted
            and (node.text in _BOOLEANS or units.parse_number(node.text) is not None)
        ):
            remedy = "; put it in quotes" + ("" if secret else f': "{clip(node.text)}"')
            return self._refuse(node, where, expected, remedy=remedy, secret=secret)
        if not (kind.min_length or 0) <= len(node.text) <= (kind.max_length or len(node.text)):
            found = f", got {len(node.text):,} characters" if node.text else ", got empty text"
            self._source.complain(node.mark, where, f"{expected}{found}")
            return INVALID
        return node.text

    def _choice(self, node: Scalar, kind: inspect.LiteralType, where: Where, expected: str, *, free: bool) -> Any:
        for value in kind.values:
            if (isinstance(value, str) and node.text == value) or (
                isinstance(value, int) and free and units.parse_integer(node.text) == value
            ):
                return value
        words = [str(value) for value in kind.values]
        return self._refuse(node, where, expected, remedy=did_you_mean(node.text, words))

    def _number(
        self,
        node: Scalar,
        kind: inspect.IntType | inspect.FloatType,
        where: Where,
        unit: str,
        expected: str,
        *,
        free: bool,
    ) -> Any:
        parse: Callable[[str], float | None]
        top: float = MAX_INTEGER
        match unit, kind:
            case "seconds", _:
                parse, top = units.parse_duration, MAX_SECONDS
            case "bytes", _:
                parse = units.parse_size
            case _, inspect.IntType():
                parse = units.parse_integer
            case _:
                parse = units.parse_number
        value = parse(node.text)
        if value is not None and not free and units.parse_number(node.text) is not None:
            return self._refuse(node, where, expected, remedy="; remove the quotes")
        if value is None:
            return self._refuse(node, where, expected, remedy=_unit_remedy(node.text, unit))
        low, high = _bounds(kind)
        if not (low is None or value >= low) or not value <= (top if high is None else high):
            reason = f"; more than {describe_bound(top, unit)} makes no sense" if high is None and value > top else ""
            return self._refuse(node, where, expected, remedy=reason)
        return value

    def _mask(self, node: Node) -> None:
        if isinstance(node, Scalar) and not (
            node.substituted and node.written.endswith("}") and ":-" not in node.written
        ):
            self._source.masked.append(node)
        elif isinstance(node, Mapping):
            for value in node.entries.values():
                self._mask(value)
        elif isinstance(node, Sequence):
            for item in node.items:
                self._mask(item)

    def _refuse(self, node: Node, where: Where, expected: str, *, remedy: str = "", secret: bool = False) -> Invalid:
        self._source.complain(node.mark, where, f"{expected}, got {_found(node, secret=secret)}{remedy}")
        return INVALID


def describe(kind: inspect.Type, unit: str = "") -> str:
    """A type in plain words, with its range or its values."""
    match kind:
        case inspect.Metadata():
            return describe(kind.type, (kind.extra_json_schema or {}).get("unit", ""))
        case inspect.UnionType():
            options = [describe(option) for option in kind.types if not isinstance(option, inspect.NoneType)]
            return ", or ".join(sorted(options, key=_is_mapping_text))
        case inspect.StructType():
            return "a mapping"
        case inspect.VarTupleType():
            return f"a list of {_plural(kind.item_type)}"
        case inspect.DictType():
            return f"a mapping of names to {_plural(kind.value_type)}"
        case inspect.StrType():
            return f"text of {kind.min_length} to {kind.max_length} characters" if kind.max_length else "text"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            return f"one of {listed([f'`{value}`' for value in kind.values])}"
        case inspect.IntType() | inspect.FloatType():
            return _describe_number(kind, unit)
        case _:
            return "any value"


def describe_bound(bound: float, unit: str) -> str:
    """A number with its unit as users would write it."""
    if unit == "seconds":
        return units.format_duration(bound)
    return units.format_size(int(bound)) if unit == "bytes" else f"{bound:g}"


def _describe_number(kind: inspect.IntType | inspect.FloatType, unit: str) -> str:
    if unit == "seconds":
        return "a duration (seconds, or with a unit: 250ms, 30s, 5m, 2h)"
    if unit == "bytes":
        return "a size (bytes, or with a unit: 64KiB, 64MiB, 10MB)"
    low, high = _bounds(kind)
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {high:g}"
    return f"{noun} of at least {low:g}" if low is not None else noun


def _is_mapping_text(text: str) -> bool:
    """A mapping is named last."""
    return text == "a mapping"


def _option(kind: inspect.UnionType, node: Node) -> inspect.Type:
    """Of the types that a key may have besides nothing: the one of the shape that was written, else the first."""
    options = [option for option in kind.types if not isinstance(option, inspect.NoneType)]
    fitting: list[inspect.Type]
    match node:
        case Mapping():
            fitting = [option for option in options if isinstance(option, inspect.StructType)]
        case Sequence():
            fitting = [option for option in options if isinstance(option, inspect.VarTupleType)]
        case _:
            fitting = [
                option for option in options if not isinstance(option, inspect.StructType | inspect.VarTupleType)
            ]
            if len(fitting) > 1 and isinstance(node, Scalar):  # a word out of a list, or something else
                words = [option for option in fitting if isinstance(option, inspect.LiteralType)]
                named = node.text[:1].isalpha() or any(node.text in option.values for option in words)
                fitting = [option for option in fitting if (option in words) is named] or fitting
    return (fitting or options)[0]


def _plural(kind: inspect.Type) -> str:
    match kind:
        case inspect.StructType():
            return "mappings"
        case inspect.StrType():
            return "texts"
        case inspect.IntType():
            return "whole numbers"
        case inspect.LiteralType():
            return f"values out of {', '.join(f'`{value}`' for value in kind.values)}"
        case _:
            return "values"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> tuple[float | None, float | None]:
    return kind.ge, kind.le


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.plain and not node.substituted and node.text in _NULLS


def _found(node: Node, *, secret: bool) -> str:
    if not isinstance(node, Scalar):
        return "a list" if isinstance(node, Sequence) else "a mapping"
    if _is_null(node):
        return "nothing"
    if node.substituted:
        return f"the value of {clip(node.written)}"
    is_word = node.plain and node.text in _BOOLEANS
    is_number = node.plain and units.parse_number(node.text) is not None
    if secret:
        return "a number" if is_number else "a word for yes or no" if is_word else "text"
    if is_word:
        return node.text
    return f"the number {node.text}" if is_number else f'"{clip(node.text)}"'


def _unit_remedy(text: str, unit: str) -> str:
    """A hint at the unit that was meant."""
    known = units.DURATIONS if unit == "seconds" else units.SIZES if unit == "bytes" else {}
    letters = text.lstrip("0123456789._ ")
    if not letters or letters == text or not known:
        return ""
    by_folded = {name.lower(): name for name in known}
    aliases = {"sec": "s", "secs": "s", "seconds": "s", "second": "s", "min": "m", "mins": "m", "minutes": "m"}
    aliases |= (
        {"minute": "m", "hours": "h", "hour": "h", "hr": "h", "days": "d", "day": "d"} if unit == "seconds" else {}
    )
    aliases |= {} if unit == "seconds" else {"k": "KiB", "m": "MiB", "g": "GiB", "kb": "KB", "mb": "MB", "gb": "GB"}
    meant = aliases.get(letters.lower()) or by_folded.get(letters.lower())
    if meant is None or meant == letters:
        return ""
    return f"; did you mean `{text[: len(text) - len(letters)].strip()}{meant}`?"


def _homes(kind: inspect.Type, path: str = "", homes: dict[str, str] | None = None) -> dict[str, str]:
    """For each key of the schema, the section nearest to the top that knows it, as in ``models[].workers[]``."""
    homes = {} if homes is None else homes
    match kind:
        case inspect.Metadata():
            _homes(kind.type, path, homes)
        case inspect.UnionType():
            for option in kind.types:
                _homes(option, path, homes)
        case inspect.VarTupleType():
            _homes(kind.item_type, f"{path}[]", homes)
        case inspect.DictType():
            _homes(kind.value_type, f"{path}.NAME", homes)
        case inspect.StructType():
            here = f"`{path}`" if path else "the top level of the file"
            for field in kind.fields:
                if path.count(".") < homes.get(field.encode_name, "." * 9).count("."):
                    homes[field.encode_name] = here
            for field in kind.fields:
                _homes(field.type, f"{path}.{field.encode_name}" if path else field.encode_name, homes)
    return homes
