"""Where a request begins and ends: bytes of which two parsers could think differently never reach a worker.

The tables follow the first 20 rows of the list of bad inputs that the design is checked against. Each row is sent whole and byte by
byte; `Bench.refuses` checks the rest: an error in OpenAI's shape, nothing forwarded, nothing echoed, the connection closed.
"""

import asyncio

import pytest

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
