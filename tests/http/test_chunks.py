"""`whole_chunks` against a real parser: what it accepts, httptools reads the same, and says the same when framed anew."""

import httptools
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http.chunks import SizeLines, whole_chunks


class Parsed:
    """A chunked body as httptools sees it."""

    def __init__(self, data):
        self.chunks = []
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._parser.feed_data(data)

    def on_chunk_header(self):
        self.chunks.append(b"")

    def on_body(self, piece):
        self.chunks[-1] += piece

    def on_message_complete(self):
        self.complete = True

    def ends(self):
        self._parser.feed_data(b"0\r\n\r\n")
        return self.complete


def framed(pieces):
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


pieces = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40), st.sampled_from([b"0\r\n\r\n", b"\r\n", b"3\r\nabc\r\n", b"x" * 300])
    ),
    max_size=5,
)
size_lines = st.sampled_from(
    [
        b"3",
        b"03",
        b"+3",
        b"-3",
        b" 3",
        b"3 ",
        b"0x3",
        b"3;a=b",
        b"3\t",
        b"0",
        b"00",
        b"3_0",
        b"A",
        b"a",
        b"",
        b"ffffffffffffffff",
        b"\xb2",
        b"123456789",
    ]
)
soup = st.lists(
    st.one_of(
        st.binary(max_size=12),
        size_lines,
        st.sampled_from([b"\r\n", b"\n", b"\r", b"abc", b"abc\r\n", b"3\r\nabc\r\n"]),
    ),
    max_size=8,
).map(b"".join)
broken = st.tuples(pieces, size_lines, st.sampled_from([b"\r\n", b"\n"]), st.binary(max_size=12), soup).map(
    lambda parts: framed(parts[0]) + b"".join(parts[1:4]) + parts[4]
)


@given(st.one_of(soup, broken, pieces.map(framed)))
@example(b"3\r\nabc\r\n\xb2\r\nabc\r\n")
@example(b"0\r\n\r\n")
@example(b"A\r\n0123456789\r\n")
def test_what_is_relayed_as_it_came_is_what_the_parser_would_have_said(data):
    end = whole_chunks(data)
    assert 0 <= end <= len(data)
    parsed = Parsed(data[:end])
    assert not parsed.complete
    assert framed(parsed.chunks) == data[:end]
    # The parser stands between two chunks: it may go on with what follows, or have been left out.
    assert parsed.ends()


@given(pieces, soup)
def test_canonical_chunks_are_all_recognised(chunks, rest):
    data = framed(chunks)
    assert whole_chunks(data) == len(data)
    assert whole_chunks(data + rest) >= len(data)


@given(pieces, st.integers(0, 2000))
def test_cutting_a_stream_anywhere_moves_no_byte(chunks, cut):
    """As the relay does it: whole chunks as they came, the rest to the parser until the next boundary."""
    stream = framed(chunks)
    cut = min(cut, len(stream))
    first = whole_chunks(stream[:cut])
    boundaries = [len(framed(chunks[:n])) for n in range(len(chunks) + 1)]
    assert first == max(b for b in boundaries if b <= cut)
    assert whole_chunks(stream, first) == len(stream)


@given(soup, st.binary(max_size=20))
def test_where_it_starts_does_not_matter(data, before):
    assert whole_chunks(before + data, len(before)) == len(before) + whole_chunks(data)


def test_one_byte_at_a_time_nothing_is_taken_for_a_chunk_before_its_end():
    stream = b"5\r\nhello\r\n"
    assert [whole_chunks(stream[:n]) for n in range(len(stream) + 1)] == [0] * len(stream) + [len(stream)]


@given(st.binary(max_size=300), st.integers(1, 5000))
def test_the_length_of_a_read_tells_the_size_line_of_a_whole_chunk(data, length):
    lines = SizeLines()
    whole = b"%x\r\n%b\r\n" % (length, b"x" * length)
    assert whole.startswith(lines[len(whole)])
    if data.startswith(lines[len(data)]) and data.endswith(b"\r\n"):
        assert whole_chunks(data) == len(data)


def test_size_lines_are_bounded():
    lines = SizeLines()
    for size in range(20_000):
        _ = lines[size]
    assert len(lines) <= 4096
