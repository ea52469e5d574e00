"""Members put into bodies: only they change, every other byte stays, and a parser agrees."""

import json

import orjson
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.http.body import parse_json
from gateway.http.splice import with_include_usage, with_token_ids

IDS = b"[1,22,333]"


def usage(body, **options):
    return with_include_usage(body, parse_json(body), **options)


def ids(body):
    return with_token_ids(body, parse_json(body), IDS)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"stream":true}', b'{"stream_options":{"include_usage":true},"stream":true}'),
        (b' {\n "stream" : true }\r\n', b' {"stream_options":{"include_usage":true},\n "stream" : true }\r\n'),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (
            b'{"stream_options": {"include_usage" : false , "x":[1, 2]},"stream":true}',
            b'{"stream_options": {"include_usage" : true , "x":[1, 2]},"stream":true}',
        ),
        (
            b'{"stream":true,"stream_options":{"a":{"include_usage":0},"include_usage":null}}',
            b'{"stream":true,"stream_options":{"a":{"include_usage":0},"include_usage":true}}',
        ),
        (
            b'{"stream":true,"stream\\u005foptions":{"include_\\u0075sage":false}}',
            b'{"stream":true,"stream\\u005foptions":{"include_\\u0075sage":true}}',
        ),
    ],
)
def test_usage_is_asked_for_where_the_client_did_not(body, expected):
    assert usage(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"stream":false}',
        b'{"stream":1}',
        b'{"stream":"true"}',
        b'{"stream":null,"stream_options":{"include_usage":false}}',
        b'{"stream":true,"stream_options":{"include_usage":true}}',
        b'{"stream":true,"stream_options":{"include_usage":0}}',
        b'{"stream":true,"stream_options":{"include_usage":"no"}}',
        b'{"stream":true,"stream_options":[]}',
        b'{"stream":true,"stream_options":false}',
        b'{"stream":true,"stream_options":"include_usage"}',
        b'{"stream":true,"stream_options":{"include_usage":false,"continuous_usage_stats":true}}',
        b'{"stream":true,"stream_options":{"include_usage":false,"x":"' + b"y" * 5000 + b'"}}',
        b'{"stream":true,"stream_options":{"include_usage":false,"x":[' + b"[]," * 5000 + b"[]]}}",
    ],
)
def test_a_body_that_asks_itself_or_oddly_stays_the_same_object(body):
    for worker_default in (True, False):
        assert usage(body, worker_default=worker_default) is body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b'{"stream":true,"stream_options":{ "x":1}}',
            b'{"stream":true,"stream_options":{"include_usage":true, "x":1}}',
        ),
        (b'{"stream":true,"stream_options":{ }}', b'{"stream":true,"stream_options":{"include_usage":true }}'),
    ],
)
def test_options_without_include_usage_mean_what_the_worker_takes_them_for(body, expected):
    # vLLM sends usage then: the client expects it, so nothing may be taken out later.
    assert usage(body) is body
    assert usage(body, worker_default=False) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"messages":[]}', b'{"kv_transfer_params":{"prompt_token_ids":[1,22,333]},"messages":[]}'),
        (b'{"kv_transfer_params": {}}', b'{"kv_transfer_params": {"prompt_token_ids":[1,22,333]}}'),
        (b'{"kv_transfer_params":{"a":1}}', b'{"kv_transfer_params":{"prompt_token_ids":[1,22,333],"a":1}}'),
        (b" { } ", b' {"kv_transfer_params":{"prompt_token_ids":[1,22,333]} } '),
    ],
)
def test_token_ids_are_put_in(body, expected):
    assert ids(body) == expected


@pytest.mark.parametrize(
    "value", [b"null", b"[]", b"1", b'"x"', b'{"prompt_token_ids":null}', b'{"prompt_token_ids":[1]}']
)
def test_given_ids_and_odd_parameters_stay_the_same_object(value):
    body = b'{"kv_transfer_params":%b}' % value
    assert ids(body) is body


def test_both_can_be_put_into_one_body():
    body = b'{"messages":[],"stream":true}'
    parsed = parse_json(body)
    both = with_token_ids(with_include_usage(body, parsed), parsed, IDS)
    assert orjson.loads(both) == {
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {"prompt_token_ids": [1, 22, 333]},
    }


def test_thousands_of_keys_that_look_alike_cost_one_pass():
    nested = b'{"stream_options":null},' * 50_000
    body = b'{"stream":true,"stream_options":{"include_usage":false},"messages":[%b0]}' % nested
    assert usage(body) == body.replace(b"false", b"true", 1)


# Documents as text, in which keys are repeated, escaped and surrounded by white space as JSON allows.
blanks = st.sampled_from(["", "", "", " ", "\n\t", "\r\n  "])
names = st.sampled_from(
    ["stream_options", "include_usage", "kv_transfer_params", "prompt_token_ids", "stream", "x", "stream_options#9", ""]
)


@st.composite
def spelled(draw, text):
    escape = draw(st.booleans()) and text
    letters = (
        f"\\u{ord(letter):04{draw(st.sampled_from('xX'))}}" if escape and draw(st.booleans()) else letter
        for letter in text
    )
    return '"' + "".join(letters) + '"'


scalars = st.sampled_from(
    [
        "null",
        "true",
        "false",
        "0",
        "-1.5e3",
        '""',
        '"\\"stream_options\\":{"',
        '"a\\\\"',
        '"include_usage\\":false"',
        "[]",
        "{}",
    ]
)


@st.composite
def objects(draw, inner, first=()):
    members = []
    for name in (*first, *draw(st.lists(names, max_size=4))):
        value = draw(inner)
        if name in first:
            value = draw(first[name])
        members.append(draw(blanks) + draw(spelled(name)) + draw(blanks) + ":" + draw(blanks) + value + draw(blanks))
    draw(st.randoms()).shuffle(members)
    return "{" + ",".join(members) + draw(blanks) + "}"


values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + " , ".join(items) + "]"), objects(inner)
    ),
    max_leaves=8,
)
options = st.one_of(
    objects(values, {"include_usage": st.sampled_from(["false", "null", "false", "true"])}), objects(values), values
)
bodies = st.builds(
    lambda before, body, after: (before + body + after).encode(),
    blanks,
    st.one_of(
        objects(values, {"stream": st.just("true"), "stream_options": options, "kv_transfer_params": options}),
        objects(values, {"stream": st.just("true")}),
        objects(values),
    ),
    blanks,
)


def assert_only_inserted_or_replaced(body, new, *, replaced):
    """Every other byte as it was: one run of bytes is new, in place of nothing or of a value in `replaced`."""
    start = 0
    while start < min(len(body), len(new)) and body[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(body), len(new)) - start and body[-1 - end] == new[-1 - end]:
        end += 1
    old = body[start : len(body) - end]
    # Letters that old and new value have in common are not part of the difference: true for false shows as tru for fals.
    assert old == b"" or any(old in value for value in replaced)


@given(bodies, st.booleans())
@example(b'{"stream":true,"stream_options":{"include_usage":false},"stream_options#9":{"stream_options":1}}', True)
@example(b'{"stream_options":1,"stream":true,"stream_options":{"include_usage":1,"include_usage":null}}', True)
def test_include_usage_changes_that_member_only(body, worker_default):
    parsed = parse_json(body)
    new = with_include_usage(body, parsed, worker_default=worker_default)
    given_options = parsed.get("stream_options")
    asked = isinstance(given_options, dict) and given_options.get("include_usage", worker_default)
    wanted = (
        parsed.get("stream") is True
        and (given_options is None or isinstance(given_options, dict))
        and (asked is None or asked is False)
        and not (given_options or {}).get("continuous_usage_stats")
    )
    if not wanted:
        assert new is body
        return
    expected = {**parsed, "stream_options": {**(given_options or {}), "include_usage": True}}
    # Both parsers, since workers use others than ours: repeated keys must not tell them apart.
    assert orjson.loads(new) == json.loads(new) == expected
    assert_only_inserted_or_replaced(body, new, replaced=(b"false", b"null"))


@given(bodies)
def test_token_ids_change_that_member_only(body):
    parsed = parse_json(body)
    new = with_token_ids(body, parsed, IDS)
    parameters = parsed.get("kv_transfer_params", {})
    if not isinstance(parameters, dict) or "prompt_token_ids" in parameters:
        assert new is body
        return
    expected = {**parsed, "kv_transfer_params": {**parameters, "prompt_token_ids": [1, 22, 333]}}
    assert orjson.loads(new) == json.loads(new) == expected
    assert len(new) > len(body)
    assert_only_inserted_or_replaced(body, new, replaced=())


@given(bodies)
def test_a_member_that_the_body_has_not_is_not_doubled(body):
    parsed = parse_json(body)
    assume(parsed.get("stream") is True and "stream_options" not in parsed)
    pairs = json.loads(with_include_usage(body, parsed), object_pairs_hook=list)
    assert [name for name, _ in pairs].count("stream_options") == 1
