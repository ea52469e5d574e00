"""Hashes of cache blocks, as vLLM makes them with ``--prefix-caching-hash-algo sha256_cbor`` and a fixed ``PYTHONHASHSEED``.

A block's hash is SHA-256 over the canonical CBOR (RFC 8949, section 4.2.1) of ``[parent, tokens, extra]``: the hash of the
block before it (for the first one: of the seed), its token ids, and null or what else decides whether a block may be
shared: the LoRA adapter's name, and in the first block the cache salt.
"""

import hashlib
from collections.abc import Sequence

MASK_64 = (1 << 64) - 1
HASH_SEED = "0"
"""What `PYTHONHASHSEED` would be."""


def cbor_head(major: int, value: int) -> bytes:
    """The head of a CBOR item: its major type (0 to 7) and its value or length in the shortest form."""
    if value < 24:
        return bytes([major << 5 | value])
    for size, code in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise ValueError("a CBOR integer has at most 64 bits")


def cbor_text(text: str) -> bytes:
    """A CBOR text string."""
    data = text.encode()
    return cbor_head(3, len(data)) + data


def wire_hash(digest: bytes) -> int:
    """The 64 bits of a block's hash that KV events carry: the last eight bytes of its digest."""
    return int.from_bytes(digest, "big") & MASK_64


def extra_keys(lora: str | None, salt: str | None, *, first: bool) -> list[str] | None:
    """What KV events say was hashed into a block beside its tokens, or None."""
    keys = [key for key in (lora, salt if first else None) if key]
    return keys or None


class BlockHasher:
    """Hashes the full blocks of token sequences."""

    def __init__(self, block_size: int, vocabulary_size: int) -> None:
        """Blocks of `block_size` tokens; ids below `vocabulary_size` are encoded beforehand."""
        self._block_size = block_size
        self._encoded = [cbor_head(0, token) for token in range(vocabulary_size)]
        self._root = hashlib.sha256(cbor_text(HASH_SEED)).digest()
        self._array = cbor_head(4, block_size)

    def chain(self, ids: Sequence[int], *, salt: str | None = None, lora: str | None = None) -> list[bytes]:
        """The digests (32 bytes each) of every full block of `ids`, in order.

        Raises:
            IndexError: an id is outside the vocabulary.
        """
        encoded, size, array = self._encoded, self._block_size, self._array
        parent, digests = self._root, []
        extra = _encode_extra(lora, salt)
        for start in range(0, len(ids) - size + 1, size):
            tokens = b"".join([encoded[token] for token in ids[start : start + size]])
            parent = hashlib.sha256(b"\x83\x58\x20" + parent + array + tokens + extra).digest()
            digests.append(parent)
            if start == 0:
                extra = _encode_extra(lora, None)
        return digests


def _encode_extra(lora: str | None, salt: str | None) -> bytes:
    """CBOR of what else is hashed into a block: each key with a tag before it, so that a salt is never taken for a name.

    vLLM tags an adapter with its name and its path; here the path is the name.
    """
    keys: list[tuple[str, ...]] = []
    if lora:
        keys.append(("lora", lora, lora))
    if salt:
        keys.append(("cache_salt", salt))
    if not keys:
        return b"\xf6"
    return cbor_head(4, len(keys)) + b"".join(cbor_head(4, len(key)) + b"".join(map(cbor_text, key)) for key in keys)
