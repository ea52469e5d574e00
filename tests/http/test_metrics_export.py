"""The configuration decides where counters go besides `/metrics`, and by which names; a reload may change both."""

import asyncio

import aiohttp
import msgspec
import pytest
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.config.schema import MetricsExport


@pytest.fixture
async def receiver(monkeypatch):
    """An OTLP collector: (its endpoint, the messages that come)."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    messages = asyncio.Queue()

    async def handle(request):
        messages.put_nowait(ExportMetricsServiceRequest.FromString(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/metrics", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/metrics", messages
    await runner.cleanup()


async def scraped(gateway):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{gateway.admin_port}/metrics") as response,
    ):
        return await response.text()


async def reloaded(gateway, section):
    telemetry = msgspec.structs.replace(gateway.config.telemetry, metrics=section)
    await gateway._reconfigure(msgspec.structs.replace(gateway.config, telemetry=telemetry))


async def test_hyperpods_names_come_and_go_with_the_configuration(start):
    bench = await start(workers=1, telemetry={"metrics": {"hyperpod": True, "labels": {"cluster_name": "prod"}}})
    assert 'cluster_name="prod"' in await scraped(bench.gateway)
    await reloaded(bench.gateway, MetricsExport())
    assert "model_concurrent_requests" not in await scraped(bench.gateway)


async def test_a_reload_begins_and_ends_the_export_and_no_count_is_lost(start, receiver):
    endpoint, messages = receiver
    bench = await start(workers=1)
    await reloaded(bench.gateway, MetricsExport(exporter="otlp", endpoint=endpoint, interval=3600.0))
    assert messages.empty()
    await reloaded(bench.gateway, MetricsExport())
    async with asyncio.timeout(10):
        message = await messages.get()
    names = {metric.name for metric in message.resource_metrics[0].scope_metrics[0].metrics}
    assert "warmroute_requests_accepted" in names
