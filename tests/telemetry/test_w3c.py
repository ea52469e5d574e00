import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry.w3c import (
    MAX_TRACESTATE,
    TraceParent,
    format_traceparent,
    is_valid_traceparent,
    parse_traceparent,
    valid_tracestate,
)

T = "0af7651916cd43dd8448eb211c80319c"
S = "b7ad6b7169203331"


@pytest.mark.parametrize(
    "value",
    [
        f"00-{T}-{S}-00",
        f"00-{T}-{S}-01",
        f"00-{T}-{S}-03",
        f"00-{T}-{S}-ff",
        f"01-{T}-{S}-01",
        f"cc-{T}-{S}-01-what-comes-later",
        f"fe-{T}-{S}-01-",
    ],
)
def test_a_valid_traceparent_is_taken(value):
    assert is_valid_traceparent(value)
    assert parse_traceparent(value) == TraceParent(int(T, 16), int(S, 16), int(value[53:55], 16))


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        "garbage",
        f"ff-{T}-{S}-01",
        f"0-{T}-{S}-01",
        f"000-{T}-{S}-01",
        f"0x-{T}-{S}-01",
        f"00-{T}-{S}",
        f"00-{T}-{S}-",
        f"00-{T}-{S}-1",
        f"00-{T}-{S}-001",
        f"00-{T}-{S}-01-",
        f"00-{T}-{S}-01-more",
        f"01-{T}-{S}-01more",
        f"01-{T}-{S}-01-\n",
        f"00-{T}-{S}-0g",
        f"00-{T.upper()}-{S}-01",
        f"00-{T}-{S.upper()}-01",
        f"00-{'0' * 32}-{S}-01",
        f"00-{T}-{'0' * 16}-01",
        f"00-{T[:-1]}-{S}-01",
        f"00-{T}a-{S}-01",
        f"00-{T}-{S[:-1]}-01",
        f"00-{T}-{S}a-01",
        f"00_{T}_{S}_01",
        f"00-{T}-{S}-01\n",
        f" 00-{T}-{S}-01",
        f"00-{T}-{S}-01,00-{T}-{S}-01",
        f"00-{T[:-1]}\u0661-{S}-01",
        "00-" + "a" * 100_000,
    ],
)
def test_a_malformed_traceparent_is_refused(value):
    assert not is_valid_traceparent(value)
    assert parse_traceparent(value) is None


def test_no_traceparent_is_no_parent():
    assert parse_traceparent(None) is None


HEX = st.sampled_from("0123456789abcdefABg")


@given(
    st.builds(
        "-".join,
        st.tuples(
            st.sampled_from(["00", "01", "ff", "0"]),
            st.text(HEX, min_size=31, max_size=33) | st.just(T),
            st.text(HEX, min_size=15, max_size=17) | st.just(S),
            st.sampled_from(["00", "01", "02", "zz", "1"]),
        ),
    )
)
def test_what_is_taken_is_what_the_sdk_takes(value):
    context = TraceContextTextMapPropagator().extract({"traceparent": value}, Context())
    theirs = get_current_span(context).get_span_context()
    ours = parse_traceparent(value)
    assert (ours is not None) == theirs.is_valid
    if ours is not None:
        assert (ours.trace_id, ours.span_id, ours.sampled) == (
            theirs.trace_id,
            theirs.span_id,
            theirs.trace_flags.sampled,
        )


@given(trace_id=st.integers(1, 2**128 - 1), span_id=st.integers(1, 2**64 - 1), flags=st.integers(0, 3))
def test_what_is_written_is_read_back(trace_id, span_id, flags):
    assert parse_traceparent(format_traceparent(trace_id, span_id, flags)) == TraceParent(trace_id, span_id, flags)


def test_flags_that_are_not_known_are_not_passed_on():
    assert format_traceparent(1, 1, 0xFF).endswith("-03")


@pytest.mark.parametrize(
    "value",
    [
        "a=b",
        "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "a=1, b=2\t,c=3",
        "a=1,,b=2",
        "tenant@system=x",
        "0a=1",
        "a=with inner space",
        ",".join(f"k{number}=v" for number in range(32)),
    ],
)
def test_a_valid_tracestate_is_passed_on_as_it_came(value):
    assert valid_tracestate(value) == value


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        ",",
        "a",
        "a=",
        "=b",
        "A=b",
        "a=b=c",
        "a=1,a=2",
        "a=caf\u00e9",
        "a=x\r\nx-evil: 1",
        "a=\x00",
        f"{'k' * 257}=v",
        f"k={'v' * 257}",
        "a@0b=1",
        ",".join(f"k{number}=v" for number in range(33)),
        ",".join(f"k{number}={'v' * 200}" for number in range(MAX_TRACESTATE // 200 + 1)),
    ],
)
def test_a_malformed_tracestate_is_dropped(value):
    assert valid_tracestate(value) == ""
