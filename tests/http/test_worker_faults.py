"""Workers that answer badly: nothing of it harms the client's framing, the next request, or anybody else."""

import asyncio
import contextlib

import pytest

OK = b"HTTP/1.1 200 OK\r\n"
BODY = b"content-length: 2\r\n\r\nok"
ILL_FORMED = {
    "length and chunks": OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks and length": OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "length twice": OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\nok",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 20\r\n\r\nok",
    "list of lengths": OK + b"content-length: 2, 2\r\n\r\nok",
    "signed length": OK + b"content-length: +2\r\n\r\nok",
    "endless length": OK + b"content-length: 99999999999999999999999\r\n\r\nok",
    "unknown coding": OK + b"transfer-encoding: gzip\r\n\r\nok",
    "coding before chunks": OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks twice": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "blank before colon": OK + b"transfer-encoding : chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "NUL in a value": OK + b"x-a: a\0b\r\n" + BODY,
    "escape in a value": OK + b"x-a: a\x1b[31mb\r\n" + BODY,
    "CR in a value": OK + b"x-a: a\rset-cookie: b\r\n" + BODY,
    "bare LF": OK + b"x-a: a\nx-b: b\r\n" + BODY,
    "folded line": OK + b"x-a: a\r\n b\r\n" + BODY,
    "nameless field": OK + b": a\r\n" + BODY,
    "control byte in a name": OK + b"x\x01: a\r\n" + BODY,
    "control byte in the reason": b"HTTP/1.1 200 O\x1b[31mK\r\n" + BODY,
    "status below 100": b"HTTP/1.1 099 Odd\r\n" + BODY,
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "TLS alert": b"\x15\x03\x01\x00\x02\x02\x50",
    "switching protocols": b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    "interim with a body": b"HTTP/1.1 103 Hints\r\ncontent-length: 5\r\n\r\nhello" + OK + BODY,
    "flood of interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    "huge head": OK + b"".join(b"x-%d: %b\r\n" % (n, b"v" * 8000) for n in range(17)) + BODY,
    "endless field": OK + b"x-a: " + b"v" * 150_000,
}


@pytest.mark.parametrize("raw", ILL_FORMED.values(), ids=ILL_FORMED)
async def test_an_ill_formed_answer_becomes_a_502_and_its_connection_is_closed(start, http, raw):
    bench = await start()
    async with bench.bystander():
        client = await bench.client()
        await client.sends(http.post())
        worker, _ = await bench.worker.receives()
        await worker.sends(raw)
        response = await client.receives()
        assert response.status == 502
        assert response.get("content-type") == "application/json"
        assert response.json["error"]["code"] == "upstream_protocol"
        assert not response.get("set-cookie")
        assert await worker.sees_end() == b""
        assert bench.failures() == 1
        # The client's own connection is none the worse for it.
        await client.sends(http.post())
        worker, _ = await bench.worker.receives()
        await worker.sends(http.answer(b"[]"))
        assert (await client.receives()).body == b"[]"
    await bench.settles()
    assert bench.outcomes == {"completed": 2, "failed": 1}
    assert bench.error_types == {"upstream_protocol": 1}


@pytest.mark.parametrize("raw", ["huge head", "flood of interim answers"])
async def test_a_head_without_end_is_given_up_although_it_comes_in_pieces(start, http, raw):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    data = ILL_FORMED[raw]
    with contextlib.suppress(ConnectionError):  # the gateway hangs up before it has seen all of it
        for index in range(0, len(data), 5000):
            await worker.sends(data[index : index + 5000])
            await asyncio.sleep(0)
    assert (await client.receives()).status == 502


async def test_interim_answers_are_swallowed_with_their_fields(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\nconnection: content-type\r\n\r\n"
    await worker.sends(b"HTTP/1.1 100 Continue\r\n\r\n" + hints)
    await worker.sends(http.answer(b"[1]"))
    response = await client.receives()
    assert (response.status, response.body, response.get("link")) == (200, b"[1]", None)
    # What the interim answer's Connection field named was the interim answer's own.
    assert response.get("content-type") == "application/json"


@pytest.mark.parametrize("extra", [b"", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n"])
@pytest.mark.parametrize("status", [204, 304])
async def test_bytes_behind_an_answer_without_a_body_reach_nobody(start, http, status, extra):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(b"HTTP/1.1 %d Nothing\r\n%b\r\n5\r\nhello\r\n0\r\n\r\n" % (status, extra))
    response = await client.receives()
    assert response.status == status
    assert response.get("transfer-encoding") is None
    assert response.get("content-length") is None
    assert await worker.sees_end() == b""
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"[]"))
    assert (await client.receives()).body == b"[]"


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_keeps_both_connections(start, http, status):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(b"HTTP/1.1 %d Nothing\r\n\r\n" % status)
    assert (await client.receives()).status == status
    await client.sends(http.post())
    await worker.receives()
    await worker.sends(b"HTTP/1.1 %d Nothing\r\n\r\n" % status)
    assert (await client.receives()).status == status
    assert bench.worker.connections == 1


async def test_an_empty_body_is_an_answer(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b""))
    response = await client.receives()
    assert (response.status, response.get("content-length")) == (200, "0")
    await client.sends(http.post())
    await worker.receives()
    await worker.sends(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
    assert (await client.receives()).body == b""


async def test_a_redirect_is_relayed_and_not_followed(start, http):
    bench = await start(workers=2)
    elsewhere = bench.workers[1]
    client = await bench.client()
    await client.sends(http.post())
    scripted, worker, _ = await bench.arrives()
    elsewhere = next(other for other in bench.workers if other is not scripted)
    location = f"location: {elsewhere.url}/admin\r\n".encode()
    await worker.sends(http.answer(b"", status="307 Temporary Redirect", fields=location))
    response = await client.receives()
    assert response.status == 307
    assert response.get("location") == f"{elsewhere.url}/admin"
    await bench.settles()
    assert elsewhere.connections == 0
    assert bench.failures(scripted) == 0


async def test_fields_that_are_the_workers_own_business_stay_behind(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post(fields="x-request-id: mine\r\n"))
    worker, _ = await bench.worker.receives()
    fields = (
        b"server: uvicorn\r\nset-cookie: a=b\r\nconnection: keep-alive, x-secret\r\nx-secret: 1\r\nkeep-alive: timeout=5\r\n"
        b"x-request-id: theirs\r\nx-warmroute-worker: evil\r\nproxy-authenticate: basic\r\nalt-svc: h3\r\n"
        b"x-kept: yes\r\nx-kept: twice\r\n"
    )
    await worker.sends(http.answer(fields=fields))
    response = await client.receives()
    for name in ("server", "set-cookie", "connection", "x-secret", "keep-alive", "proxy-authenticate", "alt-svc"):
        assert response.get(name) is None, name
    assert response.all("x-request-id") == ["mine"]
    assert response.all("x-warmroute-worker") == [f"127.0.0.1:{bench.worker.port}"]
    assert response.all("x-kept") == ["yes", "twice"]


@pytest.mark.parametrize(
    "behind", [b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nSTOLEN", b"garbage", b"\x00" * 10, b"HTTP/1.1 2"]
)
async def test_what_comes_behind_an_answer_never_reaches_the_next_client(start, http, behind):
    bench = await start()
    first, second = await bench.client(), await bench.client()
    await first.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"[1]") + behind)
    assert (await first.receives()).body == b"[1]"
    assert await worker.sees_end() == b""
    await second.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"[2]"))
    assert (await second.receives()).body == b"[2]"
    assert bench.failures() == 0


async def test_bytes_on_an_idle_connection_end_it(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"[1]"))
    await client.receives()
    await worker.sends(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nSTOLEN")
    assert await worker.sees_end() == b""
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(http.answer(b"[2]"))
    assert (await client.receives()).body == b"[2]"


async def test_an_answer_before_the_request_was_sent_is_relayed_and_the_connection_dropped(start, http):
    bench = await start()
    client = await bench.client()
    sending = asyncio.ensure_future(client.sends(http.post(b'{"model":"m","x":"%b"}' % (b"x" * 20_000_000))))  # noqa: TID251
    worker = await bench.worker.accepts()
    await worker.head()
    worker.reader._transport.pause_reading()
    await worker.sends(http.answer(b'{"error":{"message":"too long"}}', status="413 Content Too Large"))
    response = await client.receives()
    await sending
    assert response.status == 413
    assert response.json["error"]["message"] == "too long"
    await bench.settles()
    assert bench.gateway._pool.counts() == {}
    assert bench.failures() == 0


@pytest.mark.parametrize(
    "raw",
    [b"HTTP/1.1 200 OK\r\nconnection: close\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: Close\r\n"],
)
async def test_a_connection_that_the_worker_will_close_is_not_kept(start, http, raw):
    bench = await start()
    client = await bench.client()
    for number in range(2):
        await client.sends(http.post())
        worker, _ = await bench.worker.receives()
        await worker.sends(raw + b"content-length: 2\r\n\r\nok")
        response = await client.receives()
        # The worker's wish is not the client's.
        assert (response.body, response.get("connection")) == (b"ok", None)
        assert await worker.sees_end() == b""
        assert bench.worker.connections == number + 1


@pytest.mark.parametrize("content", [b"application/json", b"text/event-stream"])
async def test_a_body_that_ends_with_its_connection_is_whole(start, http, content):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n" % content)
    head = await client.head()
    assert head.get("transfer-encoding") == "chunked"
    await worker.sends(b"data: 1\n\n")
    assert await client.chunk() == b"data: 1\n\n"
    await worker.sends(b"data: [DONE]\n\n")
    assert await client.chunk() == b"data: [DONE]\n\n"
    await worker.closes()
    assert await client.chunk() == b""
    await bench.settles()
    assert bench.outcomes == {"completed": 1}
    assert bench.failures() == 0


async def test_a_client_of_http_1_0_gets_a_body_that_ends_with_its_connection(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post().replace(b"HTTP/1.1", b"HTTP/1.0"))
    worker, _ = await bench.worker.receives()
    await worker.sends(http.SSE_HEAD + http.chunk(b"data: 1\n\n") + http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    response = await client.receives()
    assert response.get("transfer-encoding") is None
    assert response.get("connection") == "close"
    assert response.body == b"data: 1\n\ndata: [DONE]\n\n"


async def test_a_coded_answer_is_relayed_as_it_is(start, http):
    import gzip

    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    packed = gzip.compress(b'{"ok":true}')
    await worker.sends(http.answer(packed, fields=b"content-encoding: gzip\r\n"))
    response = await client.receives()
    assert response.get("content-encoding") == "gzip"
    assert response.body == packed


async def test_chunk_extensions_and_trailers_stay_behind(start, http):
    bench = await start()
    client = await bench.client()
    await client.sends(http.post())
    worker, _ = await bench.worker.receives()
    await worker.sends(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n"
        b"2;name=value\r\nok\r\n0\r\nx-t: 1\r\nset-cookie: a=b\r\n\r\n"
    )
    head = await client.head()
    assert head.get("trailer") is None
    assert await client.reader.readexactly(12) == b"2\r\nok\r\n0\r\n\r\n"
    await client.sends(http.post())
    await worker.receives()
    await worker.sends(http.answer(b"[]"))
    assert (await client.receives()).body == b"[]"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500, 501, 504])
async def test_an_error_of_the_worker_is_relayed_as_it_came(start, http, status):
    bench = await start(workers=2, retries={"retry_after_max": 0})  # else another is asked after 429
    client = await bench.client()
    await client.sends(http.post())
    scripted, worker, _ = await bench.arrives()
    body = b'{"object":"error","message":"the prompt is longer than 4096 tokens"}'
    await worker.sends(http.answer(body, status=f"{status} Oh", fields=b"retry-after: 7\r\n"))
    response = await client.receives()
    assert (response.status, response.body, response.get("retry-after")) == (status, body, "7")
    await bench.settles()
    assert bench.failures(scripted) == (1 if status in {500, 504} else 0)
    assert bench.outcomes == ({"completed": 1} if status < 500 else {"failed": 1})
    assert bench.attempts == ({None: 1} if status < 500 else {str(status): 1})
