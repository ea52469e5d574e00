"""The chunks of prompts by LMCache's names, and by the gateway's own hashes of their blocks. No clock, no I/O."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from backends.hints import chunks
from gateway.prefix.events import HASH_MASK

if TYPE_CHECKING:
    from array import array

    from gateway.prefix.events import Stored
    from gateway.prompt.blocks import Chain

AGAIN: Final = 2.0
"""Seconds until a chunk is asked about again whose answer was new; servers report once a second."""
MAX_CHUNKS: Final = 50_000
"""That are remembered: 2 KB each with the hashes of 16 blocks, 100 MB. 13 M tokens in chunks of 256."""


class Chunk:
    """One chunk that prompts were seen with.

    Attributes:
        name: LMCache's.
        salt: `cache_salt`, empty for none.
        blocks: the gateway's hashes of its blocks, by block size.
        due: when it is to be asked about; None while it waits in the queue of those that are due.
        asked: when it was asked about last; None before that.
        delay: seconds from the last answer to the next question.
        l2: pools that hold it, as far as we have put it there.
        l1: the same, for workers.
        missed: workers whose events say that they hold it in l1, and the directory did not.
        doubted: until then storage is not believed to have it.
    """

    __slots__ = ("asked", "blocks", "delay", "doubted", "due", "l1", "l2", "missed", "name", "salt")

    def __init__(self, name: bytes, salt: str, blocks: Mapping[int, tuple[int, ...]]) -> None:
        self.name = name
        self.salt = salt
        self.blocks = blocks
        self.due: float | None = None
        self.asked: float | None = None
        self.delay = AGAIN
        self.l2: frozenset[str] = frozenset()
        self.l1: frozenset[str] = frozenset()
        self.missed: frozenset[str] = frozenset()
        self.doubted = 0.0


class ChunkNames:
    """All chunks of one fleet's prompts whose names are known. Beyond a limit those are forgotten that were least lately used.

    Attributes:
        chunk: tokens in each.
        named: chunks that were given a name, ever.
        forgotten: of those, because of the limit.
    """

    def __init__(
        self, chunk: int, limit: int, *, added: Callable[[Chunk], None], dropped: Callable[[Chunk], None]
    ) -> None:
        """`added` and `dropped` are told of each chunk when its name becomes known, and before it is forgotten."""
        self.chunk = chunk
        self.named = 0
        self.forgotten = 0
        self._limit = limit
        self._added = added
        self._dropped = dropped
        self._chunks: dict[tuple[str, bytes], Chunk] = {}
        self._by_block: dict[int, Chunk] = {}  # by the hash of its last block, for every block size
        self._unsalted: dict[int, bytes] = {}  # names of chunks without a salt by their end, as events have it

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def clear(self) -> None:
        """Forget all, without a word."""
        self._chunks.clear()
        self._by_block.clear()
        self._unsalted.clear()

    def known(self, chains: "Mapping[int, Chain]") -> tuple[int, int]:
        """How many leading chunks of a prompt are known by name, and how many it has."""
        for size, chain in chains.items():
            if self.chunk % size == 0:
                step = self.chunk // size
                hashes, total = chain.hashes, len(chain.hashes) // step
                low, high = 0, total
                if total and hashes[step - 1] not in self._by_block:
                    return 0, total  # what comes after it may be known still, see `use`
                # Chunks are named from the first on, and forgotten from the last on.
                while low < high:
                    middle = (low + high + 1) >> 1
                    if hashes[middle * step - 1] in self._by_block:
                        low = middle
                    else:
                        high = middle - 1
                return low, total
        return 0, 0

    def of(self, chains: "Mapping[int, Chain]", first: int = 0) -> Iterator[Chunk]:
        """The known chunks of a prompt, from its chunk `first` on."""
        for size, chain in chains.items():
            if self.chunk % size == 0:
                step = self.chunk // size
                for block in chain.hashes[(first + 1) * step - 1 :: step]:
                    found = self._by_block.get(block)
                    if found is not None:
                        yield found
                return

    def use(self, chains: "Mapping[int, Chain]") -> None:
        """A prompt has come: forget its chunks later, the first one last. Does nothing unless the limit is near."""
        if len(self._chunks) * 8 >= self._limit * 7:
            for found in reversed(list(self.of(chains))):
                key = found.salt, found.name
                self._chunks[key] = self._chunks.pop(key)

    def name(self, ids: "array[int]", first: int, stop: int, chains: "Mapping[int, Chain]", salt: str | None) -> int:
        """Give names to the chunks ``[first, stop)`` of a prompt, of which those before `first` have theirs. Costs 8 us for 256 tokens.

        Args:
            ids: of the whole prompt.
            first: how many chunks have a name, as of `known`.
            stop: up to which.
            chains: its hashes.
            salt: its `cache_salt`.

        Returns:
            How many were new.
        """
        chunk = self.chunk
        steps = [(size, chunk // size, chain.hashes) for size, chain in chains.items() if chunk % size == 0]
        if not steps:
            return 0
        parent = chunks.ROOT
        if first:
            _, step, hashes = steps[0]
            before = self._by_block.get(hashes[first * step - 1])
            if before is None:
                return 0
            parent = before.name
        before_count = len(self._chunks)
        for place, name in enumerate(chunks.names(ids[first * chunk : stop * chunk], chunk, after=parent), first):
            blocks = {size: tuple(hashes[place * step : (place + 1) * step]) for size, step, hashes in steps}
            self._learn(name, salt or "", blocks)
        return len(self._chunks) - before_count

    def stored(self, event: "Stored", ours: Sequence[int], block_size: int) -> None:
        """A worker's event tells that it holds chunks in its l1, with their tokens: among them what it has generated itself.

        Events know no salts, and what they name is put into the map without one: so it is here.
        """
        if event.block_size != self.chunk or self.chunk % block_size or event.lora is not None:
            return
        parent = chunks.ROOT if event.parent is None else self._unsalted.get(event.parent)
        if parent is None:
            return
        step = self.chunk // block_size
        packed = memoryview(event.tokens).cast("I")
        for place, name in enumerate(chunks.names(packed.tolist(), self.chunk, after=parent)):
            if chunks.short(name) & HASH_MASK != event.hashes[place]:
                return  # of another algorithm, or with something else in it
            self._learn(name, "", {block_size: tuple(ours[place * step : (place + 1) * step])})

    def _learn(self, name: bytes, salt: str, blocks: Mapping[int, tuple[int, ...]]) -> None:
        key = salt, name
        found = self._chunks.get(key)
        if found is None:
            if len(self._chunks) >= self._limit:
                self._drop(next(iter(self._chunks)))
                self.forgotten += 1
            found = self._chunks[key] = Chunk(name, salt, blocks)
            if not salt:
                self._unsalted[chunks.short(name) & HASH_MASK] = name
            self.named += 1
            self._added(found)
        elif not blocks.keys() <= found.blocks.keys():
            # With blocks of another size it stands in another map: where it was put is said anew with the next answer.
            found.blocks = {**found.blocks, **blocks}
            found.l1 = found.l2 = frozenset()
        for hashes in blocks.values():
            self._by_block[hashes[-1]] = found

    def _drop(self, key: tuple[str, bytes]) -> None:
        gone = self._chunks.pop(key)
        self._dropped(gone)
        for hashes in gone.blocks.values():
            self._by_block.pop(hashes[-1], None)
        if not gone.salt:
            self._unsalted.pop(chunks.short(gone.name) & HASH_MASK, None)
        gone.blocks = {}
