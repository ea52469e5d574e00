"""Request bodies that are kept to be looked at, where somebody has switched that on."""

from collections.abc import Collection
from typing import Any

import msgspec
import orjson

from gateway.config.base import REDACTED
from gateway.config.schema import Capture


class Captured(msgspec.Struct, frozen=True, gc=False):
    """A request body, as the client sent it.

    Attributes:
        body: its bytes.
        redact: names of members whose values must not be shown, in lower case.
    """

    body: bytes
    redact: frozenset[str]

    def document(self) -> Any:
        """The body with what must not be shown left out; a note in place of one that is no JSON."""
        try:
            parsed = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return f"<{len(self.body)} bytes that are no JSON>"
        return redacted(parsed, self.redact)


class Capturing:
    """Decides which bodies are kept."""

    __slots__ = ("_limit", "_redact")

    def __init__(self, section: Capture) -> None:
        # Off is a limit that no body keeps.
        self._limit = section.bytes if section.enabled else -1
        self._redact = frozenset(name.lower() for name in section.redact)

    def of(self, body: bytes) -> Captured | None:
        """`body`, if it is to be kept."""
        return Captured(body, self._redact) if len(body) <= self._limit else None


def redacted(value: Any, names: Collection[str]) -> Any:
    """A copy of a JSON document with `REDACTED` for every value, at any depth, whose member's name is in `names`."""
    if isinstance(value, dict):
        return {name: REDACTED if name.lower() in names else redacted(inner, names) for name, inner in value.items()}
    if isinstance(value, list):
        return [redacted(inner, names) for inner in value]
    return value
