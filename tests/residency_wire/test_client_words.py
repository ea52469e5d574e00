"""What clients say about caching, in the words of the APIs that they know."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.prompt import exact
from gateway.prompt.segments import Segment
from gateway.residency.client_words import MAX_BREAKPOINTS, client_words


def prompt_of(*lengths):
    """A prompt of segments of these lengths."""
    return exact([Segment(array("I", range(length))) for length in lengths])


EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def block(text, **fields):
    return {"type": "text", "text": text, **fields}


def test_a_body_that_says_nothing_costs_no_words():
    body = {"messages": [{"role": "user", "content": "cache_control"}, {"role": "user", "content": [block("x")]}]}
    assert client_words(body, prompt_of(10)) is None


def test_a_breakpoint_on_the_last_part_is_the_end_of_the_prompt():
    body = {"messages": [{"role": "user", "content": [block("a" * 50), block("b" * 50, **EPHEMERAL)]}]}
    words = client_words(body, prompt_of(4, 100, 3))
    assert words.breakpoints == ((107, 300.0),)


def test_a_breakpoint_in_a_system_prompt_ends_where_its_message_does():
    body = {
        "system": [block("s" * 400, **HOUR)],
        "messages": [{"role": "user", "content": "u" * 390}, {"role": "assistant", "content": "a" * 210}],
    }
    # Special tokens and roles are in the prompt and not in the body: the share of the text is near the boundary, not at it.
    words = client_words(body, prompt_of(3, 104, 4, 100, 4, 54, 3))
    assert words.breakpoints == ((107, 3600.0),)


@pytest.mark.parametrize("path", ["part", "message", "tool", "body"])
def test_cache_control_is_found_wherever_clients_put_it(path):
    message = {"role": "user", "content": [block("hello", **(EPHEMERAL if path == "part" else {}))]}
    body = {"messages": [message]}
    if path == "message":
        body["messages"] = [{"role": "user", "content": "hello", **EPHEMERAL}]
    if path == "tool":
        body["tools"] = [{"name": "t" * 20, "input_schema": {"type": "object"}, **EPHEMERAL}]
    if path == "body":
        body |= EPHEMERAL
    words = client_words(body, prompt_of(30, 10))
    assert len(words.breakpoints) == 1
    assert words.breakpoints[0][1] == 300.0
    assert words.breakpoints[0][0] in ({30} if path == "tool" else {40})


def test_two_breakpoints_at_one_place_are_one_with_the_longer_time():
    body = {"messages": [{"role": "user", "content": [block("x", **EPHEMERAL), block("", **HOUR)]}]}
    assert client_words(body, prompt_of(10, 10)).breakpoints == ((20, 3600.0),)


def test_of_too_many_breakpoints_the_last_count():
    body = {"messages": [{"role": "user", "content": [block("x" * 10, **EPHEMERAL)]} for _ in range(9)]}
    stops = [stop for stop, _ in client_words(body, prompt_of(*[10] * 9)).breakpoints]
    assert stops == [60, 70, 80, 90]
    assert len(stops) == MAX_BREAKPOINTS


def test_openais_key_and_retention_are_read():
    words = client_words({"prompt_cache_key": "shop", "prompt_cache_retention": "24h"}, prompt_of(10))
    assert (words.key, words.retention_seconds, words.breakpoints) == ("shop", 86_400.0, ())


def test_the_last_request_of_a_conversation_says_so():
    assert client_words({}, prompt_of(10), session_end=True).session_end


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["ephemeral", "1h", "24h", "", "text"])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "ttl", "cache_control", "content", "text", "role", "x"]), inner, max_size=4
        )
    ),
    max_leaves=30,
)
_bodies = st.dictionaries(
    st.sampled_from(
        ["messages", "system", "tools", "cache_control", "prompt_cache_key", "prompt_cache_retention", "prompt"]
    ),
    _json,
)


@given(_bodies, st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_whatever_a_client_sends_breakpoints_rise_within_the_prompt(body, lengths):
    words = client_words(body, prompt_of(*lengths))
    if words is None:
        return
    stops = [stop for stop, _ in words.breakpoints]
    assert stops == sorted(set(stops))
    assert all(0 < stop <= sum(lengths) for stop in stops)
    assert all(ttl in (300.0, 3600.0) for _, ttl in words.breakpoints)


def test_deep_nesting_does_no_harm():
    deep = "x"
    for _ in range(5000):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": [{"type": "x", "inner": deep, **EPHEMERAL}]}]}
    assert client_words(body, prompt_of(10)).breakpoints == ((10, 300.0),)
