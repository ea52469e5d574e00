"""The public API paths: everything the data listener knows. Whatever is not here is answered 404.

The raw request target decides, byte for byte, so ``//v1/models``, ``/v1/../pause`` and ``/v1/%6dodels`` are unknown paths. Worker
administration (``/pause``, ``/sleep``, ``/collective_rpc``, ...) is left out on purpose and can't be added by configuration.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Body(enum.Enum):
    """What a request to a route carries."""

    JSON = "json"
    MULTIPART = "multipart"


class Dialect(enum.Enum):
    """Whose client library reads the errors of a route, before and inside a stream."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"


@dataclass(frozen=True, slots=True)
class Route:
    """One path that is relayed to a worker.

    Attributes:
        path: the exact request target without its query.
        body: what it carries.
        dialect: the shape of its errors.
        operation: `gen_ai.operation.name` for traces.
        generates: whether it runs the model's decoder and so may be slow to answer.
    """

    path: str
    body: Body = Body.JSON
    dialect: Dialect = Dialect.OPENAI
    operation: str = "chat"
    generates: bool = True


_ROUTES = (
    Route("/v1/chat/completions"),
    Route("/v1/completions", operation="text_completion"),
    Route("/v1/responses", dialect=Dialect.RESPONSES),
    Route("/v1/messages", dialect=Dialect.ANTHROPIC),
    Route("/v1/messages/count_tokens", dialect=Dialect.ANTHROPIC, operation="count_tokens", generates=False),
    Route("/v1/embeddings", operation="embeddings", generates=False),
    Route("/v1/rerank", operation="rerank", generates=False),
    Route("/rerank", operation="rerank", generates=False),
    Route("/v1/score", operation="score", generates=False),
    Route("/score", operation="score", generates=False),
    Route("/pooling", operation="pooling", generates=False),
    Route("/classify", operation="classify", generates=False),
    Route("/tokenize", operation="tokenize", generates=False),
    Route("/detokenize", operation="detokenize", generates=False),
    Route("/v1/audio/transcriptions", body=Body.MULTIPART, operation="transcription"),
    Route("/v1/audio/translations", body=Body.MULTIPART, operation="translation"),
    Route("/invocations", operation="invocation"),
)

ROUTES: Mapping[str, Route] = MappingProxyType({route.path: route for route in _ROUTES})
"""POST paths that go to a worker."""

MODELS_PATH = "/v1/models"
PING_PATH = "/ping"
LOCAL_PATHS = (MODELS_PATH, PING_PATH)
"""Answered by the gateway itself."""


def origin_form(target: str) -> str:
    """A request target as path and query. Of an absolute form (RFC 9112, section 3.2.2) that is the rest; others stay as they are.

    The authority in an absolute form decides nothing; Host is checked all the same.
    """
    if target[:1] == "/":
        return target
    scheme, _, rest = target.partition("://")
    if scheme.lower() not in {"http", "https"}:
        return target
    authority, slash, path = rest.partition("/")
    # In http://host?/v1/models the path is empty and the slash stands in the query.
    return f"/{path}" if slash and "?" not in authority and "#" not in authority else "/"
