"""What is encoded by hand is what the generated classes read."""

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.telemetry import otlp

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
ATTRIBUTES = st.dictionaries(
    TEXT.filter(bool), TEXT | st.booleans() | INT64 | st.floats(allow_nan=False) | st.none(), max_size=20
)
ID64 = st.integers(1, (1 << 64) - 1)
ID128 = st.integers(1, (1 << 128) - 1)
TIME = st.integers(0, (1 << 64) - 1)


def plain(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def present(attributes):
    return {name: value for name, value in attributes.items() if value is not None}


@settings(deadline=None)
@given(
    name=TEXT,
    kind=st.sampled_from([otlp.SERVER, otlp.CLIENT]),
    trace_id=ID128,
    span_id=ID64,
    parent=st.just(0) | ID64,
    remote=st.booleans(),
    flags=st.integers(0, 3),
    tracestate=TEXT,
    start=TIME,
    end=TIME,
    attributes=ATTRIBUTES,
    failed=st.booleans(),
    event=st.tuples(TEXT, TIME, ATTRIBUTES),
    link=st.tuples(ID128, ID64),
    whose=ATTRIBUTES,
)
def test_every_field_of_a_span_arrives(event, link, whose, **span):
    more = [otlp.event(*event), otlp.link(*link)]
    data = otlp.request(otlp.resource(whose), otlp.scope("s", "1"), [otlp.span(**span, more=more)] * 2)
    (group,) = ExportTraceServiceRequest.FromString(data).resource_spans
    assert plain(group.resource.attributes) == present(whose)
    (scope,) = group.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("s", "1")
    found, again = scope.spans
    assert found == again
    assert (found.name, found.kind) == (span["name"], span["kind"])
    assert int.from_bytes(found.trace_id, "big") == span["trace_id"]
    assert int.from_bytes(found.span_id, "big") == span["span_id"]
    assert int.from_bytes(found.parent_span_id, "big") == span["parent"]
    assert found.trace_state == span["tracestate"]
    assert (found.start_time_unix_nano, found.end_time_unix_nano) == (span["start"], span["end"])
    assert plain(found.attributes) == present(span["attributes"])
    assert found.status.code == (2 if span["failed"] else 0)
    assert found.flags == span["flags"] | 0x100 | (0x200 if span["remote"] else 0)
    (happened,) = found.events
    assert (happened.name, happened.time_unix_nano, plain(happened.attributes)) == (*event[:2], present(event[2]))
    (pointed,) = found.links
    assert (int.from_bytes(pointed.trace_id, "big"), int.from_bytes(pointed.span_id, "big")) == link


def test_a_lone_surrogate_costs_a_question_mark_and_not_the_batch():
    data = otlp.request(otlp.resource({"a": "x\ud800"}), b"", [])
    (group,) = ExportTraceServiceRequest.FromString(data).resource_spans
    assert plain(group.resource.attributes) == {"a": "x?"}
