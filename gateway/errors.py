"""Errors that become answers: where they came from, the status, the body, and whether another worker may try.

One place (`gateway.http.errors`) turns an exception into bytes. The body has OpenAI's shape::

    {"error": {"message": str, "type": str, "param": str | null, "code": str | null}}
"""

import enum
import errno
from typing import Final

OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Reasons of this process's own for which a connection can't be made: they say nothing about the worker."""


class Source(enum.Enum):
    """Whose fault an error is."""

    CLIENT = "client"
    GATEWAY = "gateway"
    WORKER = "worker"


class Retry(enum.Enum):
    """Whether the same request may safely go to another worker."""

    NO = "no"
    YES = "yes"
    """Nothing reached the worker, or it refused without starting."""
    IF_REUSED = "if-reused"
    """Only if the connection came from the pool: the worker closed it while the request was on its way."""


class GatewayError(Exception):
    """An error with everything an answer needs.

    Attributes:
        status: the HTTP status for the client, 400 to 599.
        error_type: low-cardinality name for `error.type` in spans and metrics, e.g. ``upstream_connect``.
        message: for the client; never contains bytes that the client sent.
        api_type: the `type` of OpenAI's error object.
        code: the `code` of OpenAI's error object.
        param: the `param` of OpenAI's error object.
        source: whose fault it is.
        retry: whether another worker may try.
        close: the client's connection must be closed after the answer.
        retry_after: seconds for the `Retry-After` header.
        lines: further header lines, each with its CRLF.
    """

    def __init__(
        self,
        status: int,
        error_type: str,
        message: str,
        *,
        source: Source,
        api_type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry: Retry = Retry.NO,
        close: bool = False,
        retry_after: int | None = None,
        lines: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.message = message
        self.source = source
        self.api_type = api_type or _api_type(status)
        self.code = code
        self.param = param
        self.retry = retry
        self.close = close
        self.retry_after = retry_after
        self.lines = lines


def _api_type(status: int) -> str:
    """The type that OpenAI's API uses for a status."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    if status < 500:
        return "invalid_request_error"
    return "api_error"
