"""What all sections of the configuration are made of: the base of every section, and the types of their keys."""

from typing import Annotated, Any, ClassVar

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, extra_json_schema={"unit": "seconds"})]
Bytes = Annotated[int, msgspec.Meta(ge=0, extra_json_schema={"unit": "bytes"})]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

REDACTED = "<redacted>"
"""What is shown in place of a secret."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every section: frozen, keywords only, unknown keys refused, secrets left out of its repr."""

    secrets: ClassVar[frozenset[str]] = frozenset()
    """Fields whose value (of a mapping: whose values) must never be shown."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.shown())})"

    def shown(self) -> list[tuple[str, Any]]:
        """Each field's name and value in their order, secrets replaced by `REDACTED`."""
        return [
            (name, _redacted(getattr(self, name)) if name in self.secrets else getattr(self, name))
            for name in self.__struct_fields__
        ]

    __rich_repr__ = shown


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value, REDACTED)
    if isinstance(value, tuple):
        return (REDACTED,) * len(value)
    return value if value is None else REDACTED
