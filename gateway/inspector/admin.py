"""The admin listener: is the process alive, is it ready, what do its counters say."""

import html
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from gateway.config.schema import Address

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHUTDOWN: Final = 1.0
"""Seconds that a request to this listener may still take when it stops."""
_SAFE: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_ENDPOINTS: Final = (
    ("/healthz", "200 while the process is alive"),
    ("/readyz", "200 while requests can be served, else 503; JSON says why and what is degraded"),
    ("/metrics", "counters for Prometheus (text 0.0.4, or OpenMetrics if asked for)"),
)


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
        metrics: the metrics' text and content type for an Accept header's value (`Metrics.scrape`, or `Metrics.render`
            where a pause does no harm).
    """

    fleets: Callable[[], Sequence[FleetStatus]]
    metrics: Callable[[str | None], tuple[bytes, str] | Awaitable[tuple[bytes, str]]]
    reload: Callable[[], ReloadStatus] = ReloadStatus
    draining: Callable[[], bool] = bool


class AdminServer:
    """An HTTP listener of its own, so that nothing of this is ever reachable where clients are."""

    def __init__(self, address: "Address", sources: AdminSources, version: str = "") -> None:
        self._address = address
        self._sources = sources
        self._version = version
        self._runner: web.AppRunner | None = None
        self._port = address.port

    @property
    def port(self) -> int:
        """The port it listens on; the configured one before `start`."""
        return self._port

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address is taken or not ours.
        """
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._index)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
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
            except web.HTTPException as error:
                if error.status == 405:
                    response = _json(405, {"error": "only GET"})
                    response.headers["allow"] = "GET, HEAD"
                else:
                    response = _json(error.status, {"error": "there is nothing here; / lists what there is"})
        for name, value in _SAFE.items():
            response.headers[name] = value
        return response

    async def _index(self, _request: web.Request) -> web.Response:
        rows = "\n".join(f'<li><a href="{path}">{path}</a>: {html.escape(text)}</li>' for path, text in _ENDPOINTS)
        page = (
            '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>warmroute admin</title>\n'
            f"<h1>warmroute {html.escape(self._version)}</h1>\n<ul>\n{rows}\n</ul>\n</html>\n"
        )
        return web.Response(text=page, content_type="text/html")

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
    ready = not draining and any(fleet.ready for fleet in fleets)
    return ready, {
        "ready": ready,
        "draining": draining,
        "fleets": {fleet.model: {"ready": fleet.ready, "total": fleet.total} for fleet in fleets},
        "degraded": degraded,
        "reload": {"ok": reload.ok, "error": reload.error, "time": reload.time},
    }


def host_allowed(hosts: Sequence[str], bound: str) -> bool:
    """Whether a request's Host fields are what a listener on `bound` may answer to.

    A page on the web can make its own name resolve to 127.0.0.1 and then read what a loopback listener says (DNS
    rebinding); its requests carry that name. So a loopback listener answers only to loopback's names, another one to
    any one Host, as it is reached by names that we cannot know.
    """
    if len(hosts) > 1:
        return False
    if not _is_loopback(bound):
        return True
    if not hosts:
        return False
    try:
        name = urlsplit(f"//{hosts[0]}").hostname
    except ValueError:
        return False
    return name is not None and _is_loopback(name.rstrip("."))


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _json(status: int, document: dict[str, Any]) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE), content_type="application/json"
    )
