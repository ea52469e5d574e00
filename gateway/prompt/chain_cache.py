"""Chains of long conversations at the cost of their new segments.

A conversation's prompt is the one before and a few segments more. The state of its chain is kept at each segment's end, so the next turn begins
where the last one stopped instead of at the first token.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final

from gateway.prompt.blocks import Chain, ChainState, Hasher

if TYPE_CHECKING:
    from gateway.prompt.prompt import Prompt
    from gateway.prompt.segments import Segment

DEFAULT_BYTES: Final = 64 * 1024 * 1024
SHORT: Final = 2048
"""Tokens below which a prompt is hashed from the start: that is as cheap as looking up its segments."""
_NODE_BYTES: Final = 400
_HASH_BYTES: Final = 40
"""What one hash in a list costs: the integer and the reference."""


class _Node:
    """The chain up to the end of one segment that followed another node's."""

    __slots__ = ("hashes", "key", "state")

    def __init__(self, key: int, state: ChainState, hashes: list[int]) -> None:
        self.key = key
        self.state = state
        self.hashes = hashes


class ChainCache:
    """Makes the chains of prompts and remembers where they stood.

    Attributes:
        hasher: makes the hashes.
        hits, misses: segments whose chain was known, and not.
        resets: how often everything was forgotten because `max_bytes` was reached.
    """

    __slots__ = ("_bytes", "_keys", "_max_bytes", "_nodes", "hasher", "hits", "misses", "resets")

    def __init__(self, hasher: Hasher, max_bytes: int = DEFAULT_BYTES) -> None:
        self.hasher = hasher
        self._max_bytes = max_bytes
        # By the node before (or the root and block size) and the segment's serial number, which is never used twice.
        self._nodes: dict[tuple[object, int], _Node] = {}
        self._keys = count(1)
        self._bytes = 0
        self.hits = self.misses = self.resets = 0

    @property
    def bytes(self) -> int:
        """About how much memory the remembered states take."""
        return self._bytes

    def chains(self, prompt: "Prompt", root: int, block_sizes: Sequence[int]) -> Mapping[int, Chain]:
        """The prompt's chain for each block size.

        Args:
            prompt: with its ids in segments.
            root: the namespace (`Hasher.root`).
            block_sizes: of the workers.
        """
        if prompt.token_count < SHORT:
            return self.hasher.chains(root, prompt.ids, block_sizes)
        return {size: self._chain(prompt.segments, prompt.token_count, root, size) for size in block_sizes}

    def _chain(self, segments: "Sequence[Segment]", tokens: int, root: int, block_size: int) -> Chain:
        nodes = self._nodes
        before: object = (root, block_size)
        state = ChainState(block_size, root)
        hashes: list[int] = []
        position = 0
        for segment in segments:
            node = nodes.get((before, segment.serial))
            if node is None:
                break
            hashes += node.hashes
            before, state = node.key, node.state
            position += 1
        self.hits += position
        self.misses += len(segments) - position
        for segment in segments[position:]:
            new, state = self.hasher.extend(state, segment.ids)
            hashes += new
            node = _Node(next(self._keys), state, new)
            nodes[before, segment.serial] = node
            before = node.key
            self._bytes += _NODE_BYTES + _HASH_BYTES * len(new)
        if self._bytes > self._max_bytes:
            # Rare, and cheap to recover from (a third of a microsecond a block): not worth an order of eviction.
            nodes.clear()
            self._bytes = 0
            self.resets += 1
        return Chain(block_size, hashes, tokens)
