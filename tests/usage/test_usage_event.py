"""`UsageStripper` against an implementation that sees the whole stream at once, whatever the cuts and the framing."""

import itertools
import json
import re

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http.chunks import whole_chunks
from gateway.http.usage_event import UsageStripper

DONE = b"data: [DONE]\n\n"


def event(document, *, spaces=False, end=b"\n\n", space=b" "):
    separators = (", ", ": ") if spaces else (",", ":")
    return b"data:%b%b%b" % (space, json.dumps(document, separators=separators).encode(), end)


USAGE = event({"id": "x", "choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 15, "completion_tokens": 6}})
TOKEN = event({"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})


def framed(pieces):
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def unframed(data):
    assert whole_chunks(data) == len(data)
    pieces = []
    while data:
        line, _, rest = data.partition(b"\r\n")
        pieces.append(rest[: int(line, 16)])
        data = rest[int(line, 16) + 2 :]
    return pieces


def stripped(stream):
    """The reference: without the usage event that stands right before the end mark."""
    empty = re.match(rb"(?:\r?\n)*", stream)[0]
    events = [empty, *re.split(rb"(?<=\n\n)|(?<=\n\r\n)", stream[len(empty) :])]
    for index in range(len(events) - 1):
        if re.match(rb"data: ?\[DONE\]", events[index + 1]):
            try:
                document = orjson.loads(events[index].removeprefix(b"data:"))
            except orjson.JSONDecodeError:
                continue
            if document.get("choices") == [] and isinstance(document.get("usage"), dict):
                del events[index]
                break
    return b"".join(events)


def through(reads):
    """Send reads through: bytes go by without framing, lists of pieces in chunks. What comes out, without framing."""
    stripper = UsageStripper()
    out = []
    for read in reads:
        if isinstance(read, list):
            out.extend(unframed(stripper.chunks(framed(read))))
        else:
            out.append(stripper.body(read))
    out.append(stripper.release())
    return b"".join(out)


def test_the_recorded_stream_loses_its_usage_event_and_nothing_else(raw_chunks):
    stripper = UsageStripper()
    out = [stripper.chunks(chunk) for chunk in raw_chunks]
    usage = next(n for n, chunk in enumerate(raw_chunks) if b'"usage"' in chunk)
    assert b'"choices":[]' in raw_chunks[usage]
    assert out == [b"" if n == usage else chunk for n, chunk in enumerate(raw_chunks)]
    assert stripper.removed == 1
    assert stripper.release() == b""
    assert UsageStripper().chunks(b"".join(raw_chunks)) == b"".join(raw_chunks[:usage] + raw_chunks[usage + 1 :])


@pytest.mark.parametrize("name", ["chat_stream_usage", "chat_stream_cont", "compl_stream", "chat_stream"])
def test_a_recorded_answer_loses_its_usage_event_at_every_cut(answers, name):
    body = answers[name]["body"]
    expected = stripped(body)
    assert (expected != body) == (name != "chat_stream")
    for cut in range(len(body) + 1):
        pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
        assert through(pieces) == expected
        assert through([[piece] for piece in pieces]) == expected
        assert through([pieces]) == expected
    assert through([bytes([byte]) for byte in body]) == expected
    assert through([[bytes([byte])] for byte in body]) == expected


def test_a_token_is_never_held_back():
    stripper = UsageStripper()
    for _ in range(3):
        assert stripper.body(TOKEN) == TOKEN
        assert stripper.chunks(framed([TOKEN])) == framed([TOKEN])
    # Cut behind the first choice's beginning, it is known to be none.
    cut = TOKEN.index(b"[{") + 2
    assert stripper.body(TOKEN[:cut]) == TOKEN[:cut]
    assert stripper.body(TOKEN[cut:]) == TOKEN[cut:]
    assert stripper.body(TOKEN[: cut - 1]) == b""
    assert stripper.body(TOKEN[cut - 1 :]) == TOKEN


def test_chunks_from_which_nothing_is_taken_keep_their_framing():
    odd = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":1}}\n\n'
    reads = [framed([TOKEN, b": ping\n\n", odd]), framed([odd[:50]]), framed([odd[50:], TOKEN])]
    stripper = UsageStripper()
    assert [stripper.chunks(read) for read in reads] == reads


def test_what_chunks_hold_back_comes_out_in_whichever_framing_is_next():
    half = len(USAGE) // 2
    other = TOKEN
    stripper = UsageStripper()
    assert stripper.chunks(framed([TOKEN, USAGE[:half]])) == framed([TOKEN])
    assert stripper.body(USAGE[half:]) == b""
    assert stripper.chunks(framed([other])) == framed([USAGE + other])
    assert stripper.body(USAGE) == b""
    assert stripper.chunks(framed([DONE])) == framed([DONE])
    assert stripper.removed == 1


def test_a_stream_that_breaks_off_gives_out_what_was_held_back():
    stripper = UsageStripper()
    assert stripper.body(TOKEN + USAGE) == TOKEN
    assert stripper.release() == USAGE
    assert stripper.release() == b""
    assert stripper.body(DONE) == DONE
    stripper = UsageStripper()
    assert stripper.chunks(framed([USAGE[:40]])) == b""
    assert stripper.release() == USAGE[:40]
    assert stripper.body(USAGE[40:] + DONE) == USAGE[40:] + DONE


def test_what_was_given_out_is_no_measure_for_what_comes_next():
    stripper = UsageStripper()
    assert stripper.body(USAGE) == b""
    assert stripper.release() == USAGE
    other = event({"x": "y" * (len(USAGE) - len(event({"x": ""})))})
    assert len(other) == len(USAGE)
    assert stripper.body(other[:20]) == b""
    assert stripper.body(other[20:] + DONE) == other + DONE


@pytest.mark.parametrize(
    "last",
    [
        event({"choices": [], "usage": None}),
        event({"choices": [], "prompt_filter_results": [{"usage": {}}]}),
        event({"choices": [{"index": 0, "delta": {}}], "usage": {"prompt_tokens": 1}}),
        event({"usage": {"prompt_tokens": 1}}),
        event({"error": {"message": '"choices":[],"usage":{}'}}),
        event({"choices": [{"index": 0, "delta": {"content": '"choices":[],"usage":{}'}}]}),
        b": keep-alive\n\n",
        b"event: usage\n" + USAGE,
        USAGE[:-2] + b"\nid: 7\n\n",
        USAGE.replace(b",", b",\n"),
        b'data: {"choices":[],"usage":{}\n\n',
        event({"choices": [], "usage": {}, "rest": "x" * 20_000}),
        event({"choices": [], "usage": {}, "more": {"choices": [1]}}),
        event(["usage"]),
    ],
)
def test_an_event_that_is_not_just_usage_stays(last):
    assert through([TOKEN + last + DONE]) == TOKEN + last + DONE
    assert through([TOKEN, last, DONE]) == TOKEN + last + DONE
    assert through([[bytes([byte])] for byte in TOKEN + last[:600]]) == TOKEN + last[:600]


@pytest.mark.parametrize("done", [DONE, b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\r\n", b"\n\n\r\n", b"\n\n\n"])
def test_lines_may_end_in_any_way_at_any_cut(end, done):
    token, usage = (part.replace(b"\n\n", end) for part in (TOKEN, USAGE))
    # Behind an extra empty line the end mark no longer stands right behind the usage event.
    usage = usage.replace(b"\n\n\r\n", b"\n\n").replace(b"\n\n\n", b"\n\n")
    stream = token + usage + done
    for cut in range(len(stream) + 1):
        assert through([stream[:cut], stream[cut:]]) == token + done
    assert through([bytes([byte]) for byte in stream]) == token + done


def test_an_event_at_the_limit_of_length_is_judged_alike_at_every_cut():
    for size in range(16 * 1024 - 3, 16 * 1024 + 4):
        usage = event({"choices": [], "usage": {}, "rest": ""})
        usage = usage.replace(b'"rest":"', b'"rest":"' + b"x" * (size - len(usage)))
        assert len(usage) == size
        expected = DONE if size <= 16 * 1024 else usage + DONE
        for cut in range(size - 4, size + 1):
            assert through([usage[:cut], usage[cut:] + DONE]) == expected


@pytest.mark.parametrize("between", [TOKEN, b": ping\n\n", event({"error": {"message": "x"}}), USAGE])
def test_only_usage_right_before_the_end_goes(between):
    stream = TOKEN + USAGE + between
    assert through([stream + DONE]) == (TOKEN + USAGE if between == USAGE else stream) + DONE
    assert through([stream]) == stream
    assert through([TOKEN, USAGE, between, DONE]) == through([stream + DONE])


def test_a_long_event_that_may_be_usage_is_not_held_back_without_end():
    stripper = UsageStripper()
    begin = b'data: {"x":"'
    assert stripper.body(begin) == b""
    passed = b"".join(stripper.body(b"y" * 1000) for _ in range(20))
    assert passed == begin + b"y" * 20_000
    assert stripper.body(b'"}\n\n' + TOKEN + USAGE + DONE) == b'"}\n\n' + TOKEN + DONE


texts = st.sampled_from(
    ["", "a", "[DONE]", 'data: {"choices":[],"usage":{}}\n\n', '"choices":[],"usage":{', "é\r\n", "[]"]
)
usages = st.fixed_dictionaries({"prompt_tokens": st.integers(0, 99)}, optional={"prompt_tokens_details": st.none()})
tokens = st.builds(
    lambda index, text, usage: {"choices": [{"index": index, "delta": {"content": text}}], **usage},
    st.integers(0, 2),
    texts,
    st.one_of(st.just({}), st.fixed_dictionaries({"usage": st.one_of(st.none(), usages)})),
)
finals = st.builds(
    lambda head, usage, rest, swap: (
        {**head, "usage": usage, "choices": [], **rest} if swap else {**head, "choices": [], "usage": usage, **rest}
    ),
    st.sampled_from([{}, {"id": "x", "model": "m"}]),
    st.one_of(usages, usages, st.none()),
    st.sampled_from([{}, {"system_fingerprint": None}, {"system_fingerprint": "f", "metrics": {"queue_time_ms": 1.5}}]),
    st.booleans(),
)
errors = st.just({"error": {"message": "boom", "code": 500}})
ends = st.sampled_from([b"\n\n", b"\n\n", b"\r\n\r\n", b"\n\r\n"])
events = st.one_of(
    st.builds(
        lambda document, spaces, end, space: event(document, spaces=spaces, end=end, space=space),
        st.one_of(tokens, tokens, finals, errors),
        st.booleans(),
        ends,
        st.sampled_from([b" ", b" ", b""]),
    ),
    st.sampled_from(
        [b": ping\n\n", b"event: x\ndata: {}\n\n", b"data: {\ndata: }\n\n", b"\n", b"\r\n", b"data: x\n\n"]
    ),
)
marks = st.sampled_from([b"", DONE, DONE, DONE, b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])


@st.composite
def cut(draw):
    """A stream and the reads that it comes in: each bytes, or a list of the chunks' payloads."""
    stream = b"".join(draw(st.lists(events, max_size=6))) + draw(marks)
    places = sorted(draw(st.sets(st.integers(1, max(1, len(stream) - 1)), max_size=8)))
    bounds = [0, *places, len(stream)]
    pieces = [piece for start, end in itertools.pairwise(bounds) if (piece := stream[start:end])]
    reads = []
    while pieces:
        if draw(st.booleans()):
            reads.append(pieces.pop(0))
        else:
            count = draw(st.integers(1, len(pieces)))
            reads.append(pieces[:count])
            del pieces[:count]
    return stream, reads


@given(cut())
@example((TOKEN + USAGE + DONE, [[TOKEN[:20], TOKEN[20:] + USAGE[:-1]], USAGE[-1:], [DONE]]))
def test_any_stream_in_any_cuts_and_framings_is_as_if_seen_whole(case):
    stream, reads = case
    assert through(reads) == stripped(stream)


@given(
    st.lists(
        st.one_of(st.binary(max_size=9), st.sampled_from([TOKEN, USAGE, DONE, USAGE[:30], b"\n", b"\r"])), max_size=12
    )
)
def test_nothing_but_usage_events_is_ever_lost(reads):
    stream = b"".join(reads)
    out = through(reads)
    # Each byte that is missing belongs to a whole usage event.
    assert (len(stream) - len(out)) % len(USAGE) == 0
    assert out.replace(USAGE, b"") == stream.replace(USAGE, b"") or out == stream
