"""The end of an answer, kept for when its usage is read."""

_KEPT = 4096


class Tail:
    """Keeps the first read of an answer's body and the last few: at least the last 4 KiB, at most 8 KiB and a read.

    Reads are held by reference and looked at only when somebody asks. Two lists take turns: when the younger one holds enough by itself, the
    older one is dropped.
    """

    __slots__ = ("_first", "_older", "_room", "_younger")

    def __init__(self) -> None:
        # Framed reads as they came, unframed ones in a tuple.
        self._first: bytes | tuple[bytes] | None = None
        self._older: list[bytes | tuple[bytes]] = []
        self._younger: list[bytes | tuple[bytes]] = []
        self._room = 0

    def add_chunks(self, data: bytes) -> None:
        """Keep a read of whole chunks with their framing, as `gateway.http.chunks.whole_chunks` takes them."""
        self._younger.append(data)
        self._room = room = self._room - len(data)
        if room < 0:
            self._turn()

    def add_body(self, data: bytes) -> None:
        """Keep a part of the body without framing."""
        self._younger.append((data,))
        self._room = room = self._room - len(data)
        if room < 0:
            self._turn()

    def _turn(self) -> None:
        if self._first is None:
            # There is no room before the first read, so that it comes by here.
            self._first = self._younger[-1]
        self._older = self._younger
        self._younger = []
        self._room = _KEPT

    def first(self) -> bytes:
        """The first read that was not empty, without framing."""
        return b"" if self._first is None else _payload(self._first)

    def last(self) -> bytes:
        """The end of the body, without framing; all of it, when it is short."""
        pieces: list[bytes] = []
        size = 0
        for read in (*reversed(self._younger), *reversed(self._older)):
            piece = _payload(read)
            pieces.append(piece)
            size += len(piece)
            if size >= 2 * _KEPT:
                break
        pieces.reverse()
        return b"".join(pieces)[-2 * _KEPT :]


def _payload(read: bytes | tuple[bytes]) -> bytes:
    """What a read carries."""
    if isinstance(read, tuple):
        return read[0]
    return b"".join([read[start:end] for start, end in chunk_payloads(read)])


def chunk_payloads(data: bytes) -> list[tuple[int, int]]:
    """Where the payload of each of the whole chunks in `data` begins and ends."""
    spans = []
    position = 0
    while position < len(data):
        start = data.index(b"\r\n", position) + 2
        end = start + int(data[position : start - 2], 16)
        spans.append((start, end))
        position = end + 2
    return spans
