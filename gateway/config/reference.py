"""Writes the table of all keys in docs/configuration.md from the schema: ``python -m gateway.config.reference FILE``."""

import ast
import inspect as python_inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from gateway.config import directory, residency, schema
from gateway.config.units import format_duration, format_size
from gateway.config.walk import describe

BEGIN = "<!-- from here on written by `python -m gateway.config.reference docs/configuration.md` -->"
"""The table follows this line, to the end of the file."""


def reference() -> str:
    """A Markdown section for each section of the configuration, with a row for each key."""
    return "\n".join(_sections(inspect.type_info(schema.Config), "", _docstrings()))


def rewrite(text: str) -> str:
    """`text` with everything after `BEGIN` written anew."""
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n\n{reference()}"


def _sections(kind: inspect.Type, path: str, docs: dict[tuple[str, str], str]) -> Iterator[str]:
    assert isinstance(kind, inspect.StructType)
    yield f"### {f'`{path}`' if path else 'The top level'}\n"
    yield f"{_first_paragraph(kind.cls)}\n"
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    inner: list[tuple[inspect.Type, str]] = []
    for field in kind.fields:
        child = f"{path}.{field.encode_name}" if path else field.encode_name
        meaning = docs[kind.cls.__name__, field.name]
        yield f"| `{field.encode_name}` | {describe(field.type).replace('|', ' ')} | {_default(field)} | {meaning} |"
        if found := _struct_inside(field.type, child):
            inner.append(found)
    yield ""
    for struct, child in inner:
        if not (path.startswith("models") and child.rpartition(".")[2] in {"timeouts", "retries", "health"}):
            yield from _sections(struct, child, docs)


def _struct_inside(kind: inspect.Type, path: str) -> tuple[inspect.Type, str] | None:
    """The section that a field holds and its path: ``x``, ``x[]`` or ``x.NAME``."""
    match kind:
        case inspect.StructType():
            return kind, path
        case inspect.UnionType():
            return next((found for option in kind.types if (found := _struct_inside(option, path))), None)
        case inspect.VarTupleType():
            return _struct_inside(kind.item_type, f"{path}[]")
        case inspect.DictType():
            return _struct_inside(kind.value_type, f"{path}.NAME")
        case _:
            return None


def _default(field: inspect.Field) -> str:
    if field.required:
        return "(needed)"
    value: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return f"`{{host: {value.host}, port: {value.port}}}`" if isinstance(value, schema.Address) else "see below"
    if value is None:
        return "-"
    unit = (field.type.extra_json_schema or {}).get("unit") if isinstance(field.type, inspect.Metadata) else None
    if unit is not None:
        return f"`{format_duration(value) if unit == 'seconds' else format_size(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _first_paragraph(cls: type) -> str:
    return " ".join((python_inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def _docstrings() -> dict[tuple[str, str], str]:
    """The text below each field of the schema, in one line, by class and field."""
    docs: dict[tuple[str, str], str] = {}
    for node in (
        node for part in (schema, residency, directory) for node in ast.parse(python_inspect.getsource(part)).body
    ):
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                ):
                    assert isinstance(text.value, ast.Constant)
                    line = " ".join(str(text.value.value).split()).replace("``", "`")
                    docs[node.name, field.target.id] = line.replace("|", "\\|")
    return docs


def main() -> None:
    """Rewrite the file that the command line names."""
    path = Path(sys.argv[1])
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
