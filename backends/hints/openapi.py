"""A worker's OpenAPI description, as a probe: it says which fields requests may have, and asking changes nothing."""

import re
from typing import Final

from backends.hints.base import HintCall

OPENAPI: Final = HintCall("GET", "/openapi.json")
"""FastAPI's path, so vLLM's and SGLang's; switched off by vLLM's ``--disable-fastapi-docs``."""


def names_member(body: bytes, name: str) -> bool:
    """Whether a schema in the description has a property of that name. Never raises.

    A search, not a parse: the description is some 200 KB, and a property's name stands there as a key in any case.
    """
    return re.search(rb'"%b"\s*:\s*\{' % re.escape(name.encode()), body) is not None


def names_path(body: bytes, path: str) -> bool:
    """Whether the description has a route with exactly this path. Never raises. A search, like `names_member`."""
    return re.search(rb'"%b"\s*:\s*\{' % re.escape(path.encode()), body) is not None
