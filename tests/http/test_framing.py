"""Where a request begins and ends: bytes of which two parsers could think differently never reach a worker.

The tables follow the first 20 rows of the list of bad inputs that the design is checked against. Each row is sent whole and byte by
byte; `Bench.refuses` checks the rest: an error in OpenAI's shape, nothing forwarded, nothing echoed, the connection closed.
"""

import asyncio

import pytest

from gateway.http.server import GatewayServer

BODY = b'{"model":"m"}'
LENGTH = b"Content-Length: 13\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
LINE_10 = b"POST /v1/chat/completions HTTP/1.0\r\n"
HOST = b"Host: gateway\r\n"


def request(fields=LENGTH, body=BODY, line=LINE, host=HOST):
    return line + host + fields + b"\r\n" + body


def chunked(body):
    return request(CHUNKED, body)


LENGTHS = {
    "both Content-Length and Transfer-Encoding": (request(LENGTH + CHUNKED, CHUNKS), 400),
    "both Transfer-Encoding and Content-Length": (request(CHUNKED + LENGTH, CHUNKS), 400),
    "two different Content-Lengths": (request(LENGTH + b"Content-Length: 5\r\n"), 400),
    "the same Content-Length twice": (request(LENGTH + LENGTH), 400),
    "a list of Content-Lengths": (request(b"Content-Length: 13, 13\r\n"), 400),
    "a Content-Length with plus": (request(b"Content-Length: +13\r\n"), 400),
    "a negative Content-Length": (request(b"Content-Length: -1\r\n"), 400),
    "a hexadecimal Content-Length": (request(b"Content-Length: 0xd\r\n"), 400),
    "a Content-Length with underscore": (request(b"Content-Length: 1_3\r\n"), 400),
    "a Content-Length with a blank inside": (request(b"Content-Length: 1 3\r\n"), 400),
    "a Content-Length in Arabic digits": (request("Content-Length: \u0661\u0663\r\n".encode()), 400),
    "an empty Content-Length": (request(b"Content-Length: \r\n"), 400),
    "a Content-Length that wraps 64 bits": (request(b"Content-Length: 18446744073709551629\r\n"), 400),
}
CODINGS = {
    "a coding that only ends like chunked": (request(b"Transfer-Encoding: xchunked\r\n", CHUNKS), 400),
    "a coding after chunked": (request(b"Transfer-Encoding: chunked, identity\r\n", CHUNKS), 400),
    "chunked twice": (request(b"Transfer-Encoding: chunked, chunked\r\n", CHUNKS), (400, 501)),
    "two Transfer-Encodings": (request(CHUNKED + CHUNKED, CHUNKS), 400),
    "identity": (request(b"Transfer-Encoding: identity\r\n"), 400),
    "identity and a Content-Length": (request(b"Transfer-Encoding: identity\r\n" + LENGTH), 400),
    # llhttp takes these three; nobody behind us would take the coding off (RFC 9112, section 6.1: 501).
    "gzip before chunked": (request(b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS), 501),
    "identity before chunked": (request(b"Transfer-Encoding: identity, chunked\r\n", CHUNKS), 501),
    "an empty element before chunked": (request(b"Transfer-Encoding: ,chunked\r\n", CHUNKS), 501),
    "an empty Transfer-Encoding": (request(b"Transfer-Encoding: \r\n" + LENGTH), 501),
    "chunked with a parameter": (request(b"Transfer-Encoding: chunked;x=1\r\n", CHUNKS), 400),
    "a vertical tab before chunked": (request(b"Transfer-Encoding: \x0bchunked\r\n", CHUNKS), 400),
    "a tab behind chunked": (request(b"Transfer-Encoding: chunked\t\r\n", CHUNKS), 400),
    "a blank before the colon": (request(b"Transfer-Encoding : chunked\r\n", CHUNKS), 400),
    "Transfer-Encoding in HTTP/1.0": (request(CHUNKED, CHUNKS, LINE_10), 400),
    "Transfer-Encoding and keep-alive in HTTP/1.0": (
        request(CHUNKED + b"Connection: keep-alive\r\n", CHUNKS, LINE_10),
        400,
    ),
}
HEADS = {
    "bare line feeds": (request().replace(b"\r\n", b"\n"), 400),
    "one bare line feed": (request(b"X-EVIL: y\n" + LENGTH), 400),
    "a bare carriage return in a value": (request(b"X-EVIL: a\rb\r\n" + LENGTH), 400),
    "a bare carriage return at the end of a line": (request(b"X-EVIL: a\r" + LENGTH), 400),
    "a folded line": (request(b"X-EVIL: a\r\n b\r\n" + LENGTH), 400),
    "a first field that begins with a blank": (request(host=b" Host: gateway\r\n"), 400),
    "NUL in a value": (request(b"X-EVIL: a\0b\r\n" + LENGTH), 400),
    "a control character in a value": (request(b"X-EVIL: a\x01b\r\n" + LENGTH), 400),
    "DEL in a value": (request(b"X-EVIL: a\x7fb\r\n" + LENGTH), 400),
    "NUL in a name": (request(b"X-EVIL\0: a\r\n" + LENGTH), 400),
    "a control character in a name": (request(b"X-EVIL\x01: a\r\n" + LENGTH), 400),
    "a blank in a name": (request(b"X EVIL: a\r\n" + LENGTH), 400),
    "an empty name": (request(b": EVIL\r\n" + LENGTH), 400),
    "a line without colon": (request(b"EVIL\r\n" + LENGTH), 400),
    "no Host": (request(host=b""), 400),
    "no Host in HTTP/1.0": (request(host=b"", line=LINE_10), 400),
    "an empty Host": (request(host=b"Host:\r\n"), 400),
    "two Hosts": (request(host=HOST + HOST), 400),
    "two different Hosts": (request(host=HOST + b"Host: EVIL\r\n"), 400),
    "a Host with path and query": (request(host=b"Host: a/EVIL?x#\r\n"), 400),
    "a Host with user": (request(host=b"Host: EVIL@gateway\r\n"), 400),
    "a Host with blank": (request(host=b"Host: a EVIL\r\n"), 400),
    "a Host with a port that is none": (request(host=b"Host: gateway:EVIL\r\n"), 400),
    "a method that does not exist": (request(line=b"EVIL /v1/chat/completions HTTP/1.1\r\n"), 400),
    "a method in small letters": (request(line=b"post /v1/chat/completions HTTP/1.1\r\n"), 400),
    "a tab in the request line": (request(line=b"POST\t/v1/chat/completions HTTP/1.1\r\n"), 400),
    "NUL in the target": (request(line=b"POST /v1/chat/completions?\0 HTTP/1.1\r\n"), 400),
    "a control character in the target": (request(line=b"POST /v1/chat/completions?\x01 HTTP/1.1\r\n"), 400),
    "bytes above ASCII in the target": (request(line=b"POST /v1/chat/completions?\xff HTTP/1.1\r\n"), 400),
    "an authority as target of a POST": (request(line=b"POST EVIL:80 HTTP/1.1\r\n"), 400),
    "HTTP/0.9 with version": (b"GET /v1/models HTTP/0.9\r\n" + HOST + b"\r\n", 505),
    "HTTP/1.2": (request(line=b"POST /v1/chat/completions HTTP/1.2\r\n"), 400),
    "HTTP/2.0 in a request line": (request(line=b"POST /v1/chat/completions HTTP/2.0\r\n"), 505),
    "HTTP/2.0 on a path of the gateway's own": (b"GET /v1/models HTTP/2.0\r\n" + HOST + b"\r\n", 505),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (bytes.fromhex("16030100f5010000f1030345564946"), 400),
    "200 fields": (request(b"".join(b"X-%d: EVIL\r\n" % n for n in range(200)) + LENGTH), 400),
    "a field of 9 KiB": (request(b"X-EVIL: %b\r\n" % (b"y" * 9216) + LENGTH), 431),
    "a name of 9 KiB": (request(b"X" * 9216 + b": EVIL\r\n" + LENGTH), 431),
    "a target of 9 KiB": (request(line=b"POST /v1/chat/completions?%b HTTP/1.1\r\n" % (b"E" * 9216)), 431),
    "fields of 64 KiB together": (
        request(b"".join(b"X-%d: %b\r\n" % (n, b"y" * 4096) for n in range(16)) + LENGTH),
        431,
    ),
    "a body in gzip": (request(LENGTH + b"Content-Encoding: gzip\r\n"), 415),
    "a body in brotli": (request(LENGTH + b"Content-Encoding: br\r\n"), 415),
    "an expectation that nobody knows": (request(LENGTH + b"Expect: EVIL\r\n"), 417),
    # aiohttp takes the key of an early draft of WebSocket for an attack.
    "the handshake of an early WebSocket": (request(LENGTH + b"Sec-WebSocket-Key1: EVIL\r\n"), 400),
}
CHUNK_ERRORS = {
    "a chunk size above 64 bits": (chunked(b"10000000000000000\r\n" + BODY), 400),
    "a negative chunk size": (chunked(b"-1\r\n" + BODY), 400),
    "a chunk size with plus": (chunked(b"+d\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a chunk size with 0x": (chunked(b"0xd\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "an empty chunk size": (chunked(b"\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a blank behind the chunk size": (chunked(b"d \r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a bare line feed behind the chunk size": (chunked(b"d\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a line feed in a chunk extension": (chunked(b"d;a\nEVIL\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a bare line feed behind a chunk": (chunked(b"d\r\n" + BODY + b"\n0\r\n\r\n"), 400),
    "a chunk that is longer than it says": (chunked(b"c\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
    "a Content-Length as trailer": (chunked(b"d\r\n" + BODY + b"\r\n0\r\nContent-Length: 3\r\n\r\n"), 400),
    "a Transfer-Encoding as trailer": (chunked(b"d\r\n" + BODY + b"\r\n0\r\nTransfer-Encoding: x\r\n\r\n"), 400),
}


@pytest.mark.parametrize("row", [*LENGTHS, *CODINGS, *CHUNK_ERRORS, *HEADS])
async def test_no_worker_hears_of_a_request_with(start, row):
    raw, expected = (LENGTHS | CODINGS | CHUNK_ERRORS | HEADS)[row]
    statuses = expected if isinstance(expected, tuple) else (expected,)
    bench = await start()
    await bench.refuses(raw, *statuses)
    await bench.refuses(raw, *statuses, bytewise=True)
    await bench.serves()


TAKEN = {
    "one chunk": chunked(CHUNKS),
    "chunked in other letters": request(b"Transfer-Encoding: chunKED\r\n", CHUNKS),
    "chunk sizes with leading zeros": chunked(b"0000d\r\n" + BODY + b"\r\n000\r\n\r\n"),
    "capital hex digits": chunked(b"D\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunks of one byte": chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"),
    "chunk extensions": chunked(b'd;name=value;other="quoted"\r\n' + BODY + b"\r\n0;last\r\n\r\n"),
    "trailers": chunked(b"d\r\n" + BODY + b"\r\n0\r\nAuthorization: EVIL\r\nX-Trailer: EVIL\r\n\r\n"),
    "a Content-Length with leading zeros": request(b"Content-Length: 0013\r\n"),
    "blanks around the Content-Length": request(b"Content-Length: \t 13 \t\r\n"),
    "empty lines before it": b"\r\n\r\n" + request(),
    "bytes above ASCII in a value": request(LENGTH + b"X-Name: J\xf6rg \xe2\x82\xac\r\n"),
    "an absolute target": request(line=b"POST http://evil/v1/chat/completions HTTP/1.1\r\n"),
    "an absolute target in capitals": request(line=b"POST HTTPS://evil:1/v1/chat/completions HTTP/1.1\r\n"),
    "a Host with port": request(host=b"Host: gateway:8080\r\n"),
    "an IPv6 Host": request(host=b"Host: [::1]:8080\r\n"),
    "identity as content coding": request(LENGTH + b"Content-Encoding: identity\r\n"),
}


@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("row", TAKEN)
async def test_the_worker_gets_a_plain_request_from_one_with(start, http, row, bytewise):
    bench = await start()
    client = await bench.client()
    raw = TAKEN[row]
    for piece in [raw[i : i + 1] for i in range(len(raw))] if bytewise else [raw]:
        await client.sends(piece)
        await asyncio.sleep(0)
    worker, got = await bench.worker.receives()
    assert got.start == "POST /v1/chat/completions HTTP/1.1"
    assert got.all("content-length") == ["13"]
    assert got.all("host") == [f"127.0.0.1:{bench.worker.port}"]
    assert got.body == BODY
    assert not {"transfer-encoding", "trailer", "x-trailer", "authorization"} & {name.lower() for name, _ in got.fields}
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200
    # The end of the request was found: the connection carries another one.
    await client.sends(http.post())
    await worker.receives()
    await worker.sends(http.answer(b"[2]"))
    assert (await client.receives()).body == b"[2]"


METHODS = {
    "GET": (b"GET /v1/chat/completions HTTP/1.1\r\n", 405, "POST"),
    "OPTIONS": (b"OPTIONS /v1/chat/completions HTTP/1.1\r\n", 405, "POST"),
    "TRACE": (b"TRACE /v1/chat/completions HTTP/1.1\r\n", 405, "POST"),
    "PUT": (b"PUT /invocations HTTP/1.1\r\n", 405, "POST"),
    "DELETE": (b"DELETE /v1/models/m HTTP/1.1\r\n", 405, "GET"),
    "POST to the models": (b"POST /v1/models HTTP/1.1\r\n", 405, "GET"),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\n", 404, None),
}


@pytest.mark.parametrize("name", METHODS)
async def test_other_methods_get_405_with_allow_and_the_connection_goes_on(start, name):
    line, status, allowed = METHODS[name]
    bench = await start()
    refusal = await bench.refuses(request(b"", b"", line), status, closes=False)
    assert refusal.get("allow") == allowed


async def test_a_head_request_is_refused_without_a_body(start):
    bench = await start()
    client = await bench.client()
    await client.sends(request(b"", b"", b"HEAD /v1/chat/completions HTTP/1.1\r\n"))
    refusal = await client.head()
    assert refusal.status == 405
    assert int(refusal.get("content-length") or 0) > 0
    await client.sends(request(b"", b"", b"HEAD /nowhere HTTP/1.1\r\n"))
    # A body of the first answer would stand before this one.
    assert (await client.head()).start == "HTTP/1.1 404 Not Found"


@pytest.mark.parametrize("target", ["evil:443", "/v1/chat/completions"])
async def test_connect_is_no_tunnel(start, target):
    bench = await start()
    await bench.refuses(request(b"", b"", b"CONNECT %b HTTP/1.1\r\n" % target.encode()), 400, 405)
    await bench.serves()


async def test_a_tunnel_that_was_refused_carries_nothing(start):
    bench = await start()
    client = await bench.client()
    await client.sends(request(b"", b"", b"CONNECT evil:443 HTTP/1.1\r\n") + request())
    assert (await client.receives()).status == 405
    assert await client.sees_end() == b""
    assert bench.worker.connections == 0


UPGRADES = {
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n",
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "tcp": b"Connection: upgrade\r\nUpgrade: tcp\r\n",
}


@pytest.mark.parametrize("name", UPGRADES)
async def test_an_upgrade_is_answered_as_plain_http_and_what_follows_is_dropped(start, http, name):
    bench = await start()
    client = await bench.client()
    await client.sends(request(UPGRADES[name] + LENGTH) + b"\x81\x05EVIL!")
    worker, got = await bench.worker.receives()
    assert not {"upgrade", "connection", "http2-settings"} & {field.lower() for field, _ in got.fields}
    await worker.sends(http.answer())
    response = await client.receives()
    assert response.status == 200
    assert response.get("connection") == "close"
    assert b"HTTP/1.1 101" not in await client.sees_end()
    assert bench.worker.connections == 1


async def test_http_1_0_is_answered_and_closed(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(request(line=LINE_10))
    worker, got = await bench.worker.receives()
    assert got.start.endswith("HTTP/1.1")
    await worker.sends(http.answer())
    assert (await client.receives()).get("connection") == "close"
    assert await client.sees_end() == b""


async def test_http_1_0_with_keep_alive_carries_another_request(start, http):
    bench = await start()
    client = await bench.client()
    worker = None
    for _ in range(2):
        await client.sends(request(LENGTH + b"Connection: keep-alive\r\n", line=LINE_10))
        if worker is None:
            worker = await bench.worker.accepts()
        await worker.receives()
        await worker.sends(http.answer())
        assert (await client.receives()).get("connection") == "keep-alive"


async def test_http_1_0_gets_a_stream_without_chunks_that_ends_with_the_connection(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(request(LENGTH + b"Connection: keep-alive\r\n", line=LINE_10))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n") + http.chunk(b"data: 2\n\n") + b"0\r\n\r\n")
    response = await client.receives()
    assert response.get("transfer-encoding") is None
    assert response.get("connection") == "close"
    assert response.body == b"data: 1\n\ndata: 2\n\n"


async def test_continue_is_said_before_the_body_is_sent_and_is_not_passed_on(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(request(LENGTH + b"Expect: 100-Continue\r\n", b""))
    assert (await client.receives()).start == "HTTP/1.1 100 Continue"
    await client.sends(BODY)
    worker, got = await bench.worker.receives()
    assert got.get("expect") is None
    assert got.body == BODY
    await worker.sends(http.answer())
    assert (await client.receives()).status == 200


async def test_no_continue_is_said_to_http_1_0(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(request(LENGTH + b"Expect: 100-continue\r\n", b"", LINE_10))
    await asyncio.sleep(0.05)  # room for the 100 that must not come
    await client.sends(BODY)
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer())
    assert (await client.receives()).start == "HTTP/1.1 200 OK"


EXPECTED_TO_FAIL = {
    "a body that is too long": (LINE, b"Content-Length: 999999999999\r\n", 413),
    "a path that does not exist": (b"POST /pause HTTP/1.1\r\n", LENGTH, 404),
    "a method that is not allowed": (b"PUT /v1/chat/completions HTTP/1.1\r\n", LENGTH, 405),
}


@pytest.mark.parametrize("name", EXPECTED_TO_FAIL)
async def test_a_refusal_takes_the_place_of_continue_for(start, name):
    line, fields, status = EXPECTED_TO_FAIL[name]
    bench = await start()
    await bench.refuses(request(fields + b"Expect: 100-continue\r\n", b"", line), status)


async def test_a_ping_that_expects_continue_is_answered_without_its_body(start):
    bench = await start()
    client = await bench.client()
    await client.sends(request(LENGTH + b"Expect: 100-continue\r\n", b"", b"POST /ping HTTP/1.1\r\n"))
    response = await client.receives()
    assert response.status == 200
    assert response.get("connection") == "close"
    assert await client.sees_end() == b""


async def test_pipelined_requests_are_answered_in_their_order(start, http):
    """100 requests are more than the parser takes at once (32): the rest waits in the socket."""
    bench = await start()
    client = await bench.client()
    await client.sends(b"".join(http.post(b'{"model":"m","n":%d}' % n) for n in range(100)))
    worker = await bench.worker.accepts()
    for number in range(100):
        assert (await worker.receives()).json["n"] == number
        await worker.sends(http.answer(b"%d" % number))
    assert [(await client.receives()).body for _ in range(100)] == [b"%d" % n for n in range(100)]
    await bench.settles()
    assert bench.outcomes == {"completed": 100}


async def test_each_pipelined_request_gets_its_own_kind_of_answer(start, http):
    bench = await start()
    client = await bench.client()
    get = b"GET %b HTTP/1.1\r\nHost: g\r\n\r\n"
    await client.sends(get % b"/v1/models" + http.post() + get % b"/nowhere" + http.post(b"[") + get % b"/ping")
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"1"))
    assert [(await client.receives()).status for _ in range(5)] == [200, 200, 404, 400, 200]


async def test_garbage_behind_a_request_under_way_is_refused_after_its_answer(start, http):
    """Behind a request in the same segment it takes that request with it: nothing of such a client is to be trusted."""
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await client.sends(b"EVIL\x00\r\n\r\n")
    await worker.sends(http.answer(b"1"))
    assert (await client.receives()).body == b"1"
    assert (await client.receives()).status == 400
    assert await client.sees_end() == b""
    await bench.refuses(http.post() + b"EVIL\x00\r\n\r\n", 400)


SMUGGLED = b"GET /pause HTTP/1.1\r\nHost: evil\r\n\r\n"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\n", 200),
        (b"HEAD /v1/models HTTP/1.1\r\n", 200),
        (b"GET /nowhere HTTP/1.1\r\n", 404),
        (b"DELETE /v1/chat/completions HTTP/1.1\r\n", 405),
    ],
)
@pytest.mark.parametrize("when", ["with it", "after it"])
async def test_a_body_that_nobody_asked_for_is_never_the_next_request(start, line, status, when):
    bench = await start()
    client = await bench.client()
    head = request(b"Content-Length: %d\r\n" % len(SMUGGLED), b"", line)
    following = b"GET /ping HTTP/1.1\r\nHost: g\r\n\r\n"
    if when == "with it":
        await client.sends(head + SMUGGLED + following)
    else:
        await client.sends(head)
        await asyncio.sleep(0.02)  # the head is read by now
        await client.sends(SMUGGLED + following)
    assert (await client.head()).status == status
    carries_on = when == "with it" or status < 400
    rest = await (client.reader.readuntil(b"{}") if carries_on else client.sees_end())
    # Then comes the answer to the request that really follows, or nothing.
    assert rest.count(b"HTTP/1.1 ") == rest.count(b"HTTP/1.1 200 OK") == carries_on
    assert bench.gateway.metrics.refusals.get("unknown_path", 0) == (b"nowhere" in line)


async def test_an_upload_that_breaks_off_never_reaches_a_worker(start):
    bench = await start()
    for raw in (request(body=BODY[:-1]), chunked(CHUNKS[:-2]), request(b"Content-Length: 1000000\r\n", b"{" * 500_000)):
        client = await bench.client()
        await client.sends(raw)
        await client.closes()
    await bench.settles()
    for _ in range(200):
        if bench.outcomes.get("client_gone") == 3:
            break
        await asyncio.sleep(0.01)
    assert bench.outcomes == {"client_gone": 3}
    assert bench.worker.connections == 0
    await bench.serves()


async def test_a_client_that_half_closes_has_left(start, http):
    """A FIN is all that a client that gives up sends: the answer is not waited for, as documented in docs/threat-model.md."""
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    client.writer.write_eof()
    assert await worker.sees_end() == b""
    await bench.settles()
    assert bench.outcomes == {"client_gone": 1}


async def test_a_server_whose_aiohttp_has_no_c_parser_does_not_start(monkeypatch):
    """The Python parser takes other requests: all of the above would have to be proven again."""
    from aiohttp.http_parser import HttpRequestParserPy

    monkeypatch.setattr("gateway.http.server.HttpRequestParser", HttpRequestParserPy)
    with pytest.raises(RuntimeError, match="C parser"):
        GatewayServer(
            lambda _: None, on_refused=print, max_connections=1, keep_alive=1, loop=asyncio.get_running_loop()
        )
