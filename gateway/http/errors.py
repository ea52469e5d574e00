"""From an error to bytes: the one place where exceptions become answers, before a stream and inside one."""

from functools import lru_cache
from http import HTTPStatus

import orjson

from gateway.errors import GatewayError, Source
from gateway.http.routes import Dialect

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def reason_phrase(status: int) -> str:
    """The standard phrase of a status; empty when there is none."""
    return _REASONS.get(status, "")


def error_body(error: GatewayError, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """The JSON body of `error`.

    Anthropic's clients look for ``{"type": "error", "error": {"type", "message"}}``; the same object carries OpenAI's keys, so
    that one body serves both kinds of client.
    """
    return _body(error.status, error.message, error.api_type, error.param, error.code, dialect)


@lru_cache(maxsize=128)
def _body(status: int, message: str, api_type: str, param: str | None, code: str | None, dialect: Dialect) -> bytes:
    """Kept, for in a flood of refusals all have the same few."""
    detail = {"message": message, "type": api_type, "param": param, "code": code}
    if dialect is Dialect.ANTHROPIC:
        detail["type"] = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else api_type)
        return orjson.dumps({"type": "error", "error": detail})
    return orjson.dumps({"error": detail})


def error_answer(
    error: GatewayError,
    *,
    dialect: Dialect = Dialect.OPENAI,
    request_id: bytes = b"",
    close: bool,
    head_only: bool = False,
) -> bytes:
    """A whole HTTP/1.1 answer for `error`; with `head_only` the body is left out (HEAD)."""
    body = error_body(error, dialect)
    lines = [
        b"HTTP/1.1 %d %b\r\n" % (error.status, reason_phrase(error.status).encode()),
        b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
    ]
    if request_id:
        lines.append(b"x-request-id: %b\r\n" % request_id)
    if error.retry_after is not None:
        lines.append(b"retry-after: %d\r\n" % error.retry_after)
    if error.lines:
        lines.append(error.lines)
    if error.status == 405:
        lines.append(b"allow: %b\r\n" % (error.param or "POST").encode())
    if close:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)


def error_event(error: GatewayError, dialect: Dialect, tail: bytes) -> bytes:
    r"""Server-sent event for an error inside a stream that has started.

    `tail` is the end of what the client has got so far. A line or an event that was cut off is ended first: an error glued to an
    unfinished ``data:`` line would be invisible to the client's parser. No ``[DONE]`` follows.
    """
    if not tail or tail.endswith((b"\n\n", b"\r\n\r\n")):
        prefix = b""
    elif tail.endswith(b"\n"):
        prefix = b"\n"
    else:
        prefix = b"\n\n"
    if dialect is Dialect.OPENAI:
        return b"%bdata: %b\n\n" % (prefix, error_body(error))
    if dialect is Dialect.ANTHROPIC:
        return b"%bevent: error\ndata: %b\n\n" % (prefix, error_body(error, dialect))
    flat = {"type": "error", "code": error.code or error.error_type, "message": error.message, "param": error.param}
    return b"%bevent: error\ndata: %b\n\n" % (prefix, orjson.dumps(flat))


def client_error(
    status: int,
    error_type: str,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    close: bool = False,
) -> GatewayError:
    """An error that the client can mend."""
    return GatewayError(status, error_type, message, source=Source.CLIENT, code=code, param=param, close=close)


def not_found() -> GatewayError:
    """A path that is not part of the API."""
    return client_error(404, "unknown_path", "Unknown request URL: this is not a path of the API.", code="unknown_url")


def method_not_allowed(allowed: str) -> GatewayError:
    """A known path with another method; `allowed` goes into the Allow field."""
    return client_error(405, "method_not_allowed", f"Method not allowed: use {allowed}.", param=allowed)


def unexpected() -> GatewayError:
    """A defect of the gateway's own."""
    return GatewayError(500, "internal", "The gateway failed to handle this request.", source=Source.GATEWAY)
