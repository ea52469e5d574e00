"""Token ids to a chain of block hashes.

A block's hash is MurmurHash3 x64-128 (`mmh3`) over its parent's whole hash and its own tokens, so it names the entire prefix
up to and including the block. The first block's parent is the *root*: a hash of everything that keeps two equal token
sequences apart, i.e. model, LoRA adapter and salt. Hashes are the gateway's own and seeded per process: nothing outside
needs to know them, because workers' events carry token ids (`gateway.prefix.mirror`).

A hash keeps 56 of the 128 bits: such an int takes 32 bytes of memory in CPython, one of 61 to 64 bits takes 48. With ten
million blocks known, the odds that any two of them share a hash are below 1 in 1,400 (n²/2 over 2⁵⁶), and what a collision
costs is one badly placed request (docs/adr/0010-prefix-map.md).

Pure functions of their input: no clock, no I/O.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

import mmh3
import msgspec

HASH_BYTES = 7
"""Bytes of a block hash; an int below 2⁵⁶."""
TOKEN_BYTES = 4
"""A token id is hashed as an unsigned 32-bit little-endian integer."""

Packed = bytes
"""Token ids as of `pack`."""
TokenIds = Packed | Sequence[int]
"""Token ids: packed little-endian uint32 bytes, an ``array("I")`` or any sequence of ints."""


class Chain(msgspec.Struct, frozen=True, gc=False):
    """The hashes of a prompt's full blocks.

    Attributes:
        block_size: tokens per block.
        hashes: one per full block, the first block first; a tail shorter than a block has none.
        tokens: length of the prompt in tokens, the tail included.
    """

    block_size: int
    hashes: list[int]
    tokens: int

    @property
    def hittable(self) -> int:
        """How many leading blocks a worker can take from its cache.

        An engine always computes the last token, because it needs its logits: of a prompt that ends on a block boundary
        the last block is computed again (vLLM: at most ``prompt_len - 1`` tokens, rounded down to a block).
        """
        return max(0, self.tokens - 1) // self.block_size


class ChainState(msgspec.Struct, frozen=True, gc=False):
    """Where a chain stands between two pieces of a prompt; small, so it can be kept at each segment's end.

    Attributes:
        block_size: tokens per block.
        parent: hash of the last full block, or the root.
        tail: the tokens after it, packed, fewer than a block.
    """

    block_size: int
    parent: int
    tail: bytes = b""


def pack(tokens: TokenIds) -> bytes:
    """Token ids as little-endian uint32 bytes; bytes are returned as they are.

    Raises:
        OverflowError: an id is negative or above 2³²-1.
        TypeError: something is not an int.
        ValueError: bytes that are no whole number of ids.
    """
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError("packed token ids are four bytes each")
        return tokens
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def worker_salt(tenant_salt: str | None, cache_salt: str | None) -> str | None:
    """The `cache_salt` that a worker gets, and that its events therefore show.

    A tenant's salt and the client's own make one, so that tenants cannot reach each other's blocks by naming the same
    `cache_salt`. Without a tenant salt the client's goes through unchanged. The tenant's length comes first: no two pairs
    give the same text.
    """
    if not tenant_salt:
        return cache_salt or None
    return f"{len(tenant_salt)}:{tenant_salt}:{cache_salt or ''}"


class Hasher:
    """Makes chains; every part that shares a prefix map must use the same one."""

    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        """`seed`: 0 to 2³²-1, random per process; fixed in tests and replays."""
        self._seed = seed

    def root(self, model: str, lora: str | None = None, salt: str | None = None) -> int:
        """The parent of the first block: `model`, LoRA adapter's name and the salt that the worker sees."""
        parts = [model.encode(), b"" if lora is None else b"\x01" + lora.encode()]
        parts.append(b"" if salt is None else b"\x01" + salt.encode())
        return self._int(b"".join(struct.pack("<Q", len(part)) + part for part in parts))

    def branch(self, parent: int, distinction: bytes) -> int:
        """A parent that stands for `parent` with something other than tokens mixed in, e.g. an image's hash."""
        return self._int(parent.to_bytes(HASH_BYTES, "little") + b"branch" + distinction)

    def blocks(self, parent: int, packed: bytes, block_size: int) -> list[int]:
        """The hashes of the full blocks in `packed` that follow `parent`; leftover tokens at the end are ignored.

        Args:
            parent: a block's hash or a root.
            packed: token ids as of `pack`.
            block_size: tokens per block, at least 1.
        """
        size = block_size * TOKEN_BYTES
        count = len(packed) // size
        digest = mmh3.mmh3_x64_128_digest
        seed = self._seed
        link = parent.to_bytes(HASH_BYTES, "little")
        links: list[bytes] = []
        append = links.append
        for start in range(0, count * size, size):
            link = digest(link + packed[start : start + size], seed)[:HASH_BYTES]
            append(link)
        # One unpack for all blocks: each link and a zero byte make a little-endian 64-bit integer.
        links.append(b"")
        return list(struct.unpack(f"<{count}Q", b"\0".join(links)))

    def extend(self, state: ChainState, tokens: TokenIds) -> tuple[list[int], ChainState]:
        """Go on from `state` with more tokens.

        Returns:
            The hashes of the blocks that became full, and the state after them. Joining the hashes of all pieces gives
            the chain of the whole, wherever the pieces were cut.
        """
        packed = state.tail + pack(tokens)
        used = len(packed) - len(packed) % (state.block_size * TOKEN_BYTES)
        if not used:
            return [], ChainState(state.block_size, state.parent, packed)
        hashes = self.blocks(state.parent, packed, state.block_size)
        return hashes, ChainState(state.block_size, hashes[-1], packed[used:])

    def chain(self, root: int, tokens: TokenIds, block_size: int) -> Chain:
        """The chain of a whole prompt."""
        packed = pack(tokens)
        return Chain(block_size, self.blocks(root, packed, block_size), len(packed) // TOKEN_BYTES)

    def chains(self, root: int, tokens: TokenIds, block_sizes: Sequence[int]) -> dict[int, Chain]:
        """The chains of one prompt for workers of several block sizes, by block size; the tokens are packed once."""
        packed = pack(tokens)
        return {size: self.chain(root, packed, size) for size in block_sizes}

    def _int(self, key: bytes) -> int:
        return int.from_bytes(mmh3.mmh3_x64_128_digest(key, self._seed)[:HASH_BYTES], "little")
