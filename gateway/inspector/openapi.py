"""The API's description, made of the table that its routes are made of: OpenAPI 3.1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway import __version__

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path.

    Attributes:
        method: GET or POST.
        path: with ``{name}`` for each part that is a parameter.
        handler: answers it.
        summary: what it does, in one line.
        query: parameters by name: JSON Schema with a description.
        body: JSON Schema of the request's body; None: it has none.
        answers: what a 200 holds, in a sentence.
        errors: other statuses with what they mean.
        media_type: of a 200.
        open: needs no token.
    """

    method: str
    path: str
    handler: "Handler"
    summary: str
    answers: str
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    media_type: str = "application/json"
    open: bool = False


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "warmroute's admin API",
            "version": __version__,
            "description": "What the inspector's page uses; nothing else. Times are in seconds, sizes in bytes, prompts in tokens.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "warmroute_admin"},
            },
            "schemas": {
                "Error": {
                    "type": "object",
                    "required": ["error"],
                    "properties": {"error": {"type": "string", "description": "what is wrong, for people"}},
                }
            },
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    errors = dict(endpoint.errors)
    if not endpoint.open:
        errors |= {401: "there is a token, and the request does not have it", 403: "nobody may, or not from this page"}
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    for name, schema in endpoint.query.items():
        plain = {key: value for key, value in schema.items() if key != "description"}
        parameters.append({"name": name, "in": "query", "description": schema.get("description", ""), "schema": plain})
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__.strip("_"),
        "summary": endpoint.summary,
        "security": [{}] if endpoint.open else [{"token": []}, {"session": []}, {}],
        "responses": {"200": {"description": endpoint.answers, "content": {endpoint.media_type: {}}}}
        | {str(status): _error(text) for status, text in sorted(errors.items())},
    }
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": endpoint.body}}}
    return operation


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
