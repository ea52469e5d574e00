"""Chains of long conversations at the cost of their new segments.

A conversation's prompt is the one before and a few segments more. The state of its chain is kept at each segment's end, so the next turn begins
where the last one stopped instead of at the first token.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final

from gateway.prompt.blocks import Chain, ChainState, Hasher, Packed
from gateway.prompt.segments import packed

if TYPE_CHECKING:
    from gateway.prompt.prompt import Prompt
    from gateway.prompt.segments import Segment

DEFAULT_BYTES: Final = 64 * 1024 * 1024
SHORT: Final = 2048
"""Tokens below which only a prompt's first segment (a system prompt, often) is remembered: hashing the others is as cheap as
looking them up."""
WORTH: Final = 64
"""Tokens from which that is worth remembering."""
_NODE_BYTES: Final = 400
_HASH_BYTES: Final = 40
"""What one hash in a list costs: the integer and the reference."""


class _Node:
    """The chain up to the end of one segment that followed another node's."""

    __slots__ = ("hashes", "key", "parent", "state", "tail")

    def __init__(self, key: int, state: ChainState, hashes: list[int]) -> None:
        self.key = key
        self.state = state
        self.parent = state.parent
        self.tail = state.tail
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
        segments = prompt.segments
        if prompt.token_count >= SHORT:
            return {size: self._chain(segments, prompt.token_count, root, size) for size in block_sizes}
        # A prompt in one piece (that a worker was asked for, say) has no first segment that would come again.
        if len(segments) < 2 or len(segments[0].ids) < WORTH:
            return self.hasher.chains(root, packed(segments), block_sizes)
        rest = packed(segments[1:])
        return {size: self._short(segments[0], rest, prompt.token_count, root, size) for size in block_sizes}

    def _short(self, first: "Segment", rest: Packed, tokens: int, root: int, block_size: int) -> Chain:
        """The chain of a short prompt: `first`, then `rest`, packed."""
        key = ((root, block_size), first.serial)
        node = self._nodes.get(key)
        if node is None:
            self.misses += 1
            hashes, state = self.hasher.extend(ChainState(block_size, root), first.ids)
            node = _Node(next(self._keys), state, hashes)
            self._keep(key, node)
        else:
            self.hits += 1
        return Chain(block_size, node.hashes + self.hasher.blocks(node.parent, node.tail + rest, block_size), tokens)

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
            self._keep((before, segment.serial), node)
            before = node.key
        return Chain(block_size, hashes, tokens)

    def _keep(self, key: tuple[object, int], node: _Node) -> None:
        self._nodes[key] = node
        self._bytes += _NODE_BYTES + _HASH_BYTES * len(node.hashes)
        if self._bytes > self._max_bytes:
            # Rare, and cheap to recover from (a third of a microsecond a block): not worth an order of eviction.
            self._nodes.clear()
            self._bytes = 0
            self.resets += 1
