"""The admin API: everything that the inspector's page, `warmroute top` and `warmroute explain --admin` ask for."""

import asyncio
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from gateway.config.dump import dump
from gateway.inspector.access import COOKIE, SESSION, Access, same_origin
from gateway.inspector.answers import answer, failure, json_body, not_kept
from gateway.inspector.explaining import Question, UnexplainableError, explain
from gateway.inspector.fleet_view import fleet_document, worker_document
from gateway.inspector.live import Live
from gateway.inspector.openapi import Endpoint, openapi_document
from gateway.inspector.otlp import otlp_document
from gateway.inspector.prefix_view import prefix_document

if TYPE_CHECKING:
    from gateway.inspector.sources import InspectorSources
    from gateway.telemetry.record import RequestRecord

BODY: Final = 16 * 1024 * 1024
"""Bytes of the longest body that is read: a request to explain."""
LIMIT: Final = 100
MOST: Final = 1000
_WRONG_TOKEN: Final = 0.5
"""Seconds that a wrong token takes."""
_LIMIT: Final[Mapping[str, Any]] = {
    "type": "integer",
    "minimum": 1,
    "maximum": MOST,
    "default": LIMIT,
    "description": "so many at most",
}
_USERINFO: Final = re.compile(r"(?<=://)[^/\s\"'@]+@")
"""What must not stand in a URL, and is refused where a configuration is read; a plug-in's parameters are not looked at there."""
_TEXT: Final[Mapping[str, Any]] = {"type": "string"}


class Api:
    """The routes below ``/api``.

    Attributes:
        endpoints: all of them, in the order of the documentation.
        live: the stream of events.
    """

    def __init__(self, sources: "InspectorSources", access: Access) -> None:
        self._sources = sources
        self._access = access
        self.live = Live(sources.decisions, lambda: fleet_document(sources))
        self.endpoints = self._table()
        self._openapi = orjson.dumps(openapi_document(self.endpoints))

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register every route."""
        for endpoint in self.endpoints:
            handler = endpoint.handler if endpoint.open else self._guarded(endpoint)
            router.add_route(endpoint.method, endpoint.path, handler)

    def _table(self) -> tuple[Endpoint, ...]:
        filters: dict[str, Mapping[str, Any]] = {
            "limit": _LIMIT,
            "error": {
                **_TEXT,
                "description": "`true`: only those with an error; `false`: without; else: with this error type",
            },
            "worker": {**_TEXT, "description": "only those of which an attempt went there"},
            "model": {**_TEXT, "description": "only those of this fleet"},
            "stage": {**_TEXT, "description": "only those of this stage"},
            "slower_than": {
                "type": "number",
                "minimum": 0,
                "description": "only those whose first byte took longer, in seconds",
            },
            "trace_id": {**_TEXT, "description": "only those of this trace"},
            "running": {"type": "boolean", "default": False, "description": "those under way as well, first"},
        }
        unknown = {404: "there is no such request, or it is not kept any more"}
        no_worker = {404: "there is no such worker"}
        question = {
            "type": "object",
            "required": ["body"],
            "properties": {
                "path": {"type": "string", "default": "/v1/chat/completions"},
                "body": {"type": "object", "description": "as a client would send it"},
                "headers": {"type": "object", "additionalProperties": {"type": "string"}, "default": {}},
                "policies": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "default: the fleet's, then all others",
                },
            },
        }
        token = {"type": "object", "required": ["token"], "properties": {"token": {"type": "string"}}}
        return (
            Endpoint(
                method="GET",
                path="/api/fleet",
                handler=self._fleet,
                summary="All fleets and their workers, now",
                answers="fleets, totals, the process",
            ),
            Endpoint(
                method="GET",
                path="/api/workers/{id}",
                handler=self._worker,
                summary="One worker with capabilities and event feed",
                answers="the worker",
                errors=no_worker,
            ),
            Endpoint(
                method="POST",
                path="/api/workers/{id}/drain",
                handler=self._drain,
                summary="Let a worker finish and give it nothing new",
                answers="its state",
                errors=no_worker,
                body={"type": "object"},
            ),
            Endpoint(
                method="POST",
                path="/api/workers/{id}/undrain",
                handler=self._undrain,
                summary="Give a worker requests again",
                answers="its state",
                errors=no_worker,
                body={"type": "object"},
            ),
            Endpoint(
                method="GET",
                path="/api/requests",
                handler=self._requests,
                summary="Finished requests, latest first",
                answers="a line for each; `passed`: ordinary ones of which no record was kept",
                query=filters,
                errors={400: "a parameter makes no sense"},
            ),
            Endpoint(
                method="GET",
                path="/api/requests/{id}",
                handler=self._request,
                summary="One request with its candidate table",
                answers="all that is known of it",
                errors=unknown,
            ),
            Endpoint(
                method="GET",
                path="/api/requests/{id}/otlp",
                handler=self._otlp,
                summary="One request as OTLP-JSON",
                answers="an ExportTraceServiceRequest",
                errors=unknown,
            ),
            Endpoint(
                method="GET",
                path="/api/prefixes",
                handler=self._prefixes,
                summary="The hottest prefixes and who holds them",
                answers="prefixes, those first that saved most of late",
                query={
                    "limit": {**_LIMIT, "default": 50},
                    "model": {**_TEXT, "description": "only those of this fleet"},
                },
                errors={400: "a parameter makes no sense"},
            ),
            Endpoint(
                method="GET",
                path="/api/residency",
                handler=self._residency,
                summary="What workers are told about what to keep and fetch",
                answers="for each fleet: rules with the fates of their hints, the latest hints, budget, and what each worker understands",
            ),
            Endpoint(
                method="POST",
                path="/api/explain",
                handler=self._explain,
                summary="The decision that a request would get now, by several policies",
                answers="a candidate table for each policy",
                body=question,
                errors={400: "no such model, path or policy, or no such body"},
            ),
            Endpoint(
                method="GET",
                path="/api/config",
                handler=self._config,
                summary="The configuration in use, without secrets",
                answers="YAML, policies, links to trace viewers",
            ),
            Endpoint(
                method="GET",
                path="/api/live",
                handler=self._live,
                summary="Fleet ticks and finished requests as they end",
                answers="server-sent events `fleet` and `requests`; who is too slow is cut off",
                media_type="text/event-stream",
                errors={503: "too many watch already"},
            ),
            Endpoint(
                method="POST",
                path="/api/login",
                handler=self._login,
                summary="A cookie for the token",
                answers="the cookie is set",
                body=token,
                errors={400: "no token is asked for here", 403: "a wrong token"},
                open=True,
            ),
            Endpoint(
                method="POST",
                path="/api/logout",
                handler=self._logout,
                summary="Give the cookie back",
                answers="the cookie is gone",
                body={"type": "object"},
                open=True,
            ),
            Endpoint(
                method="GET",
                path="/api/openapi.json",
                handler=self._document,
                summary="This document",
                answers="OpenAPI 3.1",
                open=True,
            ),
        )

    def _guarded(self, endpoint: Endpoint) -> Any:
        """The handler, for those who may."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self._access.admits(request):
                if self._access.closed:
                    return failure(403, "this listener is not on loopback: set admin.token to use the inspector")
                return failure(
                    401, "a token is needed: `Authorization: Bearer ...`, or log in", {"www-authenticate": "Bearer"}
                )
            if endpoint.method == "POST" and (refusal := _foreign(request)) is not None:
                return refusal
            return await endpoint.handler(request)

        return guarded

    # Reading.

    async def _fleet(self, _request: web.Request) -> web.Response:
        return answer(fleet_document(self._sources))

    async def _worker(self, request: web.Request) -> web.Response:
        document = worker_document(self._sources, request.match_info["id"])
        return answer(document) if document is not None else failure(404, "there is no such worker")

    async def _requests(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            limit = _limit(query, LIMIT)
            slower = float(query["slower_than"]) if query.get("slower_than") else None
        except ValueError:
            return failure(400, f"limit is a number from 1 to {MOST}, slower_than a number of seconds")
        error: bool | str | None = query.get("error") or None
        if error in {"true", "false"}:
            error = error == "true"
        decisions = self._sources.decisions
        records = decisions.recent(
            limit,
            error=error,
            worker=query.get("worker") or None,
            model=query.get("model") or None,
            stage=query.get("stage") or None,
            slower_than=slower,
            trace_id=query.get("trace_id") or None,
        )
        running = decisions.running()[:limit] if query.get("running") == "true" else []
        return answer(
            {
                "running": [each.summary() for each in running],
                "requests": [each.summary() for each in records],
                "passed": decisions.passed,
            }
        )

    async def _request(self, request: web.Request) -> web.Response:
        record = self._record(request)
        return answer(record.document()) if record is not None else not_kept()

    async def _otlp(self, request: web.Request) -> web.Response:
        record = self._record(request)
        if record is None:
            return not_kept()
        service = self._sources.config().telemetry.service_name
        response = answer(await asyncio.to_thread(otlp_document, record, service))
        name = re.sub(r"[^A-Za-z0-9._-]", "_", record.id)[:100]
        response.headers["content-disposition"] = f'attachment; filename="{name}.otlp.json"'
        return response

    def _record(self, request: web.Request) -> "RequestRecord | None":
        return self._sources.decisions.get(request.match_info["id"])

    async def _prefixes(self, request: web.Request) -> web.Response:
        try:
            limit = _limit(request.query, 50)
        except ValueError:
            return failure(400, f"limit is a number from 1 to {MOST}")
        return answer(prefix_document(self._sources, limit, request.query.get("model") or None))

    async def _residency(self, _request: web.Request) -> web.Response:
        now = self._sources.clock()
        return answer({"now": now, **self._sources.residency()})

    async def _config(self, _request: web.Request) -> web.Response:
        config = self._sources.config()
        return answer(
            {
                "yaml": _USERINFO.sub("<redacted>@", dump(config)),
                "models": [
                    {"model": fleet.name, "aliases": list(fleet.aliases), "policy": fleet.policy_name}
                    for fleet in self._sources.fleets()
                ],
                "policies": list(config.policies),
                "presets": self._sources.registry.presets(),
                "links": {
                    name: url for name, url in config.admin.links.items() if url.startswith(("https://", "http://"))
                },
                "listen": {"host": config.listen.host, "port": config.listen.port},
                "slow": config.telemetry.decisions.slow,
                "login": self._access.token is not None,
            }
        )

    async def _live(self, request: web.Request) -> web.StreamResponse:
        return await self.live.watch(request)

    async def _document(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type="application/json")

    # Doing.

    async def _explain(self, request: web.Request) -> web.Response:
        question = _question(await json_body(request))
        if question is None:
            return failure(400, 'expected {"body": {...}, "path": "/v1/...", "headers": {...}, "policies": [...]}')
        try:
            return answer(await explain(self._sources, question))
        except UnexplainableError as error:
            return failure(400, str(error))

    async def _drain(self, request: web.Request) -> web.Response:
        return self._moved(request, done=self._sources.drain(request.match_info["id"]))

    async def _undrain(self, request: web.Request) -> web.Response:
        return self._moved(request, done=self._sources.undrain(request.match_info["id"]))

    def _moved(self, request: web.Request, *, done: bool) -> web.Response:
        worker_id = request.match_info["id"]
        worker = next((each for each in self._sources.fleets().workers() if each.id == worker_id), None)
        if not done or worker is None:
            return failure(404, "there is no such worker")
        return answer({"id": worker.id, "state": worker.state.value, "in_flight": worker.in_flight})

    async def _login(self, request: web.Request) -> web.Response:
        if (refusal := _foreign(request)) is not None:
            return refusal
        if self._access.token is None:
            return failure(400, "no token is asked for here")
        body = await json_body(request)
        token = body.get("token") if isinstance(body, dict) else None
        if not isinstance(token, str) or not self._access.knows(token):
            await asyncio.sleep(_WRONG_TOKEN)
            return failure(403, "that is not the token")
        response = answer({"ok": True})
        response.set_cookie(
            COOKIE,
            self._access.session(),
            max_age=int(SESSION),
            path="/",
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return response

    async def _logout(self, request: web.Request) -> web.Response:
        if (refusal := _foreign(request)) is not None:
            return refusal
        response = answer({"ok": True})
        response.del_cookie(COOKIE, path="/", httponly=True, samesite="Strict")
        return response


def _foreign(request: web.Request) -> web.Response | None:
    """The refusal of a POST that a page of somebody else's may have set off."""
    if request.content_type != "application/json":
        return failure(415, "expected application/json")
    if not same_origin(request):
        return failure(403, "this comes from another site's page")
    return None


def _question(document: Any) -> Question | None:
    if not isinstance(document, dict) or not isinstance(document.get("body"), dict):
        return None
    path = document.get("path", "/v1/chat/completions")
    headers = document.get("headers", {})
    policies = document.get("policies", [])
    if (
        not isinstance(path, str)
        or not _texts(policies)
        or not isinstance(headers, dict)
        or not _texts([*headers.values()])
    ):
        return None
    lower = {str(name).lower(): value for name, value in headers.items()}
    return Question(path=path, body=document["body"], headers=lower, policies=policies[:MOST])


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _limit(query: Mapping[str, str], default: int) -> int:
    limit = int(query.get("limit") or default)
    if not 1 <= limit <= MOST:
        raise ValueError
    return limit
