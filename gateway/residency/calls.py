"""One call of a hint driver, made: an HTTP request of the control plane with a deadline. Never raises but for cancellation."""

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.hints.base import HintCall

MAX_ANSWER: Final = 1024 * 1024
"""Bytes that are read of an answer."""
IN_THREAD: Final = 64 * 1024
"""Bodies with token ids are some of these long: from here on (about 8,000 tokens) they are written in a thread."""


class Said(msgspec.Struct, frozen=True, gc=False):
    """What came back: a status and a body, or why nothing did."""

    status: int = 0
    body: bytes = b""
    error: str = ""


async def make(
    session: aiohttp.ClientSession,
    call: "HintCall",
    url: str,
    headers: "Mapping[str, str]",
    seconds: float,
    *,
    most: int = MAX_ANSWER,
) -> Said:
    """Make `call` at the server whose base URL is `url`.

    Args:
        session: as of `gateway.fleet.asking.open_session`.
        call: what to ask.
        url: without a trailing slash.
        headers: of ours, such as a key.
        seconds: for everything, from the connection to the last byte.
        most: bytes read of the answer.
    """
    data = None if call.body is None else await _written(call)
    kind = {} if data is None else {"content-type": "application/json"}
    try:
        async with (
            asyncio.timeout(seconds),
            session.request(
                call.method,
                url + call.path,
                data=data,
                headers={"accept": "*/*", "user-agent": "warmroute-hints", **kind, **headers},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > most:
                    response.close()
                    return Said(error=f"answered more than {most} bytes")
            return Said(response.status, bytes(body))
    except TimeoutError:
        return Said(error=f"no answer within {seconds:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Said(error=type(error).__name__)


async def _written(call: "HintCall") -> bytes:
    """The body as JSON."""
    prompt = call.body.get("prompt") or call.body.get("token_ids") if isinstance(call.body, dict) else None
    if isinstance(prompt, list) and 8 * len(prompt) > IN_THREAD:
        return await asyncio.to_thread(orjson.dumps, call.body)
    return orjson.dumps(call.body)
