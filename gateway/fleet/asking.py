"""One question of the control plane to a worker: a small GET (or POST) with a deadline, and in words why it failed."""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from gateway.errors import OUT_OF_RESOURCES
from gateway.fleet.worker import Worker

MAX_ANSWER = 1024 * 1024
"""Bytes read of an answer; more is no health report and no list of models."""

LATE = 0.25
"""A deadline that fires this many seconds late says that our own event loop stood still, not that the worker did."""

_HEADERS: Mapping[str, str] = {"accept": "*/*", "user-agent": "warmroute-health"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: `status` and `body`, or an `error` in words.

    `timed_out`: the worker had not answered at the deadline. `our_fault`: the deadline means nothing, see `LATE`, or this process has run out of
    descriptors.
    """

    status: int = 0
    body: bytes = b""
    error: str | None = None
    timed_out: bool = False
    our_fault: bool = False


def open_session() -> aiohttp.ClientSession:
    """A session fit for `ask`: no cookies, no proxies from the environment, connections for a thousand workers.

    Idle connections are kept for 4 s, below vLLM's keep-alive of 5 s. Must be called in a running loop and closed.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def ask(
    session: aiohttp.ClientSession,
    worker: Worker,
    path: str,
    seconds: float,
    *,
    json: bytes | None = None,
    most: int = MAX_ANSWER,
) -> Answer:
    """GET `path` of `worker` with our key for it. Never raises but for cancellation; redirects are not followed.

    Args:
        session: of `open_session`, or alike.
        worker: whom to ask.
        path: starts with a slash; comes after the path of the worker's URL.
        seconds: for everything, from the connection to the last byte.
        json: POST this instead.
        most: bytes read of the answer.
    """
    method, kind = ("GET", {}) if json is None else ("POST", {"content-type": "application/json"})
    clock = asyncio.get_running_loop().time
    started = clock()
    try:
        async with (
            asyncio.timeout(seconds),
            session.request(
                method,
                worker.url + path,
                data=json,
                headers={**_HEADERS, **kind, **worker.request_headers()},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > most:
                    response.close()
                    return Answer(error=f"{method} {path} answered more than {most} bytes")
            return Answer(response.status, bytes(body))
    except TimeoutError:
        late = clock() - started > seconds + LATE
        return Answer(error=f"{method} {path} not answered within {seconds:g} s", timed_out=True, our_fault=late)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        exhausted = isinstance(cause, OSError) and cause.errno in OUT_OF_RESOURCES
        return Answer(error=f"{method} {path}: {_in_words(error)}", our_fault=exhausted)


def _in_words(error: Exception) -> str:
    """A short stable reason, without addresses or bytes that the worker chose."""
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return "name not known"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "TLS failed"
    match error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error:
        case ConnectionRefusedError():
            return "connection refused"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return "connection closed before an answer"
        case aiohttp.ClientPayloadError():
            return "answer broke off"
        case aiohttp.ClientResponseError() | ValueError():
            return "answer is no valid HTTP"
        case OSError(strerror=str(text)):
            return text.lower()
        case _:
            return type(error).__name__
