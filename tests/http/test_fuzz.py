"""Byte soups against a live listener: each ends in an error of the gateway's or in a correct relay; none hangs, none raises.

Hypothesis makes whole sessions (valid requests, bent at random places); they are run in batches against one gateway, because a
gateway per example would cost more than the examples do.
"""

import asyncio
import contextlib
import logging

import httptools
import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
SEEDS = [
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(BODY), BODY),
    b"POST /v1/completions?x=1 HTTP/1.0\r\nHost: g\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: g\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: %d\r\n\r\n%b"
    % (len(FORM), FORM),
    b"GET /v1/models/m HTTP/1.1\r\nHost: g\r\n\r\n",
    b"HEAD /ping HTTP/1.1\r\nHost: g\r\nConnection: close, x-a\r\nX-A: 1\r\n\r\n",
    b"GET http://g/v1/models HTTP/1.1\r\nHost: g\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
]
BITS = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b":",
        b",",
        b";",
        b"0",
        b"-1",
        b"ffffffffffffffff",
        b"\xff",
        b"%00",
        b"\r\n\r\n",
        b"//",
        b"[",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Host: h\r\n",
        b"Expect: 100-continue\r\n",
        b"HTTP/2.0",
        b"CONNECT ",
        b"0\r\n\r\n",
    ),
]


@st.composite
def bent(draw):
    """One valid request with up to four random changes."""
    data = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 6))
        data = (
            data[:place]
            + draw(st.one_of(st.sampled_from(BITS), st.binary(max_size=4), st.just(b"")))
            + data[place + length :]
        )
    return data


sessions = st.tuples(st.lists(bent(), min_size=1, max_size=3), st.integers(1, 60))


def made(count):
    """`count` sessions."""
    found = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(sessions)
    def collect(session):
        found.append(session)

    collect()
    return found


class Answers:
    """The answers in a byte stream, read by a strict parser; raises on anything that is none."""

    def __init__(self, data):
        self.bodies = []
        self.statuses = []
        while data:
            self._done = False
            self._body = b""
            parser = httptools.HttpResponseParser(self)
            end = data.index(b"\r\n\r\n") + 4
            parser.feed_data(data[:end])
            status = parser.get_status_code()
            length = next(
                (int(line[15:]) for line in data[:end].lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            self.statuses.append(status)
            body = data[end : end + length]
            if data[end:].startswith(b"HTTP/1.1 ") or (status != 100 and len(body) < length):
                length, body = 0, b""  # the answer to a HEAD
            self.bodies.append(body)
            data = data[end + length :]


@pytest.mark.parametrize("batch", range(4))
async def test_any_bytes_get_an_error_or_a_correct_relay_and_never_a_hang(start, http, caplog, batch):
    bench = await start(limits={"header_read": 0.5, "keep_alive": 0.5, "body_rate": 0}, timeouts={"first_byte": 5})
    caplog.set_level(logging.WARNING)
    bad = []

    async def answering():
        while True:
            peer = await bench.worker.accepts()
            serving.add(asyncio.get_running_loop().create_task(serve(peer)))

    async def serve(peer):
        """Answer each request with what arrived; only what a strict reader understands may arrive."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                got = await peer.receives()
                if (
                    not got.start.startswith("POST /")
                    or not got.start.endswith(" HTTP/1.1")
                    or got.get("transfer-encoding")
                ):
                    bad.append(got)
                await peer.sends(http.answer(orjson.dumps({"length": len(got.body)})))

    async def session(pieces, cut):
        """Send it in segments of `cut` bytes, then leave when nothing more comes."""
        client = await bench.client()
        data = b"".join(pieces)
        with contextlib.suppress(ConnectionError):
            for index in range(0, len(data), cut):
                await client.sends(data[index : index + cut])
        received = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1.5):
                while piece := await client.reader.read(65_536):
                    received += piece
        client.writer.transport.abort()
        return data, received

    serving = set()
    serving.add(asyncio.get_running_loop().create_task(answering()))
    try:
        with capture_logs() as logs:
            async with asyncio.timeout(25):
                results = await asyncio.gather(*(session(*each) for each in made(150)))
                await bench.settles()
                # Whatever that has done to the pooled connections: a good request on them is answered.
                client = await bench.client()
                await client.sends(SEEDS[0])
                assert (await client.receives()).json == {"length": len(BODY)}
    finally:
        for task in serving:
            task.cancel()
    for data, received in results:
        answers = Answers(received)
        assert set(answers.statuses) <= {100, 200, 400, 404, 405, 408, 413, 415, 417, 431, 501, 503, 505}, data
        for status, body in zip(answers.statuses, answers.bodies, strict=True):
            if status >= 400 and body:
                assert orjson.loads(body)["error"]["message"], data
    assert not bad
    assert not [
        line for line in logs if line["log_level"] in {"error", "critical"} or "exception" in line or "exc_info" in line
    ]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
