"""Every name of a span attribute or event, in one place: they are a contract with whoever has built a dashboard on them.

The names are written out instead of imported because the GenAI conventions are still in development and have renamed
things between releases; `tests/telemetry` checks each against the installed `opentelemetry.semconv` package.
"""

from typing import Final

HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_REQUEST_RESEND_COUNT: Final = "http.request.resend_count"
HTTP_REQUEST_BODY_SIZE: Final = "http.request.body.size"
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
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds."""
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

OUTCOME: Final = "warmroute.outcome"
"""completed, client_gone or failed."""
REQUEST_ID: Final = "warmroute.request.id"
STAGE: Final = "warmroute.stage"
TENANT: Final = "warmroute.tenant"
"""The tenant's label: the first 12 hexadecimal digits of the SHA-256 of its name."""
WORKER_ID: Final = "warmroute.worker.id"
POLICY: Final = "warmroute.policy"
ATTEMPTS: Final = "warmroute.attempts"
HEDGE: Final = "warmroute.hedge"
HEDGE_LOST: Final = "warmroute.hedge.lost"
RETRY_BUDGET_EXHAUSTED: Final = "warmroute.retry_budget.exhausted"
"""How many workers were asked."""
BYTES_OUT: Final = "warmroute.response.bytes"
FIRST_BYTE: Final = "warmroute.first_byte"
"""Seconds from the start of the span to the first byte of the answer."""
CONNECT: Final = "warmroute.connect"
"""Seconds until there was a connection to the worker; 0 with one from the pool."""
GAP_P50: Final = "warmroute.gaps.p50"
"""Seconds between the reads of a stream, as the two below."""
GAP_P95: Final = "warmroute.gaps.p95"
GAP_MAX: Final = "warmroute.gaps.max"
READS: Final = "warmroute.reads"
"""In how many pieces a stream came from the worker."""
PREDICTED_TTFT: Final = "warmroute.predicted.ttft"
"""Seconds to the first token."""
PREDICTED_CACHED: Final = "warmroute.predicted.cached_tokens"

EVENT_ADMISSION: Final = "warmroute.admission"
QUEUE: Final = "warmroute.queue"
"""Seconds that the request waited for its turn."""
EVENT_TOKENIZE: Final = "warmroute.tokenize"
PROMPT_TOKENS: Final = "warmroute.prompt.tokens"
PROMPT_HOW: Final = "warmroute.prompt.how"
"""exact, bytes or none."""
PROMPT_SECONDS: Final = "warmroute.prompt.seconds"
EVENT_ROUTE: Final = "warmroute.route"
ROUTE_SECONDS: Final = "warmroute.route.seconds"
ROUTE_REASON: Final = "warmroute.route.reason"
"""A sentence."""
ROUTE_CANDIDATES: Final = "warmroute.route.candidates"
"""How many there were."""
ROUTE_TABLE: Final = "warmroute.route.table"
"""JSON: the chosen candidate, then those that cost least, then those that were dropped, as many as there is room for."""
MATCHED: Final = "warmroute.route.matched_tokens"
"""Tokens of the prompt that the chosen worker was believed to hold."""
EVENT_HINT: Final = "warmroute.hint"
"""Something that was wished of a worker's caches because of this request."""
HINT_RULE: Final = "warmroute.hint.rule"
HINT_ACTION: Final = "warmroute.hint.action"
"""prefetch, retain, pin, unpin or demote."""
HINT_WAY: Final = "warmroute.hint.way"
"""inside the request, beside it, or nobody could say it."""
HINT_DRIVER: Final = "warmroute.hint.driver"
HINT_FATE: Final = "warmroute.hint.fate"
"""At the request's end; what it is good for shows later, in the admin API."""
HINT_SOURCE: Final = "warmroute.hint.source"
HINT_TARGET: Final = "warmroute.hint.target"
"""device, l1 or l2, as the one above."""
HINT_TOKENS: Final = "warmroute.hint.tokens"
HINT_PRIORITY: Final = "warmroute.hint.priority"
HINT_TTL: Final = "warmroute.hint.ttl"
"""Seconds."""
HINT_REASON: Final = "warmroute.hint.reason"
EVENT_FIRST_BYTE: Final = "warmroute.first_byte_sent"
EVENT_END: Final = "warmroute.end"

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
