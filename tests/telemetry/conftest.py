import asyncio
import time
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from backends.vllm import VLLMDriver
from gateway.config.schema import Telemetry, Traces
from gateway.fleet.worker import Worker
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.record import Attempt, Decided, RequestRecord, loads_of
from policies.base import NO_MATCH, Candidate, RouteRequest
from policies.registry import Registry


@pytest.fixture
def worker():
    return Worker(url="http://127.0.0.1:9001/base", driver=VLLMDriver(), model="m", worker_id="w1")


@pytest.fixture
def finished(worker):
    """Makes the record of a request that began `ago` seconds before now, each of whose attempts took a tenth of a second."""

    def make(trace=None, attempts=({},), *, ago=10.0, **more):
        start = time.monotonic() - ago
        tried = [
            Attempt(one.pop("worker", worker), start + 0.01 + 0.1 * number, seconds=0.1, **one)
            for number, one in enumerate(dict(each) for each in attempts)
        ]
        values = {
            "request_id": b"r-1",
            "trace": trace,
            "method": "POST",
            "path": "/v1/chat/completions",
            "model": "m",
            "policy": "leastload",
            "stream": False,
            "start": start,
            "read": start + 0.001,
            "tokenized": 0.0,
            "queued": 0.0,
            "first_byte": 0.0,
            "end": start + 1.0,
            "prompt_tokens": 0,
            "how": None,
            "why": "",
            "prompt_seconds": 0.0,
            "off_loop": False,
            "decisions": [],
            "attempts": tried,
            "gaps": None,
            "usage": None,
            "bytes_in": 0,
            "bytes_out": 0,
            "status": 200,
            "outcome": Outcome.COMPLETED,
            "error_type": None,
            "error_message": None,
        }
        return RequestRecord(**values | more)

    return make


@pytest.fixture
def decided():
    """Decides with a policy among workers, and notes it as the proxy does."""

    def make(workers, policy="leastload", prompt_tokens=0, matches=(), sections=None):
        made = Registry.default().build(policy, sections or {})
        held = dict(matches)
        candidates = [Candidate(each, held.get(each.id, NO_MATCH)) for each in workers]
        request = RouteRequest(model="m", path="/v1/chat/completions", prompt_tokens=prompt_tokens)
        request.now = now = time.monotonic()
        decision = made.decide(request, candidates)
        return Decided(made, request, candidates, loads_of(candidates), decision, now, 0.001)

    return make


@dataclass
class Received:
    """A span as the collector got it, with attributes as a plain dict."""

    span: object
    resource: dict
    attributes: dict


@dataclass
class Collector:
    """An OTLP/HTTP collector: answers `status`, or nothing while `hanging`."""

    endpoint: str = ""
    status: int = 200
    hanging: bool = False
    requests: int = 0
    spans: list = field(default_factory=list)
    headers: dict = field(default_factory=dict)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request):
        body = await request.read()
        async with self.arrived:
            self.requests += 1
            self.headers = dict(request.headers)
            if self.status == 200 and not self.hanging:
                self.spans += _decoded(body)
            self.arrived.notify_all()
        if self.hanging:
            await self.released.wait()
        return web.Response(status=self.status)

    async def until(self, condition):
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(condition)


def _plain(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _decoded(body):
    message = ExportTraceServiceRequest.FromString(body)
    return [
        Received(span, _plain(resource.resource.attributes), _plain(span.attributes))
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@pytest.fixture
async def collector(monkeypatch):
    # The exporter's HTTP client looks at the environment's proxies.
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield collector
    collector.released.set()
    await runner.cleanup()


@pytest.fixture
def otlp(collector):
    def configured(**traces):
        return Telemetry(
            service_name="gw",
            traces=Traces(**{"exporter": "otlp", "endpoint": collector.endpoint, "sample": 1.0, **traces}),
        )

    return configured
