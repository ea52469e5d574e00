"""The routes of a simulated worker, and what surrounds each of them: faults, warm-up, API key, errors, counters."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
import orjson
from aiohttp import web

from simulator.server import anthropic, openai, service, utilities
from simulator.server.errors import ApiError, bad_request, internal_error
from simulator.server.faults import ResettingTransport
from simulator.server.metrics import exposition
from simulator.server.parameters import Body, decode_body

if TYPE_CHECKING:
    from simulator.server.worker import SimulatedWorker

LARGEST_BODY = 256 * 1024 * 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ApiHandler = Callable[["SimulatedWorker", web.Request, Body], Awaitable[web.StreamResponse]]

API: dict[str, ApiHandler] = {
    "/v1/chat/completions": openai.chat,
    "/v1/completions": openai.completion,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/v1/embeddings": utilities.embeddings,
    "/tokenize": utilities.tokenize,
    "/detokenize": utilities.detokenize,
}
"""POST routes with a JSON body."""
ALWAYS_OPEN = ("/simulator/", "/metrics")
"""Neither faults nor warm-up close these."""


def build_app(worker: "SimulatedWorker") -> web.Application:
    """The application that serves `worker`."""
    routes = _Routes(worker)
    app = web.Application(middlewares=[routes.surround], client_max_size=LARGEST_BODY)
    for path, handler in API.items():
        app.router.add_post(path, routes.api(handler))
    app.router.add_post("/invocations", routes.invocations)
    for path, get in (
        ("/v1/models", routes.models),
        ("/health", routes.empty),
        ("/ping", routes.empty),
        ("/version", routes.version),
        ("/load", routes.load),
        ("/metrics", routes.metrics),
        ("/kv_event_sources", routes.kv_event_sources),
        ("/server_info", routes.server_info),
        ("/openapi.json", routes.openapi),
        ("/simulator/state", routes.state),
    ):
        app.router.add_get(path, get, allow_head=False)
    app.router.add_post("/ping", routes.empty)
    app.router.add_post("/reset_prefix_cache", routes.reset_prefix_cache)
    app.router.add_post("/simulator/faults", routes.set_faults)
    return app


class _Routes:
    """The handlers; each takes a request and returns an answer or raises `ApiError`."""

    def __init__(self, worker: "SimulatedWorker") -> None:
        self._worker = worker
        key = worker.options.api_key
        self._key = hashlib.sha256(key.encode()).digest() if key else None

    @web.middleware
    async def surround(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let faults act, check the key, count, and turn errors into answers."""
        worker, path = self._worker, request.path
        if path.startswith(ALWAYS_OPEN):
            return await self._answered(request, handler)
        started = time.monotonic()
        worker.requests += 1
        status = 499
        try:
            if worker.faults.hits_answers():
                await self._harm(request)
            response = await self._answered(request, handler)
            status = response.status
        finally:
            worker.requests -= 1
            resource = request.match_info.route.resource
            worker.metrics.http(
                resource.canonical if resource else "none", request.method, status, time.monotonic() - started
            )
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or what stands for it, with the headers that every answer has."""
        worker = self._worker
        try:
            response = await self._guarded(request, handler)
        except ApiError as error:
            body = error.anthropic_body() if request.path.startswith("/v1/messages") else error.body()
            response = web.Response(status=error.status, body=body, content_type=service.JSON)
        except web.HTTPException as error:
            headers = {"allow": error.headers["Allow"]} if "Allow" in error.headers else None
            detail = orjson.dumps({"detail": error.reason})
            response = web.Response(status=error.status, body=detail, content_type=service.JSON, headers=headers)
        if not response.prepared:
            response.headers.update(worker.answer_headers(request))
        return response

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, unless the worker is warming, a fault strikes or the key is wrong."""
        worker, path = self._worker, request.path
        if path.startswith(ALWAYS_OPEN):
            return await handler(request)
        if worker.warming:
            return web.Response(status=503)
        if self._key is not None and path.startswith("/v1") and not self._authorized(request):
            return web.Response(status=401, body=b'{"error":"Unauthorized"}', content_type=service.JSON)
        if path in API and worker.fails():
            raise ApiError(worker.faults.error_status, "A fault was asked for.", error_type="InternalServerError")
        return await handler(request)

    def _authorized(self, request: web.Request) -> bool:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        return scheme.lower() == "bearer" and hmac.compare_digest(digest, self._key or b"")

    async def _harm(self, request: web.Request) -> None:
        """Let the faults of connections strike this request."""
        worker = self._worker
        faults = worker.faults
        if faults.hang:
            worker.fault_struck()
            await asyncio.Event().wait()  # until the client leaves or the worker stops
        protocol = request.protocol
        if faults.reset_after_bytes is not None and protocol.transport is not None:
            worker.fault_struck()
            proxy = ResettingTransport(protocol.transport, faults.reset_after_bytes)
            protocol.transport = proxy  # type: ignore[assignment]  # it stands in for a transport

    def api(self, handler: ApiHandler) -> Handler:
        """A route with a JSON body."""
        worker = self._worker

        async def route(request: web.Request) -> web.StreamResponse:
            body = decode_body(await request.read(), request.headers.get("Content-Type", ""))
            return await handler(worker, request, body)

        return route

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """SageMaker's one path: the body tells which API is meant."""
        body = decode_body(await request.read(), request.headers.get("Content-Type", ""))
        handler = openai.chat if "messages" in body else openai.completion
        return await handler(self._worker, request, body)

    async def empty(self, _: web.Request) -> web.Response:
        """Alive and ready."""
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        """The model cards."""
        return service.json_response(utilities.model_cards(self._worker))

    async def version(self, _: web.Request) -> web.Response:
        """The version of vLLM that it claims to be."""
        return service.json_response({"version": self._worker.options.version})

    async def load(self, _: web.Request) -> web.Response:
        """Requests in flight, this one not counted."""
        return service.json_response({"server_load": self._worker.requests - 1})

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        body = exposition(self._worker).encode()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """Where KV events come from."""
        return service.json_response(utilities.kv_event_sources(self._worker))

    async def server_info(self, _: web.Request) -> web.Response:
        """The configuration, as far as a simulated worker has one."""
        return service.json_response(utilities.server_info(self._worker))

    async def openapi(self, _: web.Request) -> web.Response:
        """Which routes there are, and of requests those fields that gateways look for."""
        return service.json_response(utilities.openapi(self._worker, API))

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Forget the cached blocks."""
        return service.json_response({"success": self._worker.pump.reset_prefix_cache()})

    async def state(self, _: web.Request) -> web.Response:
        """What the simulator knows about itself."""
        return web.Response(body=msgspec.json.encode(self._worker.state()), content_type=service.JSON)

    async def set_faults(self, request: web.Request) -> web.Response:
        """Change what goes wrong: fields that are not named stay; ``{"clear": true}`` first sets all back."""
        worker = self._worker
        try:
            fields = msgspec.json.decode(await request.read(), type=dict)
            base = type(worker.faults)() if fields.pop("clear", False) else worker.faults
            faults = base.changed(fields)
        except (msgspec.MsgspecError, ValueError) as error:
            raise bad_request(str(error)) from None
        try:
            await worker.set_faults(faults)
        except OSError as error:
            raise internal_error(f"can't listen again: {error}") from None
        return web.Response(body=msgspec.json.encode(worker.faults), content_type=service.JSON)
