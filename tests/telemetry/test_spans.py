import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from unittest.mock import ANY

import grpc
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, set_span_in_context

from backends.registry import driver_named
from gateway.config.schema import Telemetry, Traces
from gateway.fleet.worker import Worker
from gateway.http.usage import Usage
from gateway.prompt.prompt import How
from gateway.telemetry.export import otlp_json
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.pace import Gaps
from gateway.telemetry.recording import ROWS, TABLE_BYTES, encoded, resource_of
from gateway.telemetry.spans import Trace, Tracing
from gateway.telemetry.w3c import parse_traceparent

PATH = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=a,other=b"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "vendor=a"}
OK, UNSET, ERROR = 1, 0, 2


class Kept:
    """A recorder of nothing."""


def plain(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture
async def tracing(otlp):
    tracing = Tracing.from_config(otlp())
    yield tracing
    await asyncio.to_thread(tracing.shutdown)


def test_tracing_that_is_off_imports_no_sdk():
    program = (
        "import sys\n"
        "from gateway.telemetry.spans import Tracing\n"
        "from gateway.telemetry.metrics import Metrics\n"
        "from gateway.telemetry.logs import configure\n"
        "from gateway.config.schema import Telemetry\n"
        "assert Tracing.from_config(Telemetry()) is None\n"
        "loaded = [name for name in sys.modules if name.startswith(('opentelemetry', 'google'))]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def named(collector):
    """What a request with one attempt or more leaves: the SERVER span, the CLIENT span, the attempts."""
    server, client, *attempts = sorted(
        collector.spans, key=lambda it: (it.span.start_time_unix_nano, it.span.name == "POST")
    )
    return server, client, attempts


async def test_a_request_leaves_a_server_span_a_client_span_and_one_for_each_attempt(
    otlp, collector, worker, finished, decided
):
    tracing = Tracing.from_config(otlp(headers={"x-key": "secret"}))
    trace = tracing.begin({})
    assert trace.sampled
    record = finished(
        trace,
        [{"error": "upstream_connect"}, {"status": 200, "first_byte": 0.04, "connect": 0.002}],
        stream=True,
        usage=Usage(100, 20, 64),
        gaps=Gaps(0.02, 0.03, 0.5, 19),
        bytes_out=1000,
        bytes_in=500,
        prompt_tokens=100,
        how=How.EXACT,
        prompt_seconds=0.003,
    )
    record.first_byte = record.start + 0.15
    record.tokenized = record.read + 0.003
    worker.routable = True
    record.decisions = [decided([worker])]
    tracing.ended(record)
    await asyncio.to_thread(tracing.shutdown)

    assert collector.headers["x-key"] == "secret"
    server, client, (failed, answered) = named(collector)
    assert [it.span.name for it in (server, client, failed, answered)] == [f"POST {PATH}", "chat m", "POST", "POST"]
    assert {it.span.trace_id.hex() for it in collector.spans} == {trace.trace_id}
    assert server.span.span_id.hex() == trace.span_id
    assert server.span.parent_span_id == b""
    assert client.span.parent_span_id == server.span.span_id
    assert failed.span.parent_span_id == answered.span.parent_span_id == client.span.span_id
    assert (server.span.kind, client.span.kind, failed.span.kind) == (2, 3, 3)
    assert server.resource["service.name"] == "gw"
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": PATH,
        "url.path": PATH,
        "url.scheme": "http",
        "http.request.body.size": 500,
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
        "warmroute.outcome": "completed",
        "warmroute.worker.id": "w1",
        "warmroute.request.id": "r-1",
        "warmroute.policy": "leastload",
        "warmroute.attempts": 2,
        "warmroute.first_byte": pytest.approx(0.15),
        "warmroute.response.bytes": 1000,
    }
    assert client.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.14),
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "server.address": "127.0.0.1",
        "server.port": 9001,
        "warmroute.worker.id": "w1",
    }
    common = {
        "http.request.method": "POST",
        "url.full": f"http://127.0.0.1:9001/base{PATH}",
        "server.address": "127.0.0.1",
        "server.port": 9001,
        "warmroute.worker.id": "w1",
    }
    assert failed.attributes == common | {"error.type": "upstream_connect", "warmroute.connect": 0.0}
    assert answered.attributes == common | {
        "http.request.resend_count": 1,
        "http.response.status_code": 200,
        "warmroute.connect": 0.002,
        "warmroute.first_byte": 0.04,
    }
    assert [it.span.status.code for it in (server, client, failed, answered)] == [UNSET, UNSET, ERROR, UNSET]
    assert abs(server.span.start_time_unix_nano / 1e9 - (time.time() - 10)) < 1
    assert server.span.end_time_unix_nano - server.span.start_time_unix_nano == pytest.approx(1e9, abs=1e3)
    assert {event.name: plain(event.attributes) for event in server.span.events} == {
        "warmroute.admission": {"warmroute.queue": 0.0},
        "warmroute.tokenize": {
            "warmroute.prompt.tokens": 100,
            "warmroute.prompt.how": "exact",
            "warmroute.prompt.seconds": 0.003,
        },
        "warmroute.route": {
            "warmroute.policy": "leastload",
            "warmroute.route.seconds": 0.001,
            "warmroute.route.reason": "w1 was the only one of 1 workers that the filters let through.",
            "warmroute.route.matched_tokens": 0,
            "warmroute.route.candidates": 1,
            "warmroute.route.table": ANY,
            "warmroute.worker.id": "w1",
        },
        "warmroute.first_byte_sent": {},
        "warmroute.end": {
            "warmroute.outcome": "completed",
            "warmroute.response.bytes": 1000,
            "warmroute.reads": 20,
            "warmroute.gaps.p50": 0.02,
            "warmroute.gaps.p95": 0.03,
            "warmroute.gaps.max": 0.5,
        },
    }
    assert tracing.dropped == 0
    assert tracing.open == 0


async def test_the_table_of_candidates_is_cut_to_what_an_event_may_hold(tracing, collector, finished, decided):
    workers = [Worker(url=f"http://10.0.0.{n}", driver=driver_named("vllm"), model="m") for n in range(200)]
    for number, worker in enumerate(workers):
        worker.routable = True
        for _ in range(number % 7):
            worker.acquire()
    tracing.ended(finished(tracing.begin({}), decisions=[decided(workers)]))
    await asyncio.to_thread(tracing.shutdown)
    server, _, _ = named(collector)
    (route,) = (plain(event.attributes) for event in server.span.events if event.name == "warmroute.route")
    table = orjson.loads(route["warmroute.route.table"])
    assert route["warmroute.route.candidates"] == 200
    assert 5 < len(table) <= ROWS
    assert len(route["warmroute.route.table"]) <= TABLE_BYTES
    assert [row["chosen"] for row in table] == [True] + [False] * (len(table) - 1)
    assert [row["cost"] for row in table] == sorted(row["cost"] for row in table)


@pytest.mark.parametrize(
    ("status", "outcome", "error_type", "server_error", "client_error"),
    [
        (200, Outcome.COMPLETED, None, UNSET, UNSET),
        (404, Outcome.COMPLETED, None, UNSET, ERROR),
        (503, Outcome.FAILED, None, ERROR, ERROR),
        (200, Outcome.FAILED, "upstream_reset", ERROR, ERROR),
        (0, Outcome.CLIENT_GONE, "client_disconnect", UNSET, ERROR),
    ],
)
async def test_a_4xx_is_an_error_of_the_client_spans_only(
    tracing, collector, finished, status, outcome, error_type, server_error, client_error
):
    attempt = {"status": status, "error": error_type}
    tracing.ended(finished(tracing.begin({}), [attempt], status=status, outcome=outcome, error_type=error_type))
    await asyncio.to_thread(tracing.shutdown)
    server, client, (attempt,) = named(collector)
    codes = [it.span.status.code for it in (server, client, attempt)]
    assert codes == [server_error, client_error, client_error]
    assert server.attributes.get("error.type") == (error_type or (str(status) if status >= 500 else None))
    for it in (client, attempt):
        assert it.attributes.get("error.type") == (error_type or (str(status) if status >= 400 else None))


def sent(trace, attempt=0):
    """The header fields that a worker gets."""
    lines = trace.lines(attempt).decode().splitlines()
    return dict(line.split(": ") for line in lines)


async def test_a_sampled_caller_is_continued_and_the_worker_continues_the_attempt(tracing, collector, finished):
    trace = tracing.begin(SAMPLED)
    tracing.ended(finished(trace))
    await asyncio.to_thread(tracing.shutdown)
    server, _, (attempt,) = named(collector)
    assert trace.trace_id == server.span.trace_id.hex() == TRACE
    assert server.span.parent_span_id.hex() == SPAN
    assert server.span.trace_state == "vendor=a,other=b"
    assert sent(trace) == {
        "traceparent": f"00-{TRACE}-{attempt.span.span_id.hex()}-01",
        "tracestate": "vendor=a,other=b",
    }


async def test_a_caller_that_is_not_sampled_is_continued_without_recording(tracing):
    trace = tracing.begin(UNSAMPLED)
    assert not trace.sampled
    assert tracing.open == 0
    parent = parse_traceparent(sent(trace)["traceparent"])
    assert f"{parent.trace_id:032x}" == trace.trace_id == TRACE
    assert f"{parent.span_id:016x}" not in {SPAN, trace.span_id}
    assert not parent.sampled
    assert sent(trace)["tracestate"] == "vendor=a"


async def test_inbound_link_begins_a_new_trace_that_points_at_the_caller(otlp, collector, finished):
    tracing = Tracing.from_config(otlp(inbound="link"))
    trace = tracing.begin(UNSAMPLED)
    tracing.ended(finished(trace, []))
    await asyncio.to_thread(tracing.shutdown)
    (server,) = collector.spans
    assert server.span.trace_id.hex() == trace.trace_id != TRACE
    assert server.span.parent_span_id == b""
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in server.span.links] == [(TRACE, SPAN)]


async def test_inbound_ignore_begins_a_new_trace_that_knows_nothing_of_the_caller(otlp, collector, finished):
    tracing = Tracing.from_config(otlp(inbound="ignore"))
    trace = tracing.begin(SAMPLED)
    tracing.ended(finished(trace, []))
    await asyncio.to_thread(tracing.shutdown)
    (server,) = collector.spans
    assert server.span.trace_id.hex() == trace.trace_id != TRACE
    assert not server.span.links
    assert "tracestate" not in sent(trace)


@pytest.mark.parametrize("headers", [{"traceparent": "garbage"}, {"traceparent": ""}, {"tracestate": "a=b"}])
async def test_a_malformed_context_begins_a_new_trace_without_its_state(tracing, headers):
    trace = tracing.begin({**SAMPLED, "traceparent": "", **headers})
    assert trace.trace_id != TRACE
    assert list(sent(trace)) == ["traceparent"]


async def test_no_provider_is_set_globally(tracing, finished):
    tracing.ended(finished(tracing.begin({})))
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"


async def test_an_unheard_of_method_does_not_become_a_span_name(tracing, collector, finished):
    tracing.ended(finished(tracing.begin({}), [], method="EVIL1", path="_other", status=405))
    await asyncio.to_thread(tracing.shutdown)
    (server,) = collector.spans
    assert server.span.name == "HTTP _other"
    assert server.attributes["http.request.method"] == "_OTHER"


def test_the_spans_of_a_request_have_ids_of_their_own():
    trace = Trace(1, 2**64 - 1, 0)
    ids = {trace.span, *(trace.below(place) for place in range(1, 20))}
    assert len(ids) == 20
    assert all(0 < each < 2**64 for each in ids)


async def test_a_request_that_nobody_traced_can_be_seen_as_spans_all_the_same(finished):
    document = otlp_json(encoded([finished(None)], resource_of("gw")))
    (server, client, attempt) = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert client["parentSpanId"] == server["spanId"]
    assert attempt["parentSpanId"] == client["spanId"]
    assert len(server["traceId"]) == 32


@given(seed=st.integers(0, 2**32), sample=st.floats(0, 1))
def test_the_share_of_traces_is_decided_as_the_sdk_decides_it(seed, sample):
    tracing = Tracing(Traces(exporter="console", sample=sample), Kept(), Random(seed))
    trace_id = Random(seed).getrandbits(128)
    ours = tracing.begin({})
    context = set_span_in_context(NonRecordingSpan(trace.INVALID_SPAN_CONTEXT), Context())
    expected = TraceIdRatioBased(sample).should_sample(context, trace_id, "x").decision.is_sampled()
    assert (ours.number, ours.sampled) == (trace_id, expected)


@pytest.mark.parametrize("sample", [0.0, 0.1, 1.0])
def test_about_the_configured_share_is_recorded(sample):
    tracing = Tracing(Traces(exporter="console", sample=sample), Kept(), Random(7))
    assert sum(tracing.begin({}).sampled for _ in range(10_000)) == pytest.approx(sample * 10_000, abs=120)


def test_every_request_has_ids_of_its_own_though_nothing_is_recorded():
    tracing = Tracing(Traces(exporter="console", sample=0.0), Kept())
    traces = [tracing.begin({}) for _ in range(100)]
    assert len({trace.trace_id for trace in traces}) == 100
    parents = [parse_traceparent(sent(trace)["traceparent"]) for trace in traces]
    assert [f"{parent.trace_id:032x}" for parent in parents] == [trace.trace_id for trace in traces]
    assert not any(parent.sampled for parent in parents)


async def test_the_file_exporter_writes_otlp_json_lines(tmp_path, finished):
    path = tmp_path / "spans.jsonl"
    telemetry = Telemetry(traces=Traces(exporter="file", file=str(path), inbound="link", sample=1.0))
    tracing = Tracing.from_config(telemetry)
    trace = tracing.begin(SAMPLED)
    tracing.ended(finished(trace))
    await asyncio.to_thread(tracing.shutdown)
    (line,) = path.read_bytes().splitlines()
    server, client, attempt = orjson.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert client["traceId"] == server["traceId"] == trace.trace_id
    assert client["parentSpanId"] == server["spanId"]
    assert attempt["parentSpanId"] == client["spanId"]
    assert "parentSpanId" not in server
    assert (client["kind"], server["kind"]) == (3, 2)
    assert (server["links"][0]["traceId"], server["links"][0]["spanId"]) == (TRACE, SPAN)
    assert {"key": "http.route", "value": {"stringValue": PATH}} in server["attributes"]


async def test_the_console_exporter_writes_the_same_lines_to_standard_error(capfd, finished):
    tracing = Tracing.from_config(Telemetry(traces=Traces(exporter="console", sample=1.0)))
    trace = tracing.begin({})
    tracing.ended(finished(trace, []))
    await asyncio.to_thread(tracing.shutdown)
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert orjson.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] == trace.trace_id


class GrpcCollector(TraceServiceServicer):
    """An OTLP/gRPC collector."""

    def __init__(self):
        self.spans = []
        self.metadata = {}

    def Export(self, request, context):  # noqa: N802 - the protocol's name
        self.metadata = dict(context.invocation_metadata())
        self.spans += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        return ExportTraceServiceResponse()


async def test_spans_reach_a_collector_over_grpc(finished):
    collector = GrpcCollector()
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        traces = Traces(
            exporter="otlp-grpc", endpoint=f"http://127.0.0.1:{port}", headers={"X-Key": "secret"}, sample=1.0
        )
        tracing = Tracing.from_config(Telemetry(traces=traces))
        trace = tracing.begin({})
        tracing.ended(finished(trace))
        await asyncio.to_thread(tracing.shutdown, 10)
    finally:
        server.stop(None).wait()
    assert [span.name for span in collector.spans] == [f"POST {PATH}", "chat m", "POST"]
    assert {span.trace_id.hex() for span in collector.spans} == {trace.trace_id}
    assert collector.metadata["x-key"] == "secret"
    assert tracing.dropped == 0


def test_the_file_exporter_without_a_path_is_refused():
    with pytest.raises(ValueError, match=r"telemetry\.traces\.file"):
        Tracing.from_config(Telemetry(traces=Traces(exporter="file")))
