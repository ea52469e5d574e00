"""What is left of a request behind it: spans at a collector, trace context at the worker, log lines, counters that add up."""

import asyncio
import random

import orjson
import pytest
import structlog
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP/HTTP collector in this process."""

    def __init__(self):
        self.spans = []
        self.endpoint = ""

    async def handle(self, request):
        message = ExportTraceServiceRequest.FromString(await request.read())
        self.spans += [
            span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        return web.Response()

    def server(self):
        """The one SERVER span (kind 2)."""
        (span,) = (span for span in self.spans if span.kind == 2)
        return span

    def client(self):
        """The one CLIENT span (kind 3) over all attempts."""
        (span,) = (span for span in self.spans if span.kind == 3 and span.name != "POST")
        return span

    def attempts(self):
        """The spans of attempts, oldest first."""
        found = [span for span in self.spans if span.kind == 3 and span.name == "POST"]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
async def collector(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield collector
    await runner.cleanup()


def traces_to(collector, **more):
    return {"traces": {"exporter": "otlp", "endpoint": collector.endpoint, "sample": 1.0, **more}}


def attributes(span):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


async def test_a_retried_request_is_one_server_span_and_one_client_span_over_its_attempts(start, http, collector):
    bench = await start(workers=2, telemetry=traces_to(collector))
    client = await bench.client()
    await client.sends(http.post(fields=f"traceparent: {PARENT}\r\ntracestate: a=1\r\n"))
    seen = []
    for answer in (http.answer(b"busy", status="503 Busy"), http.answer(b"[]")):
        _, worker, request = await bench.arrives()
        seen.append(request.get("traceparent"))
        assert request.all("traceparent") == [seen[-1]]
        assert request.get("tracestate") == "a=1"
        await worker.sends(answer)
    assert (await client.receives()).status == 200
    await bench.settles()
    await bench.gateway.stop(1)
    server, client = collector.server(), collector.client()
    first, second = collector.attempts()
    assert client.name == "chat m"
    assert client.parent_span_id == server.span_id
    assert client.start_time_unix_nano <= first.start_time_unix_nano
    assert client.end_time_unix_nano == second.end_time_unix_nano
    assert server.trace_id.hex() == PARENT.split("-")[1]
    assert server.parent_span_id.hex() == PARENT.split("-")[2]
    for span, sent in zip((first, second), seen, strict=True):
        assert span.trace_id == server.trace_id
        assert span.parent_span_id == client.span_id
        # The worker continues the attempt that reached it, not the request.
        assert sent.split("-")[2] == span.span_id.hex()
    assert attributes(first)["error.type"] == "503"
    assert attributes(second)["http.request.resend_count"] == 1
    assert "error.type" not in attributes(second)
    assert attributes(server)["warmroute.attempts"] == 2
    assert attributes(server)["http.response.status_code"] == 200
    # The time to the first byte is each span's own.
    assert attributes(second)["warmroute.first_byte"] <= attributes(server)["warmroute.first_byte"]


@pytest.mark.parametrize("how", ["refused by the gateway", "left by the client", "broken by the worker"])
async def test_every_span_that_began_is_ended_however_the_request_ends(start, http, collector, how):
    bench = await start(telemetry=traces_to(collector))
    client = await bench.client()
    if how == "refused by the gateway":
        await client.sends(http.post({"model": "none"}))
        assert (await client.receives()).status == 404
    else:
        await client.sends(http.post({"model": "m", "stream": True}))
        worker, _ = await bench.worker.receives()
        await worker.sends(http.SSE_HEAD)
        await client.head()
        await (client.closes() if how == "left by the client" else worker.resets())
    await bench.settles()
    assert bench.gateway._tracing.open == 0
    await bench.gateway.stop(1)
    server = collector.server()
    assert len(collector.attempts()) == (0 if how == "refused by the gateway" else 1)
    expected = {
        "refused by the gateway": "model_not_found",
        "left by the client": "client_disconnect",
        "broken by the worker": "upstream_reset_midstream",
    }
    assert attributes(server)["error.type"] == expected[how]


@pytest.mark.parametrize(
    ("fields", "reaches"),
    [
        (f"traceparent: {PARENT}\r\ntracestate: a=1,b=2\r\n", [PARENT]),
        ("traceparent: 00-zz-b7ad6b7169203331-01\r\ntracestate: a=1\r\n", []),
        (f"traceparent: 00-{'0' * 32}-b7ad6b7169203331-01\r\n", []),
        (f"traceparent: {PARENT}\r\ntraceparent: {PARENT}\r\n", []),
        ("tracestate: a=1\r\n", []),
        ("", []),
    ],
)
async def test_without_spans_a_good_context_passes_and_a_bad_one_is_dropped(start, http, fields, reaches):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post(fields=fields))
    worker, request = await bench.worker.receives()
    assert request.all("traceparent") == reaches
    assert request.all("tracestate") == (["a=1,b=2"] if reaches else [])
    await worker.sends(http.answer())
    await client.receives()


async def test_a_request_that_outlives_its_exporters_configuration_still_reaches_the_collector(start, http, collector):
    from gateway.config.load import loads

    bench = await start(telemetry=traces_to(collector))
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD)
    await client.head()
    old = bench.gateway._tracing
    config = orjson.dumps(
        {"models": [{"name": "m", "workers": [{"url": bench.worker.url, "driver": "vllm"}]}]}
    ).decode()
    await bench.gateway._reconfigure(loads(config))
    assert bench.gateway._tracing is None
    await asyncio.sleep(0.3)
    assert old.open == 1
    await worker.sends(http.chunk(b"data: 1\n\n") + b"0\r\n\r\n")
    assert await client.chunked_body() == b"data: 1\n\n"
    await http.until(lambda: len(collector.spans) == 3)
    assert old.open == 0


async def test_requests_leave_the_lines_that_were_asked_for(start, http):
    bench = await start(telemetry={"logs": {"requests": 1.0}})
    client = await bench.client()
    with structlog.testing.capture_logs() as lines:
        await client.sends(http.post(fields="x-request-id: good\r\n"))
        worker, _ = await bench.worker.receives()
        await worker.sends(http.answer())
        await client.receives()
        await client.sends(http.post(fields="x-request-id: bad\r\n"))
        await worker.receives()
        await worker.sends(b"HTTP/1.1 2")
        await asyncio.sleep(0.01)
        await worker.closes()
        await client.receives()
        await bench.settles()
    good, bad = (line for line in lines if line["event"] == "request")
    assert (
        good
        | {
            "request_id": "good",
            "outcome": "completed",
            "status": 200,
            "attempts": 1,
            "log_level": "info",
            "model": "m",
            "path": http.CHAT,
        }
        == good
    )
    assert bad | {"request_id": "bad", "outcome": "failed", "status": 502, "error_type": "upstream_reset"} == bad
    assert bad["log_level"] == "error"


async def scraped(bench):
    """Samples of `/metrics` by name and labels."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.admin_port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    writer.close()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


async def test_the_counters_add_up_after_a_mixed_run(start, http):
    bench = await start(workers=2, timeouts={"first_byte": 0.3})
    rng = random.Random(3)
    answers = [
        http.answer(),
        http.answer(b"no", status="400 Bad"),
        http.answer(b"no", status="503 Busy"),
        http.SSE_HEAD + http.chunk(b"data: 1\n\n") + b"0\r\n\r\n",
        http.SSE_HEAD + http.chunk(b"data: 1\n\n") + b"zz",
        b"junk\r\n\r\n",
        None,
    ]

    async def serve():
        while True:
            _, peer, _ = await bench.arrives()
            answer = rng.choice(answers)
            if answer is None:
                await peer.closes()
            else:
                await peer.sends(answer)

    async def request(number):
        client = await bench.client()
        await client.sends(http.post({"model": "m" if number % 7 else "none"}))
        if number % 5 == 0:
            await client.closes()
        else:
            await client.head()

    from gateway.tasks import TaskGroup

    tasks = TaskGroup("test")
    tasks.spawn("serve", serve())
    runs = [tasks.spawn("request", request(number)) for number in range(60)]
    await asyncio.wait(runs, timeout=2)
    await bench.settles()
    await tasks.cancel()
    samples = await scraped(bench)
    ended = {key: value for key, value in samples.items() if key.startswith("warmroute_requests_total{")}
    assert samples["warmroute_requests_accepted_total"] == sum(ended.values()) == 60
    assert samples["warmroute_requests_in_flight"] == 0
    assert sum(value for key, value in samples.items() if key.startswith("warmroute_worker_requests_in_flight{")) == 0
    for outcome in ("completed", "client_gone", "failed"):
        assert any(f'outcome="{outcome}"' in key for key in ended), outcome
    attempts = sum(value for key, value in samples.items() if key.startswith("warmroute_attempts_total{"))
    assert attempts == sum(bench.attempts.values())
    for key, value in samples.items():
        if key.startswith("warmroute_upstream_connections{") and 'state="active"' in key:
            assert value == 0


async def test_a_request_whose_first_worker_is_killed_shows_both_attempts_and_one_error(start, http, collector):
    bench = await start(workers=2, telemetry=traces_to(collector), retries={"attempts": 2})
    busy = await bench.client()
    await busy.sends(http.post())
    second, occupied, _ = await bench.arrives()
    (first,) = (each for each in bench.workers if each is not second)
    await first.stop()
    # The other one has something to do, so this goes to the one that was killed.
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}, fields="x-request-id: killed\r\n"))
    _, worker, _ = await bench.arrives()
    await worker.sends(http.SSE_HEAD + b"".join(http.chunk(b"data: %d\n\n" % n) for n in range(3)) + b"0\r\n\r\n")
    assert (await client.receives()).status == 200
    await occupied.sends(http.answer())
    await busy.receives()
    await bench.settles()

    document = bench.gateway.decisions.get("killed").document()
    urls = {f"127.0.0.1:{each.port}": each for each in bench.workers}
    assert [urls[attempt["worker"]] for attempt in document["attempts"]] == [first, second]
    broken, good = document["attempts"]
    assert (broken["error"], broken["status"]) == ("upstream_connect", None)
    assert (good["error"], good["status"]) == (None, 200)
    assert (document["status"], document["outcome"], document["error"]) == (200, "completed", None)
    assert urls[document["chosen"]] is second
    assert len(document["candidates"]) == 1
    assert len(document["earlier"]) == 1

    await bench.gateway.stop(1)
    collector.spans = [span for span in collector.spans if span.trace_id.hex() == document["trace_id"]]
    assert len(collector.spans) == 4
    server, client_span = collector.server(), collector.client()
    assert server.span_id.hex() == document["span_id"]
    assert [attributes(span).get("error.type") for span in collector.attempts()] == ["upstream_connect", None]
    assert [span.name for span in collector.spans if span.status.code == 2] == ["POST"]
    assert attributes(server)["http.response.status_code"] == 200
    assert attributes(client_span)["server.port"] == second.port
    names = [event.name for event in server.events]
    assert names.count("warmroute.route") == 2
    assert names[-2:] == ["warmroute.first_byte_sent", "warmroute.end"]


async def test_a_request_is_seen_while_it_runs_and_kept_when_it_has_ended(start, http):
    bench = await start()
    decisions = bench.gateway.decisions
    client = await bench.client()
    await client.sends(
        http.post({"model": "m", "stream": True}, fields=f"x-request-id: one\r\ntraceparent: {PARENT}\r\n")
    )
    worker, _ = await bench.worker.receives()
    (running,) = decisions.running()
    assert (running.id, running.outcome, running.status) == ("one", "running", 0)
    assert orjson.loads(orjson.dumps(running.document()))["timings"]["first_byte"] is None
    assert decisions.recent(10) == []
    await worker.sends(http.SSE_HEAD)
    for number in range(4):
        await worker.sends(http.chunk(b"data: %d\n\n" % number))
        await asyncio.sleep(0.02)
    await worker.sends(b"0\r\n\r\n")
    await client.receives()
    await bench.settles()
    assert decisions.running() == []
    (record,) = decisions.recent(10)
    document = record.document()
    assert decisions.get("one") is record
    assert document["trace_id"] == PARENT.split("-")[1]
    assert document["sampled"] is False
    timings = document["timings"]
    assert 0 < timings["read"] < timings["first_byte"] < timings["total"]
    assert timings["first_byte"] + 0.05 < timings["total"]
    assert timings["decide"] > 0
    assert document["gaps"]["count"] == 3
    assert 0.01 < document["gaps"]["p50"] <= document["gaps"]["max"]
    assert document["bytes_in"] > 0
    assert document["bytes_out"] > 0


async def test_a_request_that_the_gateway_refused_is_kept_with_its_reason(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post({"model": "none"}))
    assert (await client.receives()).status == 404
    (record,) = bench.gateway.decisions.recent(10, error=True)
    assert record.summary()["error"] == "model_not_found"
    assert record.document()["error"]["message"]


async def test_bodies_are_kept_only_where_capture_is_on(start, http):
    for capture, expected in ({}, None), ({"enabled": True}, {"model": "m", "user": "<redacted>"}):
        bench = await start(telemetry={"capture": capture})
        client = await bench.client()
        await client.sends(http.post({"model": "m", "user": "alice"}))
        worker, _ = await bench.worker.receives()
        await worker.sends(http.answer())
        await client.receives()
        await bench.settles()
        (record,) = bench.gateway.decisions.recent(10)
        assert record.document().get("capture") == (expected and {"request": expected})
        await bench.gateway.stop(1)


async def test_the_request_log_gets_a_line_with_what_the_answer_cost(start, http, tmp_path):
    path = tmp_path / "requests.jsonl"
    bench = await start(telemetry={"request_log": {"file": str(path)}})
    client = await bench.client()
    await client.sends(http.post({"model": "m", "messages": [{"role": "user", "content": "secret"}], "user": "alice"}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b'{"usage":{"prompt_tokens":10,"completion_tokens":3}}'))
    await client.receives()
    await bench.settles()
    await bench.gateway.stop(1)
    (line,) = path.read_bytes().splitlines()
    document = orjson.loads(line)
    assert document["actual"]["prompt_tokens"] == 10
    assert document["actual"]["output_tokens"] == 3
    assert document["session"]
    assert b"secret" not in line
    assert b"alice" not in line


async def test_with_everything_off_nothing_is_kept(start, http):
    bench = await start(telemetry={"decisions": {"count": 0}})
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    assert bench.gateway.decisions.running() == []
    await worker.sends(http.answer())
    await client.receives()
    await bench.settles()
    assert bench.gateway.decisions.recent(10) == []
