"""Bad input to the admin listener, as raw bytes: refused, never an error of the gateway's, and nothing of it comes back."""

import asyncio

import pytest

from gateway.inspector.api import BODY

TOKEN = "0123456789abcdef-token"
CREDENTIALS = {
    "nothing": b"",
    "a wrong token": b"Authorization: Bearer EVIL\r\n",
    "another scheme": b"Authorization: Basic " + TOKEN.encode() + b"\r\n",
    "no scheme": b"Authorization: " + TOKEN.encode() + b"\r\n",
    "the scheme twice": b"Authorization: Bearer Bearer " + TOKEN.encode() + b"\r\n",
    "a token of 4 KiB": b"Authorization: Bearer " + b"E" * 4096 + b"\r\n",
    "bytes that are no text": b"Authorization: Bearer \xff\xfe\r\n",
    "SQL": b"Authorization: Bearer ' OR 1=1 --\r\n",
    "a cookie of its own making": b"Cookie: warmroute_admin=99999999999.EVIL\r\n",
    "a cookie that is no text": b"Cookie: warmroute_admin=99999999999.\xff\xfe\r\n",
    "a cookie without end": b"Cookie: warmroute_admin=" + b"9" * 4000 + b"\r\n",
}


async def asks(bench, http, fields, line=b"GET /api/fleet HTTP/1.1\r\n", body=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.admin_port)
    client = http.Peer(reader, writer)
    await client.sends(line + b"Host: localhost\r\nConnection: close\r\n" + fields + b"\r\n" + body)
    answer = await client.receives()
    await client.closes()
    return answer


@pytest.mark.parametrize("row", CREDENTIALS)
async def test_whoever_has_no_token_learns_nothing(start, http, caplog, row):
    bench = await start(admin={"host": "127.0.0.1", "port": 0, "token": TOKEN})
    answer = await asks(bench, http, CREDENTIALS[row])
    assert answer.status == 401
    assert b"EVIL" not in answer.body
    assert not caplog.records
    good = await asks(bench, http, b"Authorization: Bearer " + TOKEN.encode() + b"\r\n")
    assert good.status == 200


BODIES = {
    "no JSON": b"EVIL",
    "an array": b"[]",
    "nesting": b"[" * 100_000,
    "no body in it": b"{}",
    "a body that is none": b'{"body":1}',
    "a path that is none": b'{"body":{},"path":7}',
    "a path of a worker's administration": b'{"body":{},"path":"/pause"}',
    "headers that are none": b'{"body":{},"headers":[1]}',
    "a policy that is not there": b'{"body":{"model":"m"},"policies":["EVIL"]}',
}


@pytest.mark.parametrize("row", BODIES)
async def test_a_question_that_makes_no_sense_is_a_400(start, http, caplog, row):
    bench = await start()
    body = BODIES[row]
    fields = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    answer = await asks(bench, http, fields, b"POST /api/explain HTTP/1.1\r\n", body)
    assert answer.status == 400
    assert not caplog.records


async def test_a_question_that_is_too_long_is_refused(start, http):
    bench = await start()
    body = b" " * (BODY + 1)
    fields = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    answer = await asks(bench, http, fields, b"POST /api/explain HTTP/1.1\r\n", body)
    assert answer.status == 413
