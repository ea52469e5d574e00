"""`Tail`: what it keeps, whatever the reads."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.tail import Tail, chunk_payloads


def framed(pieces):
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


pieces = st.one_of(
    st.binary(min_size=1, max_size=30),
    st.integers(1, 9000).map(lambda size: bytes(itertools.islice(itertools.cycle(b"0123456789\r\n"), size))),
)
reads = st.lists(st.one_of(st.lists(pieces, min_size=1, max_size=4), pieces, st.just(b"")), max_size=60)


@given(reads)
def test_the_first_read_and_the_end_of_the_body_are_kept_without_framing(reads):
    tail = Tail()
    payloads = []
    for read in reads:
        if isinstance(read, list):
            tail.add_chunks(framed(read))
            payloads.append(b"".join(read))
        else:
            tail.add_body(read)
            payloads.append(read)
    body = b"".join(payloads)
    kept = tail.last()
    assert body.endswith(kept)
    # Framing of tiny chunks counts too: six bytes for one of payload.
    assert len(kept) >= min(len(body), 4096 // 6)
    assert len(kept) <= 8192
    assert tail.first() == next((payload for payload in payloads if payload), b"")


def test_a_long_stream_does_not_hold_more_than_a_few_reads():
    tail = Tail()
    for _ in range(1000):
        tail.add_chunks(framed([b"x" * 250]))
    assert len(tail._older) + len(tail._younger) <= 8192 // 250 + 2
    for _ in range(10):
        tail.add_body(b"y" * 65536)
    assert len(tail._older) + len(tail._younger) <= 2
    assert tail.first() == b"x" * 250
    assert tail.last() == b"y" * 8192


def test_nothing_added_is_nothing_kept():
    assert Tail().first() == Tail().last() == b""


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=5))
def test_payloads_of_chunks_are_found(pieces):
    data = framed(pieces)
    assert [data[start:end] for start, end in chunk_payloads(data)] == pieces
