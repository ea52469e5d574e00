"""Bodies that are kept, where that is switched on, and what is shown of them."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.base import REDACTED
from gateway.config.schema import Capture
from gateway.telemetry.capture import Capturing, redacted

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "Token", "user", "b"]), inner),
    max_leaves=15,
)


def test_nothing_is_kept_unless_it_is_switched_on():
    assert Capturing(Capture()).of(b"") is None
    assert Capturing(Capture()).of(b"{}") is None


def test_a_body_is_kept_up_to_the_limit():
    capturing = Capturing(Capture(enabled=True, bytes=10))
    assert capturing.of(b"x" * 10) is not None
    assert capturing.of(b"x" * 11) is None


def test_a_body_is_shown_without_the_values_of_the_named_members():
    body = orjson.dumps({"messages": [{"content": "hi", "API_KEY": {"deep": 1}}], "user": "alice", "n": 1})
    captured = Capturing(Capture(enabled=True)).of(body)
    assert captured.document() == {"messages": [{"content": "hi", "API_KEY": REDACTED}], "user": REDACTED, "n": 1}


def test_a_body_that_is_no_json_is_only_measured():
    assert Capturing(Capture(enabled=True)).of(b"\x00abc").document() == "<4 bytes that are no JSON>"


@given(JSON)
def test_no_value_of_a_named_member_survives_at_any_depth(value):
    def values(document):
        if isinstance(document, dict):
            for name, inner in document.items():
                if name.lower() in {"token", "user"}:
                    yield inner
                else:
                    yield from values(inner)
        elif isinstance(document, list):
            for inner in document:
                yield from values(inner)

    assert set(map(str, values(redacted(value, {"token", "user"})))) <= {REDACTED}
