"""However a worker's bytes are cut into reads and chunks, the client gets the same body, and its own framing is right.

Here the upstream protocol and the relay stand alone between two transports that only collect: thousands of cuts in a second.
"""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.http.relay import Exchange
from gateway.http.routes import Dialect
from gateway.http.upstream import UpstreamConnection


class Transport:
    """Collects what is written."""

    def __init__(self):
        self.written = b""
        self.aborted = False
        self.reading = True

    def write(self, data):
        self.written += data

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True


class Client:
    """A client that keeps up."""

    def __init__(self):
        self.transport = Transport()
        self.writing_paused = False


class Lease:
    """Is told of the first byte."""

    def first_byte(self, now):
        pass


class Pool:
    """Counts the connections that come back."""

    def __init__(self):
        self.released = 0

    def release(self, connection):
        assert connection.exchange is None
        self.released += 1


class Relay:
    """One exchange after the other over the same upstream connection."""

    def __init__(self, loop):
        self.loop = loop
        self.pool = Pool()
        self.upstream = Transport()
        self.connection = UpstreamConnection(None, lambda connection: None)
        self.connection.connection_made(self.upstream)

    def exchange(self, client, *, http10=False):
        """A request that has been sent."""
        exchange = Exchange(
            client,
            self.pool,
            loop=self.loop,
            dialect=Dialect.OPENAI,
            own_lines=b"x-own: 1\r\n",
            http10=http10,
            keep_alive=True,
            retry_statuses=(),
            pass_on=bool,
            lease=Lease(),
        )
        exchange.prepare(self.connection, b"", b"")
        exchange.start()
        return exchange

    def answered(self, reads, *, http10=False, eof=False):
        """What the client gets when the worker's bytes come as `reads`: its bytes, and the exchange."""
        client = Client()
        exchange = self.exchange(client, http10=http10)
        for read in reads:
            self.connection.data_received(read)
        if eof:
            self.connection.connection_lost(None)
        return client.transport.written, exchange


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def dechunked(body):
    """The content of a chunked body; fails on anything but exact framing up to and with the last chunk."""
    content = b""
    while True:
        size, found, body = body.partition(b"\r\n")
        assert found
        length = int(size, 16)
        assert b"%x" % length == size
        assert body[length : length + 2] == b"\r\n"
        content += body[:length]
        body = body[length + 2 :]
        if length == 0:
            assert body == b""
            return content


def split(data, cuts):
    """`data` cut at the given places; the pieces are not empty."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


# What a stream of tokens looks like, with everything that could be mistaken for framing.
EVENTS = st.lists(
    st.sampled_from(
        [
            b'data: {"n":1}\n\n',
            b'data: {"n":1}\r\n\r\n',
            b"data: a\ndata: b\n\n",
            b": comment\n\n",
            b": ping\r\n",
            b"event: x\ndata: y\n\n",
            b"\r\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            b"data: [DONE]\n\n",
            b"data: " + b"x" * 5000 + b"\n\n",
            b"\x00\xff\r",
            b"\n",
            b"a",
        ]
    ),
    max_size=12,
).map(b"".join)
CUTS = st.lists(st.integers(0, 20_000), max_size=60)
CHUNK = (
    lambda d: b"%x\r\n%b\r\n" % (len(d), d),
    lambda d: b"%X\r\n%b\r\n" % (len(d), d),
    lambda d: b"0%x;a=b\r\n%b\r\n" % (len(d), d),
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@settings(max_examples=150, deadline=None)
@given(content=EVENTS, chunking=CUTS, reading=CUTS, style=st.sampled_from(CHUNK), after=CUTS)
def test_a_chunked_body_arrives_the_same_however_it_is_cut(loop, content, chunking, reading, style, after):
    relay = Relay(loop)
    raw = HEAD + b"".join(style(piece) for piece in split(content, chunking)) + b"0\r\n\r\n"
    written, exchange = relay.answered(split(raw, reading))
    head, _, body = written.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert dechunked(body) == content
    assert exchange.bytes_out == len(written)
    assert exchange.done.done()
    # The parser has seen a clean end: the next answer on this connection is understood as well.
    assert relay.pool.released == 1
    written, _ = relay.answered(split(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", after))
    assert written.endswith(b"\r\n\r\nok")
    assert relay.pool.released == 2


@settings(max_examples=100, deadline=None)
@given(content=EVENTS, reading=CUTS, http10=st.booleans())
def test_a_fixed_length_body_arrives_the_same_however_it_is_cut(loop, content, reading, http10):
    relay = Relay(loop)
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
    written, _ = relay.answered(split(raw, reading), http10=http10)
    head, _, body = written.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(content) in head
    assert body == content
    assert relay.pool.released == 1


@settings(max_examples=100, deadline=None)
@given(content=EVENTS, reading=CUTS, http10=st.booleans())
def test_a_body_that_ends_with_its_connection_arrives_the_same_however_it_is_cut(loop, content, reading, http10):
    relay = Relay(loop)
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + content
    written, _ = relay.answered(split(raw, reading), http10=http10, eof=True)
    _, _, body = written.partition(b"\r\n\r\n")
    assert (body if http10 else dechunked(body)) == content
    assert relay.pool.released == 0


@settings(max_examples=150, deadline=None)
@given(content=EVENTS, chunking=CUTS, reading=CUTS, end=st.integers(0, 10_000))
def test_a_stream_that_stops_anywhere_is_a_prefix_and_unless_it_was_done_an_error_event(
    loop, content, chunking, reading, end
):
    relay = Relay(loop)
    raw = HEAD + b"".join(CHUNK[0](piece) for piece in split(content, chunking)) + b"0\r\n\r\n"
    raw = raw[: len(HEAD) + end % (len(raw) - len(HEAD))]
    written, exchange = relay.answered(split(raw, reading), eof=True)
    assert isinstance(exchange.done.exception(), GatewayError)
    _, _, body = written.partition(b"\r\n\r\n")
    told = dechunked(body)
    assert not exchange.keep_alive
    prefix, found, error = told.rpartition(b'data: {"error":')
    if not found:  # nothing is said behind the last event
        assert told.rstrip().endswith(b"data: [DONE]")
        assert content.startswith(told)
        return
    assert error.endswith(b"}}\n\n")
    # Nothing, or an empty line, stands before it.
    assert prefix in (b"", b"\n", b"\n\n") or prefix.endswith((b"\n\n", b"\r\n\r\n", b"\r\n\n"))
    assert content.startswith((prefix.removesuffix(b"\n\n"), prefix.removesuffix(b"\n")))


@settings(max_examples=150, deadline=None)
@given(
    junk=st.binary(max_size=200),
    reading=CUTS,
    start=st.sampled_from([b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\n", HEAD, HEAD + b"5\r\nhel"]),
)
def test_no_bytes_of_a_worker_break_the_gateway_or_a_clients_framing(loop, junk, reading, start):
    relay = Relay(loop)
    written, exchange = relay.answered(split(start + junk, reading), eof=True)
    assert exchange.done.done()
    failure = exchange.done.exception()
    assert failure is None or isinstance(failure, GatewayError)
    head, found, body = written.partition(b"\r\n\r\n")
    if failure is not None and not exchange.started:
        assert written == b""
    if found and b"transfer-encoding: chunked" in head and (failure is None or exchange.stream):
        dechunked(body)


def test_a_connection_goes_back_to_the_pool_readable_though_its_client_was_behind(loop):
    relay = Relay(loop)
    client = Client()
    # The first write fills the client's buffer; the rest of the answer is in the same read.
    client.transport.write = lambda data: exchange.pause()
    exchange = relay.exchange(client)
    relay.connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert exchange.paused
    assert relay.pool.released == 1
    assert relay.upstream.reading
