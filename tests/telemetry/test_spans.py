import asyncio
import subprocess
import sys
from random import Random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, set_span_in_context

from gateway.config.schema import Telemetry, Traces
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.spans import ServerSpan, Tracing
from gateway.telemetry.w3c import parse_traceparent

PATH = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=a,other=b"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "vendor=a"}
OK, UNSET, ERROR = 1, 0, 2


class Kept:
    """A recorder that only notes what it was asked for."""

    def __init__(self):
        self.asked = []

    def server_span(self, method, route, **how):
        self.asked.append(how)


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


async def test_one_server_span_and_one_client_span_per_attempt_reach_the_collector(otlp, collector, worker):
    tracing = Tracing.from_config(otlp(headers={"x-key": "secret"}))
    span = tracing.server_span("POST", PATH, {})
    assert span.recording
    first = span.attempt(worker, "m", 0)
    first.end(None, "upstream_connect", None)
    second = span.attempt(worker, "m", 1)
    second.end(200, None, 0.25)
    span.set("warmroute.policy", "leastload")
    span.event("warmroute.route", {"warmroute.worker.id": "w1"})
    span.end(
        200,
        Outcome.COMPLETED,
        None,
        model="m",
        worker_id="w1",
        request_id="r-1",
        attempts=2,
        first_byte=0.5,
        bytes_out=1000,
    )
    span.end(500, Outcome.FAILED, "late")
    await asyncio.to_thread(tracing.shutdown)

    assert collector.headers["x-key"] == "secret"
    assert [received.span.name for received in collector.spans] == ["POST", "POST", f"POST {PATH}"]
    failed, answered, server = collector.spans
    assert {received.span.trace_id.hex() for received in collector.spans} == {span.trace_id}
    assert failed.span.parent_span_id == answered.span.parent_span_id == server.span.span_id
    assert server.span.parent_span_id == b""
    assert (server.span.kind, failed.span.kind) == (2, 3)
    assert server.resource["service.name"] == "gw"
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": PATH,
        "url.path": PATH,
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
        "warmroute.outcome": "completed",
        "warmroute.worker.id": "w1",
        "warmroute.request.id": "r-1",
        "warmroute.policy": "leastload",
        "warmroute.attempts": 2,
        "warmroute.first_byte": 0.5,
        "warmroute.response.bytes": 1000,
    }
    assert [event.name for event in server.span.events] == ["warmroute.route"]
    assert server.span.status.code == UNSET
    common = {
        "http.request.method": "POST",
        "url.full": f"http://127.0.0.1:9001/base{PATH}",
        "server.address": "127.0.0.1",
        "server.port": 9001,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "warmroute.worker.id": "w1",
    }
    assert failed.attributes == common | {"error.type": "upstream_connect"}
    assert failed.span.status.code == ERROR
    assert answered.attributes == common | {
        "http.request.resend_count": 1,
        "http.response.status_code": 200,
        "warmroute.first_byte": 0.25,
    }
    assert answered.span.status.code == UNSET
    assert tracing.dropped == 0


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
async def test_a_4xx_is_an_error_of_the_client_span_only(
    tracing, collector, worker, status, outcome, error_type, server_error, client_error
):
    span = tracing.server_span("POST", PATH, {})
    span.attempt(worker, "m", 0).end(status or None, error_type, None)
    span.end(status, outcome, error_type)
    await asyncio.to_thread(tracing.shutdown)
    client, server = collector.spans
    assert (server.span.status.code, client.span.status.code) == (server_error, client_error)
    assert server.attributes.get("error.type") == (error_type or (str(status) if status >= 500 else None))
    assert client.attributes.get("error.type") == (error_type or (str(status) if status >= 400 else None))


async def test_a_sampled_caller_is_continued_and_the_worker_continues_the_attempt(tracing, collector, worker):
    span = tracing.server_span("POST", PATH, SAMPLED)
    attempt = span.attempt(worker, "m", 0)
    injected = dict(attempt.inject())
    attempt.end(200, None, None)
    span.end(200, Outcome.COMPLETED, None)
    await asyncio.to_thread(tracing.shutdown)
    client, server = collector.spans
    assert span.trace_id == server.span.trace_id.hex() == TRACE
    assert server.span.parent_span_id.hex() == SPAN
    assert server.span.trace_state == "vendor=a,other=b"
    assert injected == {
        "traceparent": f"00-{TRACE}-{client.span.span_id.hex()}-01",
        "tracestate": "vendor=a,other=b",
    }


async def test_a_caller_that_is_not_sampled_is_continued_without_recording(tracing, collector, worker):
    span = tracing.server_span("POST", PATH, UNSAMPLED)
    assert not span.recording
    injected = dict(span.attempt(worker, "m", 0).inject())
    span.end(200, Outcome.COMPLETED, None)
    await asyncio.to_thread(tracing.shutdown)
    assert collector.spans == []
    parent = parse_traceparent(injected["traceparent"])
    assert f"{parent.trace_id:032x}" == span.trace_id == TRACE
    assert f"{parent.span_id:016x}" != SPAN
    assert not parent.sampled
    assert injected["tracestate"] == "vendor=a"


async def test_inbound_link_begins_a_new_trace_that_points_at_the_caller(otlp, collector):
    tracing = Tracing.from_config(otlp(inbound="link"))
    span = tracing.server_span("POST", PATH, UNSAMPLED)
    span.end(200, Outcome.COMPLETED, None)
    await asyncio.to_thread(tracing.shutdown)
    (server,) = collector.spans
    assert server.span.trace_id.hex() == span.trace_id != TRACE
    assert server.span.parent_span_id == b""
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in server.span.links] == [(TRACE, SPAN)]


async def test_inbound_ignore_begins_a_new_trace_that_knows_nothing_of_the_caller(otlp, collector, worker):
    tracing = Tracing.from_config(otlp(inbound="ignore"))
    span = tracing.server_span("POST", PATH, SAMPLED)
    injected = dict(span.attempt(worker, "m", 0).inject())
    span.end(200, Outcome.COMPLETED, None)
    await asyncio.to_thread(tracing.shutdown)
    (server,) = collector.spans
    assert server.span.trace_id.hex() == span.trace_id != TRACE
    assert not server.span.links
    assert "tracestate" not in injected


@pytest.mark.parametrize("headers", [{"traceparent": "garbage"}, {"traceparent": ""}, {"tracestate": "a=b"}])
async def test_a_malformed_context_begins_a_new_trace_without_its_state(tracing, worker, headers):
    span = tracing.server_span("POST", PATH, {**SAMPLED, "traceparent": "", **headers})
    assert span.trace_id != TRACE
    assert [name for name, _ in span.attempt(worker, "m", 0).inject()] == ["traceparent"]


async def test_a_context_variable_of_somebody_else_is_not_our_parent(tracing, worker):
    stranger = tracing.server_span("POST", PATH, SAMPLED)
    with trace.use_span(stranger._span):
        assert tracing.server_span("POST", PATH, {}).trace_id != TRACE


async def test_no_provider_is_set_globally(tracing):
    tracing.server_span("POST", PATH, {}).end(200, Outcome.COMPLETED, None)
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"


async def test_an_unheard_of_method_does_not_become_a_span_name(tracing, collector):
    tracing.server_span("EVIL1", "_other", {}).end(405, Outcome.COMPLETED, None)
    await asyncio.to_thread(tracing.shutdown)
    (server,) = collector.spans
    assert server.span.name == "HTTP _other"
    assert server.attributes["http.request.method"] == "_OTHER"


@given(seed=st.integers(0, 2**32), sample=st.floats(0, 1))
def test_the_share_of_traces_is_decided_as_the_sdk_decides_it(seed, sample):
    kept = Kept()
    tracing = Tracing(Traces(exporter="console", sample=sample), kept, Random(seed))
    trace_id = Random(seed).getrandbits(128)
    tracing.server_span("POST", PATH, {})
    context = set_span_in_context(NonRecordingSpan(trace.INVALID_SPAN_CONTEXT), Context())
    expected = TraceIdRatioBased(sample).should_sample(context, trace_id, "x").decision.is_sampled()
    assert kept.asked == ([{"trace_id": trace_id, "link": None}] if expected else [])


@pytest.mark.parametrize("sample", [0.0, 0.1, 1.0])
def test_about_the_configured_share_is_recorded(sample):
    kept = Kept()
    tracing = Tracing(Traces(exporter="console", sample=sample), kept, Random(7))
    for _ in range(10_000):
        tracing.server_span("POST", PATH, {})
    assert len(kept.asked) == pytest.approx(sample * 10_000, abs=120)


def test_every_request_has_ids_of_its_own_though_nothing_is_recorded(worker):
    tracing = Tracing(Traces(exporter="console", sample=0.0), Kept())
    spans = [tracing.server_span("POST", PATH, {}) for _ in range(100)]
    assert all(type(span) is ServerSpan for span in spans)
    assert len({span.trace_id for span in spans}) == 100
    parents = [parse_traceparent(dict(span.attempt(worker, "m", 0).inject())["traceparent"]) for span in spans]
    assert [f"{parent.trace_id:032x}" for parent in parents] == [span.trace_id for span in spans]
    assert not any(parent.sampled for parent in parents)


async def test_the_file_exporter_writes_otlp_json_lines(tmp_path, worker):
    path = tmp_path / "spans.jsonl"
    telemetry = Telemetry(traces=Traces(exporter="file", file=str(path), inbound="link", sample=1.0))
    tracing = Tracing.from_config(telemetry)
    span = tracing.server_span("POST", PATH, SAMPLED)
    span.attempt(worker, "m", 0).end(200, None, None)
    span.end(200, Outcome.COMPLETED, None)
    await asyncio.to_thread(tracing.shutdown)
    client, server = (
        orjson.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for line in path.read_bytes().splitlines()
    )
    assert client["traceId"] == server["traceId"] == span.trace_id
    assert client["parentSpanId"] == server["spanId"]
    assert "parentSpanId" not in server
    assert (client["kind"], server["kind"]) == (3, 2)
    assert (server["links"][0]["traceId"], server["links"][0]["spanId"]) == (TRACE, SPAN)
    assert {"key": "http.route", "value": {"stringValue": PATH}} in server["attributes"]


async def test_the_console_exporter_writes_one_json_line_per_span_to_standard_error(capsys):
    tracing = Tracing.from_config(Telemetry(traces=Traces(exporter="console", sample=1.0)))
    span = tracing.server_span("POST", PATH, {})
    span.end(200, Outcome.COMPLETED, None)
    await asyncio.to_thread(tracing.shutdown)
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert orjson.loads(line)["context"]["trace_id"] == f"0x{span.trace_id}"


def test_the_file_exporter_without_a_path_is_refused():
    with pytest.raises(ValueError, match=r"telemetry\.traces\.file"):
        Tracing.from_config(Telemetry(traces=Traces(exporter="file")))
