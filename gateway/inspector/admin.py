"""The admin listener: is the process alive, is it ready, what do its counters say; and the inspector with its API."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from gateway.inspector.access import Access, host_allowed
from gateway.inspector.api import BODY, Api
from gateway.inspector.pages import POLICY, Pages

if TYPE_CHECKING:
    from gateway.config.schema import Admin
    from gateway.inspector.sources import InspectorSources

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHUTDOWN: Final = 1.0
"""Seconds that a request to this listener may still take when it stops."""
_SAFE: Final = {
    "cache-control": "no-store",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """One fleet as `/readyz` shows it.

    Attributes:
        model: the fleet's name.
        ready: workers that take requests.
        total: workers in all.
        degraded: what works less well than it should, one short sentence each.
    """

    model: str
    ready: int
    total: int
    degraded: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReloadStatus:
    """The latest configuration reload. Before the first one, all is well.

    Attributes:
        ok: whether the configuration in use is the one in the file.
        error: if not, what is wrong with the file.
        time: Unix time of the reload in seconds, None before the first.
        warnings: what the file asks for and a reload cannot give, one short sentence each.
    """

    ok: bool = True
    error: str | None = None
    time: float | None = None
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSources:
    """Where the admin listener gets what it shows. Each is called per request and must be quick.

    Attributes:
        fleets: all fleets.
        reload: the latest configuration reload.
        draining: whether the process is on its way out.
        degraded: what works less well than it should and is no fleet's, one short sentence each.
        information: what is worth knowing though nothing is wrong with it.
        metrics: the metrics' text and content type for an Accept header's value (`Metrics.scrape`, or `Metrics.render`
            where a pause does no harm).
    """

    fleets: Callable[[], Sequence[FleetStatus]]
    metrics: Callable[[str | None], tuple[bytes, str] | Awaitable[tuple[bytes, str]]]
    reload: Callable[[], ReloadStatus] = ReloadStatus
    draining: Callable[[], bool] = bool
    degraded: Callable[[], Sequence[str]] = tuple
    information: Callable[[], Sequence[str]] = tuple


class AdminServer:
    """An HTTP listener of its own, so that nothing of this is ever reachable where clients are."""

    def __init__(
        self, address: "Admin", sources: AdminSources, version: str = "", inspector: "InspectorSources | None" = None
    ) -> None:
        """Without `inspector` there are health, readiness and metrics only."""
        self._address = address
        self._sources = sources
        self._version = version
        self._inspector = inspector
        self._runner: web.AppRunner | None = None
        self._port = address.port

    @property
    def port(self) -> int:
        """The port it listens on; the configured one before `start`."""
        return self._port

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address is taken or not ours, or the token's file can't be read or holds none.
        """
        app = web.Application(middlewares=[self._guard], client_max_size=BODY)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        if self._inspector is not None:
            api = Api(self._inspector, Access.from_config(self._address))
            api.add_to(app.router)
            Pages().add_to(app.router)

            async def close_streams(_app: web.Application) -> None:
                await api.live.close()

            app.on_shutdown.append(close_streams)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._address.host, self._address.port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the listener and its connections. Calling it again does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse foreign Host names, and answer errors as JSON with headers that keep browsers careful."""
        if not host_allowed(request.headers.getall("host", []), self._address.host):
            response: web.StreamResponse = _json(421, {"error": "this listener does not answer to that Host"})
        else:
            try:
                response = await handler(request)
            except web.HTTPMethodNotAllowed as error:
                allowed = ",".join(sorted(error.allowed_methods))
                response = _json(405, {"error": f"only {allowed}"})
                response.headers["allow"] = allowed
            except web.HTTPException as error:
                response = _json(error.status, {"error": _ERRORS.get(error.status, error.reason)})
        if not response.prepared:
            for name, value in _SAFE.items():
                response.headers.setdefault(name, value)
        return response

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready, report = readiness(self._sources)
        return _json(200 if ready else 503, report)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self._sources.metrics(request.headers.get("accept"))
        body, content_type = await text if isinstance(text, Awaitable) else text
        return web.Response(body=body, headers={"content-type": content_type})


def readiness(sources: AdminSources) -> tuple[bool, dict[str, Any]]:
    """Whether requests should be sent here, and the report behind it.

    Ready means: not draining, and at least one fleet has a worker. A fleet without workers shows as degraded but takes
    nothing away from the others, for which this gateway is still the way in.
    """
    fleets = sources.fleets()
    reload = sources.reload()
    draining = sources.draining()
    degraded = [f"{fleet.model}: {text}" for fleet in fleets for text in fleet.degraded]
    degraded += [f"{fleet.model}: no worker is ready" for fleet in fleets if not fleet.ready]
    if not reload.ok:
        degraded.append("the configuration file has an error; the previous one is in use")
    degraded += reload.warnings
    degraded += sources.degraded()
    ready = not draining and any(fleet.ready for fleet in fleets)
    return ready, {
        "ready": ready,
        "draining": draining,
        "fleets": {fleet.model: {"ready": fleet.ready, "total": fleet.total} for fleet in fleets},
        "degraded": degraded,
        "information": list(sources.information()),
        "reload": {"ok": reload.ok, "error": reload.error, "time": reload.time},
    }


_ERRORS: Final = {
    404: "there is nothing here; / is the inspector, /api/openapi.json lists its API, and /healthz, /readyz and /metrics are there",
    413: f"the body is longer than {BODY} bytes",
    503: "too many watch already",
}


def _json(status: int, document: dict[str, Any]) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE), content_type="application/json"
    )
