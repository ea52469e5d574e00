r"""Recognising whole chunks of a chunked body, so that they can be relayed as they came.

A worker that streams writes one chunk per token, and nearly every read from its socket is one whole chunk, or several. Parsing such a chunk and
framing it again costs more than everything else the relay does with it; looking at its ends does not.
"""

_CRLF = b"\r\n"
_LONGEST_SIZE_LINE = 10


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
