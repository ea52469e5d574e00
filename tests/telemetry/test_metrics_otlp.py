"""The counters as a collector gets them."""

import asyncio

import pytest
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.config.schema import MetricsExport, Telemetry
from gateway.telemetry.metrics import Metrics, Outcome
from gateway.telemetry.otlp_metrics import MetricsExporter

CHAT = "/v1/chat/completions"


class Receiver:
    """An OTLP/HTTP collector for metrics."""

    def __init__(self):
        self.status = 200
        self.requests = asyncio.Queue()

    async def handle(self, request):
        message = ExportMetricsServiceRequest.FromString(await request.read())
        self.requests.put_nowait((message, dict(request.headers)))
        return web.Response(status=self.status)

    async def next(self):
        async with asyncio.timeout(10):
            return await self.requests.get()


def plain(pairs):
    return {pair.key: pair.value.string_value for pair in pairs}


def by_name(message):
    (resource,) = message.resource_metrics
    (scope,) = resource.scope_metrics
    names = [metric.name for metric in scope.metrics]
    assert len(set(names)) == len(names)
    return plain(resource.resource.attributes), {metric.name: metric for metric in scope.metrics}


@pytest.fixture
async def receiver(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/v1/metrics", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/metrics"
    yield receiver
    await runner.cleanup()


@pytest.fixture
def metrics():
    metrics = Metrics(["m"], [CHAT], ["w1"])
    metrics.request_started()
    metrics.request_started()
    metrics.request_ended("m", CHAT, 200, Outcome.COMPLETED, 2.0, 0.3, 100, None)
    metrics.attempt_ended("w1", None, 0.25)
    return metrics


def exporter(metrics, endpoint, **section):
    telemetry = Telemetry(
        service_name="gw", metrics=MetricsExport(exporter="otlp", endpoint=endpoint, headers={"x-key": "k"}, **section)
    )
    return MetricsExporter.from_config(telemetry, metrics.snapshot)


async def test_a_collector_gets_what_a_scrape_shows(receiver, metrics):
    one = exporter(metrics, receiver.endpoint)
    await one.export()
    message, headers = await receiver.next()
    resource, found = by_name(message)
    assert headers["x-key"] == "k"
    assert resource["service.name"] == "gw"
    accepted = found["warmroute_requests_accepted"].sum
    assert accepted.is_monotonic
    assert [point.as_int for point in accepted.data_points] == [2]
    assert [point.as_double for point in found["warmroute_requests_in_flight"].gauge.data_points] == [1.0]
    duration = found["gen_ai.server.request.duration"]
    assert duration.unit == "s"
    (point,) = duration.histogram.data_points
    assert plain(point.attributes) == {"gen_ai.request.model": "m", "gen_ai.operation.name": "chat"}
    assert (point.count, point.sum) == (1, 2.0)
    assert sum(point.bucket_counts) == 1
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert point.explicit_bounds[list(point.bucket_counts).index(1)] == 2.56
    assert not point.HasField("min")
    assert found["warmroute_worker_time_to_first_byte_seconds.sum"].sum.data_points[0].as_double == 0.25
    await one.stop()


async def test_the_last_counts_are_sent_when_it_stops(receiver, metrics):
    one = exporter(metrics, receiver.endpoint, interval=3600.0)
    one.start()
    metrics.request_started()
    await one.stop()
    _, found = by_name((await receiver.next())[0])
    assert found["warmroute_requests_accepted"].sum.data_points[0].as_int == 3
    assert one.dropped == 0


async def test_it_sends_again_and_again(receiver, metrics):
    one = exporter(metrics, receiver.endpoint)
    one._interval = 0.01
    one.start()
    first, _ = await receiver.next()
    second, _ = await receiver.next()
    times = [
        by_name(message)[1]["warmroute_requests_accepted"].sum.data_points[0].time_unix_nano
        for message in (first, second)
    ]
    assert times[0] < times[1]
    await one.stop()


async def test_a_collector_that_refuses_costs_a_count_and_nothing_else(receiver, metrics):
    receiver.status = 400
    one = exporter(metrics, receiver.endpoint)
    await one.export()
    assert one.dropped == 1
    receiver.status = 200
    await one.export()
    assert one.dropped == 1
    await one.stop()
