"""Answers that break off in the middle: the client is told in its own dialect where it can be told, and never misled."""

import asyncio

import orjson
import pytest

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
EVENT = b'data: {"n":1}\n\n'


def parse_events(body):
    """Server-sent events as clients see them (WHATWG HTML, 9.2.6): only what an empty line has ended."""
    events = []
    for block in body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        lines = [line.partition(b":") for line in block.split(b"\n") if line and not line.startswith(b":")]
        fields = {name.decode(): value.removeprefix(b" ") for name, _, value in lines}
        if "data" in fields:
            events.append((fields.get("event", b"").decode(), fields["data"]))
    return events


async def begun(bench, http, *, path=CHAT, version=b"HTTP/1.1", fields="", first=None, head=None):
    """A stream of which the client has got a first piece."""
    client = await bench.client()
    request = http.post({"model": "m", "stream": True}, path=path, fields=fields).replace(b"HTTP/1.1", version)
    await client.sends(request)
    worker, _ = await bench.worker.receives()
    await worker.sends((head or http.SSE_HEAD) + (http.chunk(EVENT) if first is None else first))
    head = await client.head()
    seen = b""
    while not seen.endswith(b"\n\n") if first is None else len(seen) < 1:
        seen += await client.chunk() if version == b"HTTP/1.1" else await client.reader.read(100)
    return client, worker, seen


async def break_off(worker, how):
    """Every way in which a stream ends that should not have."""
    match how:
        case "FIN":
            await worker.closes()
        case "RST":
            await worker.resets()
        case "half a chunk":
            await worker.sends(b"20\r\ndata: {")
            await worker.closes()
        case "half a size":
            await worker.sends(b"2")
            await worker.closes()
        case "garbage":
            await worker.sends(b"\x00\xff garbage")
        case "broken size":
            await worker.sends(b"zz\r\nhello\r\n")
        case "overflowing size":
            await worker.sends(b"FFFFFFFFFFFFFFFFF\r\n")


WAYS = ("FIN", "RST", "half a chunk", "half a size", "garbage", "broken size", "overflowing size")


@pytest.mark.parametrize("how", WAYS)
async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_done(start, http, how):
    bench = await start()
    async with bench.bystander():
        client, worker, seen = await begun(bench, http)
        await break_off(worker, how)
        body = seen + await client.chunked_body()
        *_, (name, data) = parse_events(body)
        error = orjson.loads(data)["error"]
        assert name == ""
        assert error["type"] == "api_error"
        assert error["code"] == ("upstream_protocol" if how[0] in "gbo" else "upstream_reset_midstream")
        assert b"[DONE]" not in body
        assert await client.sees_end() == b""
        assert bench.failures() == 1
    await bench.settles()
    assert bench.outcomes == {"completed": 1, "failed": 1}
    assert bench.gateway.metrics.retries == {}


@pytest.mark.parametrize(
    "cut", ["data: {", 'data: {"n":', "data: 1\n", "data: 1\r\n", "event: x\ndata: 1", ": comm", "\n", "d"]
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_the_error_event_stands_alone_although_the_last_one_was_cut(start, http, path, cut):
    bench = await start()
    client, worker, seen = await begun(bench, http, path=path)
    await worker.sends(http.chunk(cut.encode()))
    assert await client.chunk() == cut.encode()
    await worker.closes()
    body = seen + cut.encode() + await client.chunked_body()
    name, data = parse_events(body)[-1]
    error = orjson.loads(data)
    if path == CHAT:
        assert name == ""
        assert error["error"]["code"] == "upstream_reset_midstream"
    elif path == MESSAGES:
        assert name == "error"
        assert error["type"] == "error"
        assert error["error"]["type"] == "api_error"
    else:
        assert name == "error"
        assert error["type"] == "error"
        assert error["code"] == "upstream_reset_midstream"
    assert b"[DONE]" not in body


@pytest.mark.parametrize("how", [way for way in WAYS if way != "half a chunk"])
async def test_behind_the_last_event_of_a_stream_nothing_is_said(how, start, http):
    bench = await start()
    client, worker, seen = await begun(bench, http)
    await worker.sends(http.chunk(b"data: [DONE]\n\n"))
    assert await client.chunk() == b"data: [DONE]\n\n"
    await break_off(worker, how)
    assert parse_events(seen + b"data: [DONE]\n\n" + await client.chunked_body())[-1] == ("", b"[DONE]")
    assert await client.sees_end() == b""
    assert bench.failures() == 1


async def test_a_break_right_after_the_head_is_told_in_the_stream(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD)
    await client.head()
    await worker.resets()
    ((_, data),) = parse_events(await client.chunked_body())
    assert orjson.loads(data)["error"]["code"] == "upstream_reset_midstream"
    assert await client.sees_end() == b""


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_break_inside_the_head_is_a_502_and_not_retried(start, http, how):
    bench = await start(workers=2)
    client = await bench.client()
    await client.sends(http.post())
    scripted, worker, _ = await bench.arrives()
    await worker.sends(b"HTTP/1.1 200 OK\r\ncontent-ty")
    await asyncio.sleep(0.01)  # on loopback: the bytes are there before the end is
    await break_off(worker, how)
    response = await client.receives()
    assert response.status == 502
    assert response.json["error"]["code"] == "upstream_reset"
    assert bench.failures(scripted) == 1
    assert sum(worker.connections for worker in bench.workers) == 1


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_fixed_length_answer_that_is_too_short_is_closed_short(start, http, how):
    bench = await start()
    async with bench.bystander():
        client = await bench.client()
        await client.sends(http.post())
        worker, _ = await bench.worker.receives()
        await worker.sends(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"a":')
        head = await client.head()
        assert head.get("content-length") == "100"
        assert await client.reader.readexactly(5) == b'{"a":'
        await break_off(worker, how)
        assert await client.sees_end() == b""
        assert bench.failures() == 1
    await bench.settles()
    assert bench.outcomes == {"completed": 1, "failed": 1}


async def test_nothing_is_added_to_a_stream_of_fixed_length(start, http):
    bench = await start()
    for version in (b"HTTP/1.1", b"HTTP/1.0"):
        client = await bench.client()
        await client.sends(http.post().replace(b"HTTP/1.1", version))
        worker, _ = await bench.worker.receives()
        await worker.sends(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 1000\r\n\r\ndata: 1\n\n"
        )
        await client.head()
        await client.reader.readexactly(9)
        await worker.closes()
        assert await client.sees_end() == b""


async def test_a_chunked_answer_that_is_no_stream_is_closed_without_its_last_chunk(start, http):
    bench = await start()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    client, worker, _ = await begun(bench, http, head=head, first=http.chunk(b'{"a":'))
    await worker.closes()
    assert await client.sees_end() == b""
    await bench.settles()
    assert bench.error_types == {"upstream_reset_midstream": 1}


async def test_nothing_readable_is_put_into_a_coded_stream(start, http):
    bench = await start()
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    client, worker, _ = await begun(bench, http, head=head, first=http.chunk(b"\x1f\x8b\x08"))
    await worker.closes()
    assert await client.sees_end() == b""


async def test_a_client_of_http_1_0_is_told_before_its_connection_ends(start, http):
    bench = await start()
    client, worker, seen = await begun(bench, http, version=b"HTTP/1.0")
    await worker.sends(http.chunk(b"data: {"))
    await worker.resets()
    body = seen + await client.sees_end()
    assert orjson.loads(parse_events(body)[-1][1])["error"]["code"] == "upstream_reset_midstream"


async def test_the_type_of_a_stream_may_be_written_in_capitals(start, http):
    bench = await start()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream\r\ntransfer-encoding: chunked\r\n\r\n"
    client, worker, seen = await begun(bench, http, head=head)
    await worker.closes()
    body = seen + await client.chunked_body()
    assert b"upstream_reset_midstream" in parse_events(body)[-1][1]


async def test_three_answers_that_break_off_eject_a_worker(start, http):
    bench = await start(health={"interval": 60})
    for _ in range(3):
        client, worker, _ = await begun(bench, http)
        await worker.closes()
        await client.chunked_body()
    await bench.settles()
    assert bench.fleet_worker(bench.worker).state.value == "ejected"
