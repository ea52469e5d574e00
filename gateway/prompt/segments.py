"""The ids of a text's pieces, kept so that a conversation costs only what is new in it.

Special tokens cut a rendered conversation into pieces (`gateway.prompt.splitting`). Each piece's ids are kept by its
text; a turn added to a long conversation then costs a look-up for each old piece and the encoding of the new ones.
"""

import itertools
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import orjson

from gateway.prompt.blocks import pack
from gateway.prompt.lru import ByteLru

_BYTES_PER_TOKEN: Final = 4 + 7
"""An id as uint32, and as decimal digits with a comma once `Segment.json` has been asked."""


class Segment:
    """A run of token ids that belongs together, shared by all prompts that contain it. Not to be changed.

    Attributes:
        ids: uint32.
        serial: unlike that of any other segment of this process, and never used again: a key for what is computed from
            segments (such as the state of a chain at a boundary) that does not need to keep or compare their ids.
    """

    __slots__ = ("_json", "ids", "serial")

    _serials = itertools.count(1)

    def __init__(self, ids: "array[int]") -> None:
        self.ids = ids
        self.serial = next(self._serials)
        self._json: bytes | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def json(self) -> bytes:
        """The ids as JSON numbers with commas between, without brackets; made once."""
        if self._json is None:
            self._json = orjson.dumps(self.ids.tolist())[1:-1]
        return self._json


class SegmentCache:
    """Pieces of text to segments, least recently used first out.

    Args:
        max_bytes: for texts, ids and their JSON together.
    """

    __slots__ = ("_lru",)

    def __init__(self, max_bytes: int) -> None:
        self._lru: ByteLru[Segment] = ByteLru(max_bytes)

    def find(self, pieces: Iterable[str]) -> list[Segment | None]:
        """The segment of each piece, or None if it has to be encoded."""
        return self._lru.find(pieces)

    def put(self, piece: str, ids: "array[int]") -> Segment:
        """Keep a piece's ids; a segment that is there already stays."""
        known = self._lru.peek(piece)
        if known is not None:
            return known
        segment = Segment(ids)
        self._lru.put(piece, segment, _BYTES_PER_TOKEN * len(ids))
        return segment

    @property
    def stats(self) -> dict[str, int]:
        """Entries, bytes, hits, misses and evictions so far."""
        lru = self._lru
        return {
            "entries": len(lru),
            "bytes": lru.bytes,
            "hits": lru.hits,
            "misses": lru.misses,
            "evictions": lru.evictions,
        }


def packed(segments: Sequence[Segment]) -> bytes:
    """All ids as `gateway.prompt.blocks.pack` gives them, in one copy."""
    if sys.byteorder == "big":
        return pack(joined(segments))
    return b"".join([segment.ids for segment in segments])


def joined(segments: Sequence[Segment]) -> "array[int]":
    """All ids in one array."""
    ids = array("I")
    for segment in segments:
        ids += segment.ids
    return ids
