"""The composition root: builds every part of a gateway from one `Config`, starts it, reloads it, stops it.

Nothing is built at import and nothing is global, so a process (a test, the demo) may run several gateways.
"""

import asyncio
import gc
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gateway import __version__
from gateway.admission.controller import Admissions
from gateway.admission.keys import KeysError
from gateway.admission.tenancy import Tenancy
from gateway.config.reload import ConfigWatcher
from gateway.degradation import PolicyFaultLog, fleet_status, policy_faults, resilience
from gateway.fleet.asking import open_session
from gateway.fleet.fleet import Fleets
from gateway.fleet.health import HealthMonitor
from gateway.fleet.models import ModelCards
from gateway.http.headers import RequestIds
from gateway.http.pool import UpstreamPool
from gateway.http.proxy import Proxy
from gateway.http.report import Reports
from gateway.http.routes import ROUTES
from gateway.http.server import GatewayServer
from gateway.http.sweep import Sweeper, gateway_stopping
from gateway.inspector.admin import AdminServer, AdminSources, FleetStatus, ReloadStatus
from gateway.inspector.sources import InspectorSources
from gateway.overload.accept import Acceptor
from gateway.overload.guard import Guard
from gateway.prefix.matching import Matching
from gateway.prompt.tokenizer import TokenizerError
from gateway.residency.directories import Directories
from gateway.residency.fleets import Residencies
from gateway.tasks import TaskGroup
from gateway.telemetry.collector import Readings
from gateway.telemetry.decisions import DecisionLog
from gateway.telemetry.loop import LoopMonitor
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLogWriter
from gateway.telemetry.spans import Tracing
from policies.registry import Registry

if TYPE_CHECKING:
    from gateway.config.schema import Config
    from gateway.prompt.tokenizer import PromptTokenizer
    from gateway.telemetry.otlp_metrics import MetricsExporter
    from policies.base import Policy

_log = structlog.get_logger(__name__)

_BACKLOG = 4096
_POLL = 0.02
_FLUSH = 1.0
_RETIRE_POLL = 0.25
_IDLE = 1.0
"""Seconds without a request after which a connection is closed where descriptors are short."""


class Gateway:
    """One gateway: the data listener, the admin listener, and all that stands behind them.

    Attributes:
        port: of the data listener, once started (the configured one may have been 0).
        admin_port: of the admin listener, once started.
        decisions: the requests that have ended lately, and those under way.
        inspector: where the inspector gets what it shows.
    """

    def __init__(
        self,
        config: "Config",
        *,
        config_path: Path | None = None,
        registry: Registry | None = None,
        logs_dropped: Callable[[], int] = int,
        on_reload: Callable[["Config"], None] | None = None,
    ) -> None:
        """Build the parts. Must be called in a running event loop.

        Args:
            config: what to do.
            config_path: the file it came from, to be watched; None: no reload.
            registry: of policies; default: the built-in ones and installed plug-ins.
            logs_dropped: how many log lines were lost, for the metrics.
            on_reload: called with each configuration that has come into effect by a reload.

        Raises:
            PolicyError, UnknownDriverError: `config` was not checked by `gateway.config.load`.
        """
        loop = asyncio.get_running_loop()
        self.config = config
        self._loop = loop
        self._registry = registry or Registry.default()
        self._fleets = Fleets.from_config(config, self._policy_builder(config))
        self._cards = ModelCards(self._fleets, created=int(time.time()))
        self._session = open_session()
        self._health = HealthMonitor(self._session, self._fleets, cards=self._cards)
        self._pool = UpstreamPool(idle=config.pool.idle, max_idle=config.pool.max_idle)
        self._sweeper = Sweeper(loop, self._pool, config.limits.header_read)
        self._matching = Matching(config, self._session)
        self._monitor = LoopMonitor()
        self._tenancy = Tenancy(time.monotonic)
        self._admissions = Admissions(loop)
        self._tasks = TaskGroup("gateway")
        self._residencies = Residencies(self._session, clock=time.monotonic, feeds=lambda: self._matching.feeds)
        self._directories = Directories(self._session, clock=loop.time, feeds=lambda: self._matching.feeds)
        self._tracing = Tracing.from_config(config.telemetry)
        self._request_log = RequestLogWriter.from_config(config.telemetry.request_log)
        self.decisions = DecisionLog(config.telemetry.decisions)
        self.metrics = Metrics(paths=ROUTES, version=__version__)
        self._exporting: MetricsExporter | None = None
        self._name_labels()
        self.proxy = Proxy(
            config,
            self._fleets,
            health=self._health,
            cards=self._cards,
            pool=self._pool,
            sweeper=self._sweeper,
            tracing=self._tracing,
            reports=self._reports(config),
            ids=RequestIds(secrets.token_hex(8)),
            loop=loop,
        )
        self._admit_by(config)
        self.proxy.session_ended = self._residencies.session_ended
        self._server = GatewayServer(
            self.proxy.handle,
            on_refused=self.proxy.refused,
            max_connections=config.limits.connections,
            keep_alive=config.limits.keep_alive,
            loop=loop,
        )
        self._guard = self.proxy.guard = Guard(loop, rss=self._monitor.rss, on_descriptors=self._close_idle)
        self._guard_by(config)
        self._logs_dropped = logs_dropped
        self._on_reload = on_reload
        self._read_metrics()
        self.inspector = self._inspector_sources()
        self._admin = AdminServer(config.admin, self._admin_sources(), __version__, self.inspector)
        self._watcher = ConfigWatcher(config_path, config, self._reconfigure) if config_path is not None else None
        self._listener: Acceptor | None = None
        self.port = config.listen.port

    @property
    def admin_port(self) -> int:
        """Of the admin listener."""
        return self._admin.port

    async def start(self) -> None:
        """Bind both listeners and begin to watch the workers.

        Raises:
            OSError: an address is taken or not ours.
            TokenizerError: a model's tokenizer can't be loaded.
            KeysError: the tenants' keys can't be read.
        """
        self._monitor.start()
        try:
            self._tenancy.use(self.config, await self._tenancy.prepare(self.config))
            self.proxy.tenants = self._tenancy.current
            self._match_by(self.config, self._fleets, await self._load_tokenizers(self.config))
            await self._admin.start()
            listen = self.config.listen
            self._listener = Acceptor(self._loop, self._server, self._guard)
            await self._listener.start(listen.host, listen.port, _BACKLOG)
        except (OSError, TokenizerError, KeysError):
            await self._close()
            raise
        self.port = self._listener.port
        self._guard.start()
        self._sweeper.start(self._server)
        self._health.start()
        self._matching.start()
        self._residencies.start()
        self._directories.start()
        self._export_metrics()
        self._tasks.spawn("policy-faults", PolicyFaultLog(lambda: self._fleets, self._loop.time).run())
        self._tenancy.announce()
        self._tasks.spawn("keys", self._tenancy.run())
        if self._watcher is not None:
            self._watcher.start()
        # What exists now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()

    async def wait_ready(self, timeout: float) -> bool:  # noqa: ASYNC109 - a result, no error
        """Wait until every fleet has a worker that takes requests; False after `timeout` seconds."""
        return await self._health.wait_ready(timeout)

    def request_reload(self) -> None:
        """Read the configuration file again: what SIGHUP does."""
        if self._watcher is not None:
            self._watcher.request_reload()

    async def stop(self, grace: float | None = None) -> None:
        """Readiness off, no new connections, let running requests end; after `grace` seconds end them with an error."""
        grace = self.config.grace if grace is None else grace
        self.proxy.draining = True
        if self._watcher is not None:
            await self._watcher.stop()
        if self._listener is not None:
            self._listener.close()
        # Idle connections have nothing to lose; busy ones are closed by their answer, which says so where its head is still to come.
        self._server.close_idle()
        for exchange in self._sweeper.exchanges:
            exchange.keep_alive &= exchange.started
        if not await self._until_idle(grace):
            self.proxy.stopping = True
            for exchange in list(self._sweeper.exchanges):
                exchange.fail(gateway_stopping())
            # The others (uploading, connecting) have no answer that could be ended; theirs is an error of ours.
            self._server.cancel_requests()
            await self._until_idle(_FLUSH)
        await self._close()

    async def _until_idle(self, seconds: float) -> bool:
        """Wait until no request is in flight and what was written has left; False when that takes longer."""
        deadline = self._loop.time() + seconds
        while self.metrics.in_flight or self._server.unsent():
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL)
        return True

    async def _close(self) -> None:
        self.proxy.stopping = True
        if self._listener is not None:
            await self._listener.stop()
        self._guard.stop()
        await self._server.shutdown(_FLUSH)
        await self._health.stop()
        await self._matching.stop()
        await self._residencies.stop()
        await self._directories.stop()
        self._admissions.stop()
        self._sweeper.stop()
        self._pool.close()
        await self._admin.stop()
        await self._session.close()
        self._monitor.stop()
        await self._tasks.cancel()
        if self._exporting is not None:
            await self._exporting.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.shutdown)
        if self._request_log is not None:
            await asyncio.to_thread(self._request_log.stop)

    def _reports(self, config: "Config") -> Reports:
        return Reports(config.telemetry, self.metrics, self.decisions, self._request_log)

    def _policy_builder(self, config: "Config") -> "Callable[[str], Policy]":
        return lambda name: self._registry.build(name, config.policies)

    async def _load_tokenizers(self, config: "Config") -> "dict[str, PromptTokenizer]":
        return await asyncio.to_thread(self._matching.prepare, config, self._policy_builder(config))

    def _match_by(self, config: "Config", fleets: Fleets, tokenizers: "dict[str, PromptTokenizer]") -> None:
        self._residencies.leaving(fleets)
        self._matching.use(config, fleets, tokenizers)
        self.proxy.matchers = self._matching.matchers
        self._residencies.use(config, fleets)
        self._directories.use(config, fleets)
        self.proxy.residencies = self._residencies.fleets
        self._warm_reservations()

    def _admit_by(self, config: "Config") -> None:
        self._admissions.configure(config, self._fleets)
        self.proxy.admissions = self._admissions if self._admissions.needed else None
        self._warm_reservations()

    def _warm_reservations(self) -> None:
        """Where a slot is reserved for a conversation's next stage, residency is told."""
        fleets = self._residencies.fleets
        for name, gate in self._admissions.gates.items():
            gate.reservations.warm = live.reserved if (live := fleets.get(name)) is not None else None

    def _drain(self, worker_id: str) -> bool:
        """Let a worker finish; what it holds of live conversations moves on."""
        known = self._health.drain(worker_id)
        if known:
            self._residencies.drained(worker_id)
        return known

    def _guard_by(self, config: "Config") -> None:
        self._guard.configure(config.overload, [stage.priority for stage in config.stages.values()])

    def _close_idle(self) -> None:
        """Descriptors are short: let go of those that nobody uses now."""
        self._server.close_idle_for(_IDLE)
        self._pool.prune(_IDLE)

    async def _reconfigure(self, config: "Config") -> None:
        """Put another configuration into effect: all of it, or nothing when a part can't be built."""
        tokenizers = await self._load_tokenizers(config)
        keys = await self._tenancy.prepare(config)
        tracing = self._tracing
        if config.telemetry != self.config.telemetry:
            tracing = Tracing.from_config(config.telemetry)
        request_log = self._request_log
        if config.telemetry.request_log != self.config.telemetry.request_log:
            request_log = RequestLogWriter.from_config(config.telemetry.request_log)
        # The last part that may fail: from here on workers that are no longer wanted are gone.
        fleets = self._fleets.updated(config, self._policy_builder(config))
        same_metrics = config.telemetry.metrics == self.config.telemetry.metrics
        before, self._tracing = self._tracing, tracing
        self._fleets = fleets
        self.config = config
        self._pool.max_idle_seconds = config.pool.idle
        self._pool.max_idle = config.pool.max_idle
        self._sweeper.header_read = config.limits.header_read
        self._server.max_connections = config.limits.connections
        self._server.set_keep_alive(config.limits.keep_alive)
        self._health.update(fleets)
        self._tenancy.use(config, keys)
        self.proxy.tenants = self._tenancy.current
        self._match_by(config, fleets, tokenizers)
        self._admit_by(config)
        self._guard_by(config)
        self._name_labels()
        old_log, self._request_log = self._request_log, request_log
        self.decisions.configure(config.telemetry.decisions)
        self.proxy.reconfigure(config, fleets, tracing, self._reports(config))
        if not same_metrics:
            if self._exporting is not None:
                self._tasks.spawn("retire-metrics", self._exporting.stop())
            self._export_metrics()
        if self._on_reload is not None:
            self._on_reload(config)
        if before is not None and before is not tracing:
            self._tasks.spawn("retire-tracing", _retire(before))
        if old_log is not None and old_log is not request_log:
            self._tasks.spawn("retire-request-log", asyncio.to_thread(old_log.stop))

    def _name_labels(self) -> None:
        self.metrics.configured(
            [fleet.name for fleet in self._fleets], [worker.id for worker in self._fleets.workers()]
        )

    def _export_metrics(self) -> None:
        """Begin to send the counters where the configuration wants them, and show them under the names that it wants."""
        telemetry = self.config.telemetry
        self.metrics.hyperpod = telemetry.metrics.labels if telemetry.metrics.hyperpod else None
        self._exporting = None
        if telemetry.metrics.exporter == "otlp":
            from gateway.telemetry.otlp_metrics import MetricsExporter  # noqa: PLC0415  # the SDK: nobody else pays for it

            self._exporting = MetricsExporter.from_config(telemetry, self.metrics.snapshot)
            self._exporting.start()

    def _read_metrics(self) -> None:
        def dropped() -> dict[str, int]:
            return {
                "spans": self._tracing.dropped if self._tracing is not None else 0,
                "logs": self._logs_dropped(),
                "request_log": self._request_log.dropped if self._request_log is not None else 0,
                "metrics": self._exporting.dropped if self._exporting is not None else 0,
            }

        self.metrics.readings = Readings(
            workers=lambda: [(fleet.name, worker) for fleet in self._fleets for worker in fleet.workers],
            ejections=self._health.ejections,
            upstream_sockets=self._pool.counts,
            client_connections=lambda: len(self._server.connections_open),
            policy_faults=lambda: {fleet.name: policy_faults(fleet) for fleet in self._fleets},
            resilience=lambda: resilience(self._fleets, self._health, self.proxy.hedging),
            dropped=dropped,
            loop=self._monitor,
            tenants=self._tenancy.accounts,
            overload=self._guard,
            queues=self._admissions.readings,
            parity=self._matching.parity,
            truth=lambda: self._matching.truth,
            feeds=lambda: feeds.snapshot() if (feeds := self._matching.feeds) is not None else (),
            prefix_maps=lambda: feeds.index.maps if (feeds := self._matching.feeds) is not None else {},
            residencies=self._residencies.readings,
            hint_latency=lambda: self._residencies.delivery.latency,
        )

    def _inspector_sources(self) -> InspectorSources:
        return InspectorSources(
            config=lambda: self.config,
            fleets=lambda: self._fleets,
            lives=self._health.snapshot,
            degraded=lambda: {
                fleet.name: fleet_status(fleet, self._degraded(fleet.name)).degraded for fleet in self._fleets
            },
            matchers=lambda: self._matching.matchers,
            index=lambda: feeds.index if (feeds := self._matching.feeds) is not None else None,
            metrics=self.metrics,
            decisions=self.decisions,
            drain=self._drain,
            undrain=self._health.undrain,
            clock=time.monotonic,
            hot=self._matching.hot,
            registry=self._registry,
            residency=lambda: {**self._residencies.document(), "l2": self._directories.document()},
        )

    def _degraded(self, fleet: str) -> list[str]:
        return [
            *self._matching.degraded(fleet),
            *self._residencies.degraded(fleet),
            *self._directories.degraded(fleet),
            *self._health.degraded(fleet),
        ]

    def _admin_sources(self) -> AdminSources:
        def fleets() -> list[FleetStatus]:
            return [fleet_status(fleet, self._degraded(fleet.name)) for fleet in self._fleets]

        def reload() -> ReloadStatus:
            watcher = self._watcher
            if watcher is None:
                return ReloadStatus()
            return ReloadStatus(
                watcher.last_error is None, watcher.last_error, watcher.last_reload_time, watcher.warnings
            )

        async def metrics(accept: str | None) -> tuple[bytes, str]:
            if self._watcher is not None:
                self.metrics.reloads = {True: self._watcher.reloads_ok, False: self._watcher.reloads_failed}
            return await self.metrics.scrape(accept)

        return AdminSources(
            fleets=fleets,
            metrics=metrics,
            reload=reload,
            draining=lambda: self.proxy.draining,
            degraded=lambda: [*self._tenancy.degraded, *self._guard.degraded],
            information=lambda: self._tenancy.information,
        )


async def _retire(tracing: Tracing) -> None:
    """Shut `tracing` down when the last request that began under it has ended its spans, or the gateway stops."""
    try:
        while tracing.open:  # noqa: ASYNC110 - spans end in callbacks; nobody waits for this
            await asyncio.sleep(_RETIRE_POLL)
    finally:
        await asyncio.to_thread(tracing.shutdown)
