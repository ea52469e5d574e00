"""The API's answers and bodies: JSON."""

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web


def answer(document: Any) -> web.Response:
    """A 200 with a JSON document. Keys that are no texts, and numbers beyond 64 bits, have no place in one."""
    return web.Response(body=orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE), content_type="application/json")


def failure(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error for people."""
    body = orjson.dumps({"error": message}, option=orjson.OPT_APPEND_NEWLINE)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def not_kept() -> web.Response:
    """The 404 of a request."""
    return failure(404, "there is no such request, or it is not kept any more")


async def json_body(request: web.Request) -> Any:
    """What a request's body says; None where that is no JSON."""
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError:
        return None
