r"""Recognising whole chunks of a chunked body, so that they can be relayed as they came.

A worker that streams writes one chunk per token, and nearly every read from its socket is one whole chunk, or several. Parsing such a chunk and
framing it again costs more than everything else the relay does with it; looking at its ends does not.
"""

_CRLF = b"\r\n"
_LONGEST_SIZE_LINE = 10
_MOST_LINES = 4096


class SizeLines(dict[int, bytes]):
    r"""The size line that a read of so many bytes begins with, if it is one whole canonical chunk.

    A chunk of n bytes takes n, four for the two line breaks, and n's hex digits: the length of the read decides the line, so that
    recognising a whole chunk takes no parsing, only a look at both its ends. Lengths that no single chunk has get a line that nothing
    begins with.
    """

    __slots__ = ()

    def __missing__(self, size: int) -> bytes:
        if len(self) >= _MOST_LINES:
            self.clear()
        self[size] = line = _size_line(size)
        return line


def _size_line(size: int) -> bytes:
    for digits in range(1, _LONGEST_SIZE_LINE):
        length = size - 4 - digits
        if length > 0 and len(line := b"%x\r\n" % length) == digits + 2:
            return line
    return b"\n"


def whole_chunks(data: bytes, start: int = 0) -> int:
    r"""Where the run of whole, canonical, non-empty chunks that begins at `start` ends; `start` itself when there is none.

    Canonical means: size in lower-case hex without leading zeros, no extension, ``\r\n`` in both places. Everything else (a chunk that
    is cut off, an extension, the last chunk, trailers) is left to the real parser.
    """
    size = len(data)
    while True:
        end_of_line = data.find(_CRLF, start, start + _LONGEST_SIZE_LINE)
        if end_of_line < 0:
            return start
        digits = data[start:end_of_line]
        try:
            length = int(digits, 16)
        except ValueError:
            return start
        end = end_of_line + length + 4
        # Formatting the number again refuses what int() lets pass: signs, blanks, underscores, 0x, leading zeros.
        if length == 0 or end > size or data[end - 2 : end] != _CRLF or b"%x" % length != digits:
            return start
        start = end
        if start == size:
            return start
