"""Every name of a span attribute, in one place: they are a contract with whoever has built a dashboard on them.

The names are written out instead of imported because the GenAI conventions are still in development and have renamed
things between releases; `tests/telemetry` checks each against the installed `opentelemetry.semconv` package.
"""

from typing import Final

HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_REQUEST_RESEND_COUNT: Final = "http.request.resend_count"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
HTTP_ROUTE: Final = "http.route"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
URL_FULL: Final = "url.full"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"

OUTCOME: Final = "warmroute.outcome"
"""completed, client_gone or failed."""
REQUEST_ID: Final = "warmroute.request.id"
WORKER_ID: Final = "warmroute.worker.id"
POLICY: Final = "warmroute.policy"
ATTEMPTS: Final = "warmroute.attempts"
"""How many workers were asked."""
BYTES_OUT: Final = "warmroute.response.bytes"
FIRST_BYTE: Final = "warmroute.first_byte"
"""Seconds from the start of the span to the first byte of the answer."""

OTHER_METHOD: Final = "_OTHER"
"""What the HTTP conventions want in place of a method that is not a known one."""
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/invocations": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def operation(path: str) -> str:
    """`gen_ai.operation.name` for an API path: the conventions' word, else the path's last part (``rerank``, ...).

    `path` must be one of the API paths or a label that stands for all others; it is never what a client sent.
    """
    return _OPERATIONS.get(path) or path.rpartition("/")[2]
