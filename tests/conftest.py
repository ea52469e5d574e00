"""Every asynchronous test runs on uvloop, as the gateway does, and ends in time; and the law that every fault must leave standing."""

import asyncio
import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from gateway.app import Gateway

_SECONDS = 50
_RECORDS = 400
"""Of so few requests every record is still in the ring, whatever its size."""
_OURS = str(Path(__file__).parents[1] / "gateway")
_SERVERS = "aiohttp/web_protocol.py"
"""Where the tasks of client connections are at home."""

# Other work on the machine makes an example slow; that is no property of the code. Benchmarks hold the figures.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items):
    """pytest-timeout's signal is lost in uvloop, which logs what a signal handler raises: a test that waits for ever would never fail."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj)


def _limited(test):
    @functools.wraps(test)
    async def limited(*args, **keywords):
        async with asyncio.timeout(_SECONDS):
            await test(*args, **keywords)

    return limited


class Conservation:
    """What must hold of a gateway whenever nothing is under way, whatever happened before.

    Accepted = completed + client gone + failed, and nothing of a request is left: no lease, no pending prefill, no connection in
    use, no exchange that is watched, no open span, no record of something running, no task.
    """

    def __init__(self) -> None:
        self._before = asyncio.all_tasks()

    def broken(self, gateway: "Gateway") -> list[str]:
        """What does not hold, one sentence each. To be called when all requests have ended, before or after `Gateway.stop`."""
        metrics, proxy, said = gateway.metrics, gateway.proxy, []

        def expect(sentence: str, value: object, wanted: object = 0) -> None:
            if value != wanted:
                said.append(f"{sentence}: {value}, not {wanted}")

        outcomes = sum(series.count for series in metrics.requests.values())
        expect("accepted requests", metrics.accepted, outcomes)
        expect("requests in flight", metrics.in_flight)
        expect("attempts that run beside others", len(proxy.hedging))
        for worker in proxy.fleets.workers():
            for count in ("in_flight", "in_flight_tokens", "pending", "pending_tokens", "pending_padded"):
                expect(f"{worker.id}: {count}", getattr(worker, count))
            expect(f"{worker.id}: backlog", worker.backlog, 0.0)
            expect(f"{worker.id}: leases in its queue", len(worker._queue))
            expect(f"{worker.id}: an attempt that tries it", worker.probe if worker.probe is not True else None, None)
        for name, tenant in proxy.tenants.by_name.items() if proxy.tenants is not None else ():
            expect(f"tenant {name}: requests in flight", tenant.account.in_flight)
        expect("exchanges that are watched", len(gateway._sweeper.exchanges))
        for worker_id, (opened, idle) in gateway._pool.counts().items():
            expect(f"{worker_id}: connections in use", opened - idle)
        expect("open spans", gateway._tracing.open if gateway._tracing is not None else 0)
        expect("records of what runs", len(gateway.decisions.running()))
        records = gateway.config.telemetry.decisions
        if metrics.accepted <= min(_RECORDS, records.count):
            expect("records", len(gateway.decisions.recent(_RECORDS)), metrics.accepted)
        feeds = gateway._matching.feeds
        for prefixes in feeds.index.maps.values() if feeds is not None else ():
            expect("the prefix map is within its budget", prefixes.bytes <= prefixes.budget, wanted=True)
        return said

    def left_over(self, gateway: "Gateway") -> list[str]:
        """What is left of a gateway that has stopped."""
        said = [f"task {name}" for name in self.tasks()]
        if gateway._server.connections_open:
            said.append(f"{len(gateway._server.connections_open)} connections of clients")
        if gateway._pool.counts():
            said.append(f"connections to workers: {gateway._pool.counts()}")
        return said

    def tasks(self) -> list[str]:
        """Names of the gateway's tasks that were not there when this object was made."""
        return [task.get_name() for task in asyncio.all_tasks() - self._before if _is_ours(task)]


def _is_ours(task: "asyncio.Task[object]") -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and (code.co_filename.startswith(_OURS) or code.co_filename.endswith(_SERVERS))


@pytest.fixture
async def conservation() -> Conservation:
    """The law, for this test."""
    return Conservation()
