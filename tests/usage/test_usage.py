"""`read_usage` on recorded answers of a real vLLM, on other engines' shapes, and on answers that try to look like usage."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.routes import ROUTES, Dialect
from gateway.http.tail import Tail
from gateway.http.usage import Usage, read_usage

OPENAI, ANTHROPIC, RESPONSES = Dialect.OPENAI, Dialect.ANTHROPIC, Dialect.RESPONSES
USAGE = {
    "prompt_tokens": 40,
    "total_tokens": 47,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 32},
}
READ = Usage(40, 7, 32)


def dumps(value):
    return json.dumps(value, separators=(",", ":")).encode()


def chat(content, **members):
    message = {"role": "assistant", "content": content}
    return {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": message}], **members}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat", Usage(10, 4, 0, 0)),
        ("chat_ids", Usage(10, 4, 0, 0)),
        ("chat_stream_usage", Usage(10, 4, 0, 0)),
        ("chat_stream_cont", Usage(10, 4, 0, 0)),
        ("chat_stream", None),
        ("chat_tool_required_stream", None),
        ("compl", Usage(2, 4, 0)),
        ("compl_stream", Usage(2, 4, 0)),
        ("msg", Usage(17, 4, 0, 0)),
        ("msg_stream", Usage(10, 4, 0, 0)),
        ("msg_tool_stream", Usage(156, 60, 128, 0)),
    ],
)
def test_a_recorded_answer_of_vllm_is_read(answers, name, expected):
    answer = answers[name]
    dialect = ROUTES[answer["path"]].dialect
    assert read_usage(answer["body"], dialect, stream=answer["stream"], first=answer["body"][:400]) == expected


@pytest.mark.parametrize("name", ["chat", "chat_stream_usage", "compl", "compl_stream", "msg", "msg_stream"])
def test_a_cut_at_any_byte_gives_the_usage_or_nothing_at_all(answers, name):
    answer = answers[name]
    body, dialect = answer["body"], ROUTES[answer["path"]].dialect
    expected = read_usage(body, dialect, stream=answer["stream"])
    assert expected is not None
    key = body.rindex(b'"usage"')
    for cut in range(max(0, key - 300), len(body)):
        found = read_usage(body[cut:], dialect, stream=answer["stream"])
        assert found == (expected if cut < key else None), cut


def test_the_raw_stream_of_a_worker_is_read_through_its_framing(raw_chunks):
    for reads in (raw_chunks, [b"".join(raw_chunks)]):
        tail = Tail()
        for read in reads:
            tail.add_chunks(read)
        assert read_usage(tail.last(), OPENAI, stream=True) == Usage(9, 6, 0, 0)


@pytest.mark.parametrize(
    "content",
    [
        '"usage":{"prompt_tokens":1}',
        ',"usage":{"prompt_tokens":1,"completion_tokens":1}}',
        'x"usage":{"prompt_tokens":1}}\n\ndata: {"usage":{"prompt_tokens":1}}',
        '\\"usage":{"prompt_tokens":1}',
        '"usage"',
    ],
)
def test_a_text_about_usage_is_no_usage(content):
    for answer in (chat(content), chat(content, usage=USAGE), {"usage": USAGE, **chat(content)}):
        expected = READ if "usage" in answer else None
        body = dumps(answer)
        assert read_usage(body, OPENAI, stream=False) == expected
        event = b"data: " + body + b"\n\n"
        assert read_usage(event + b"data: [DONE]\n\n", OPENAI, stream=True) == expected


def test_a_usage_inside_of_something_else_is_not_the_answers():
    inner = {"usage": {"prompt_tokens": 1, "input_tokens": 1}}
    assert read_usage(dumps(chat("x", metadata=inner)), OPENAI, stream=False) is None
    assert read_usage(dumps(chat("x", usage=USAGE, metadata=inner)), OPENAI, stream=False) == READ
    assert read_usage(dumps(chat("x", **{'x"usage': {"prompt_tokens": 1}})), OPENAI, stream=False) is None
    tool_use = {"type": "tool_use", "id": "t", "name": "report", "input": inner}
    body = dumps({"content": [tool_use], "usage": {"input_tokens": 5, "output_tokens": 2}})
    assert read_usage(body, ANTHROPIC, stream=False) == Usage(5, 2)
    assert read_usage(dumps({"content": [tool_use]}), ANTHROPIC, stream=False) is None


def test_a_pretty_printed_body_is_read():
    body = json.dumps(chat("x", usage=USAGE, prompt_logprobs=None), indent=2).encode()
    assert read_usage(body, OPENAI, stream=False) == READ
    assert read_usage(body[-300:] + b"\r\n", OPENAI, stream=False) == READ


def test_usage_that_is_null_in_each_event_does_not_hide_the_last_one():
    # SGLang writes it so.
    events = [{"choices": [{"delta": {"content": "x"}}], "usage": None} for _ in range(100)]
    stream = b"".join(
        b"data: %b\n\n" % dumps(event) for event in [*events, {"choices": [], "usage": USAGE}, *events[:3]]
    )
    assert read_usage(stream[-8000:], OPENAI, stream=True) == READ
    assert read_usage(b"data: %b\n\n" % dumps(events[0]), OPENAI, stream=True) is None


def test_sglang_without_details_tells_nothing_of_the_cache():
    usage = {
        "prompt_tokens": 12,
        "total_tokens": 14,
        "completion_tokens": 2,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }
    answer = chat("x", usage=usage, metadata={"weight_version": "default"})
    assert read_usage(dumps(answer), OPENAI, stream=False) == Usage(12, 2)


def test_a_broken_stream_with_usage_in_each_event_gives_the_latest():
    events = [{"choices": [{"delta": {}}], "usage": {"prompt_tokens": 9, "completion_tokens": n}} for n in range(3)]
    stream = b"".join(b"data: %b\r\n\r\n" % dumps(event) for event in events)
    error = b'data: {"error":{"message":"gone"}}\r\n\r\n'
    assert read_usage(stream + error, OPENAI, stream=True) == Usage(9, 2)
    assert read_usage(stream[:-10], OPENAI, stream=True) == Usage(9, 1)


def messages_stream(start, delta):
    events = [
        ("message_start", {"type": "message_start", "message": {"id": "m", "content": [], "usage": start}}),
        (
            "content_block_delta",
            {"type": "content_block_delta", "delta": {"partial_json": '{"usage":{"input_tokens":1}}'}},
        ),
        ("message_delta", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": delta}),
        ("message_stop", {"type": "message_stop"}),
    ]
    return [b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(event)) for name, event in events]


@pytest.mark.parametrize(
    ("start", "delta", "expected"),
    [
        # vLLM: the beginning counts the whole prompt, the end takes it apart.
        (
            {"input_tokens": 50, "output_tokens": 0},
            {"input_tokens": 2, "output_tokens": 5, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 16},
            Usage(50, 5, 32, 16),
        ),
        # Anthropic: the prompt at the beginning, the answer at the end.
        (
            {"input_tokens": 2, "output_tokens": 1, "cache_read_input_tokens": 48, "cache_creation_input_tokens": 0},
            {"output_tokens": 5},
            Usage(50, 5, 48, 0),
        ),
        ({"input_tokens": 50, "output_tokens": 0}, {"input_tokens": None, "output_tokens": 5}, Usage(50, 5)),
        ({"output_tokens": 0}, {"output_tokens": 5}, None),
    ],
)
def test_both_ends_of_a_stream_of_messages_are_read(start, delta, expected):
    events = messages_stream(start, delta)
    whole = b"".join(events)
    # In one read, and with a beginning that has left the tail.
    assert read_usage(whole, ANTHROPIC, stream=True, first=whole) == expected
    assert read_usage(whole, ANTHROPIC, stream=True) == expected
    assert read_usage(b"".join(events[1:]), ANTHROPIC, stream=True, first=events[0]) == expected


def test_messages_that_break_off_tell_what_their_beginning_said():
    events = messages_stream({"input_tokens": 50, "output_tokens": 0}, {})
    assert read_usage(events[1], ANTHROPIC, stream=True, first=events[0]) == Usage(50, 0)


def response(**members):
    return {
        "id": "resp_1",
        "object": "response",
        "output": [
            {"type": "message", "content": [{"type": "output_text", "text": '"usage":{"input_tokens":1}' * 400}]}
        ],
        "usage": {
            "input_tokens": 40,
            "input_tokens_details": {"cached_tokens": 32},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 47,
        },
        "user": None,
        **members,
    }


@pytest.mark.parametrize("ended", ["response.completed", "response.incomplete"])
def test_a_responses_answer_longer_than_the_tail_is_read(ended):
    assert read_usage(dumps(response())[-600:], RESPONSES, stream=False) == READ
    for event in (
        {"response": response(), "sequence_number": 9, "type": ended},
        {"type": ended, "sequence_number": 9, "response": response()},
    ):
        stream = b"event: response.output_text.done\ndata: {}\n\nevent: %b\ndata: %b\n\n" % (
            ended.encode(),
            dumps(event),
        )
        assert read_usage(stream, RESPONSES, stream=True) == READ
        assert read_usage(stream[-600:], RESPONSES, stream=True) == READ
        assert read_usage(stream[-600:] + b"data: [DONE]\n\n", RESPONSES, stream=True) == READ
    assert read_usage(dumps(response(usage=None)), RESPONSES, stream=False) is None


def test_a_route_that_generates_nothing_has_usage_too():
    body = b'{"object":"list","data":[{"embedding":[0.1,0.2]}],"usage":{"prompt_tokens":3,"total_tokens":3}}'
    assert read_usage(body, OPENAI, stream=False) == Usage(3, 0)


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "7", {}, 10**30])
def test_what_is_no_number_of_tokens_is_not_known(value):
    details = {"cached_tokens": value, "created_cache_tokens": value}
    usage = {"prompt_tokens": 5, "completion_tokens": value, "prompt_tokens_details": details}
    assert read_usage(dumps({"a": 1, "usage": usage}), OPENAI, stream=False) == Usage(5, 0)
    assert read_usage(dumps({"a": 1, "usage": {"prompt_tokens": value}}), OPENAI, stream=False) is None
    odd = dumps({"a": 1, "usage": {"prompt_tokens": 5, "prompt_tokens_details": [value]}})
    assert read_usage(odd, OPENAI, stream=False) == Usage(5, 0)


def test_what_cannot_be_read_is_none(answers):
    body = answers["chat"]["body"]
    for dialect in Dialect:
        for stream in (True, False):
            assert read_usage(b"", dialect, stream=stream) is None
            assert read_usage(gzip.compress(body), dialect, stream=stream) is None
    assert read_usage(body, ANTHROPIC, stream=False) is None
    assert read_usage(b'{"error":{"message":"no","code":400}}', OPENAI, stream=False) is None


soup = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from(
            [
                b'"usage":{',
                b'{"usage":{"prompt_tokens":1}}',
                b"}",
                b'"',
                b"\\",
                b"\n",
                b',"usage":{}',
                b'"usage"',
                b"data: ",
            ]
        ),
    ),
    max_size=30,
).map(b"".join)


@given(soup, soup, st.sampled_from(Dialect), st.booleans())
def test_no_bytes_make_it_fail(last, first, dialect, stream):
    read_usage(last, dialect, stream=stream, first=first)


json_values = st.recursive(
    st.one_of(st.none(), st.integers(0, 99), st.sampled_from(["", '"usage":{"prompt_tokens":1}', 'a"usage'])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["usage", "prompt_tokens", "x", 'x"usage', "\\"]), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "choices", 'x"usage', "usage"]), json_values), st.booleans(), st.data())
def test_it_agrees_with_a_full_parse_and_a_cut_only_loses(document, spaces, data):
    separators = (", ", ": ") if spaces else (",", ":")
    body = json.dumps({"id": "x", **document}, separators=separators).encode()
    usage = document.get("usage")
    prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    expected = Usage(prompt) if isinstance(prompt, int) else None
    found = read_usage(body, OPENAI, stream=False)
    assert (None if found is None else found.prompt_tokens) == (None if expected is None else expected.prompt_tokens)
    cut = data.draw(st.integers(0, len(body)))
    assert read_usage(body[cut:], OPENAI, stream=False) in (found, None)
