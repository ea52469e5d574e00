"""Writes a configuration as YAML that `gateway.config.load` reads back: for ``warmroute check --print`` and for tests."""

import re
from functools import cache
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from gateway.config.base import REDACTED
from gateway.config.schema import Config
from gateway.config.units import format_duration, format_size

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*|[0-9]+(?:ms|s|m|h|KiB|MiB|GiB|TiB)")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


class _Dumper(yaml.SafeDumper):
    """Quotes every text that could be taken for anything else, never writes anchors, indents list items."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - as above
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    text = repr(number)
    if "e" in text and "." not in text:  # YAML 1.1 knows no 5e-324, only 5.0e-324
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)


def dump(config: Config, *, secrets: bool = False) -> str:
    """`config` as YAML with every default written out (but those that are None).

    With `secrets` the text holds the API keys, and loading it gives an equal `Config`; without, they are `REDACTED`.
    """
    data = _plain(config, _config(), secrets=secrets)
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


@cache
def _config() -> inspect.Type:
    """The schema, which takes 8 ms to look through."""
    return inspect.type_info(Config)


def _plain(value: Any, kind: inspect.Type, *, secrets: bool) -> Any:
    """Data of builtin types, durations and sizes with their units."""
    match kind:
        case inspect.Metadata() if kind.extra_json_schema:
            text = format_duration(value) if kind.extra_json_schema.get("unit") == "seconds" else format_size(value)
            return text if text[-1].isalpha() else value
        case inspect.UnionType():
            options = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            word = isinstance(value, str)
            option = next(
                (
                    each
                    for each in options
                    if isinstance(each, inspect.StructType) == isinstance(value, msgspec.Struct)
                    and not (word and isinstance(each, inspect.Metadata | inspect.FloatType))
                    and not (not word and isinstance(each, inspect.LiteralType))
                ),
                options[0],
            )
            return None if value is None else _plain(value, option, secrets=secrets)
        case inspect.StructType():
            hidden: frozenset[str] = frozenset() if secrets else getattr(kind.cls, "secrets", frozenset())
            return {
                field.encode_name: _hidden(getattr(value, field.name))
                if field.name in hidden
                else _plain(getattr(value, field.name), field.type, secrets=secrets)
                for field in kind.fields
                if getattr(value, field.name) is not None
            }
        case inspect.VarTupleType():
            return [_plain(item, kind.item_type, secrets=secrets) for item in value]
        case inspect.DictType():
            return {
                _escaped(key, key=True): _plain(item, kind.value_type, secrets=secrets) for key, item in value.items()
            }
        case _:
            return _escaped(msgspec.to_builtins(value))


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value, REDACTED)
    if isinstance(value, tuple):
        return [REDACTED] * len(value)
    return value if value is None else REDACTED


def _escaped(value: Any, *, key: bool = False) -> Any:
    """Texts so that no variable is put into them; keys stay, for nothing is put into keys."""
    if isinstance(value, str):
        return value if key else value.replace("${", "$${")
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value
