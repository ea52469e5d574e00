"""Blocks under way from one memory to another, ahead of any request: they take the memory's bandwidth and no computing.

Each memory that is read from sends one transfer at a time, in the order in which they were asked for, each in a few pieces, so that what
has arrived is of use before the rest. What a request itself has to load goes first: it delays what is under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simulator.engine.outputs import BlockKey, TierName

PIECES: Final = 8
"""Pieces of a transfer, at most."""

Source = TierName | str
"""A memory: a tier of the worker, or another worker's memory by a name of the caller's."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks ``keys[first:stop]`` on their way.

    Attributes:
        keys: a prompt's.
        first: of what has not arrived yet.
        stop: behind the last one.
        source, target: from where to where.
        piece: blocks in each piece.
        due: when the next piece arrives.
        seconds: that each further piece takes, if it is whole.
    """

    keys: Sequence[BlockKey]
    first: int
    stop: int
    source: Source
    target: TierName
    piece: int
    due: float
    seconds: float


class Transfers:
    """All that one worker has under way."""

    __slots__ = ("_by_source", "_coming")

    def __init__(self) -> None:
        self._by_source: dict[Source, list[Transfer]] = {}
        self._coming: set[tuple[TierName, BlockKey]] = set()

    def __len__(self) -> int:
        """Transfers."""
        return sum(map(len, self._by_source.values()))

    def coming(self, target: TierName, key: BlockKey) -> bool:
        """Whether a block is on its way to `target`."""
        return (target, key) in self._coming

    def begin(
        self,
        keys: Sequence[BlockKey],
        first: int,
        stop: int,
        source: Source,
        target: TierName,
        *,
        latency: float,
        block_seconds: float,
        now: float,
    ) -> float:
        """Send ``keys[first:stop]``. Returns the seconds until the last one will be there.

        Args:
            keys: of a prompt.
            first: of the first block to move.
            stop: behind the last one.
            source: where they are.
            target: where they shall be.
            latency: seconds before anything arrives.
            block_seconds: that each block takes.
            now: seconds.
        """
        queue = self._by_source.setdefault(source, [])
        start = max(now, _end(queue[-1])) if queue else now
        piece = -(-(stop - first) // PIECES)
        transfer = Transfer(
            keys, first, stop, source, target, piece, start + latency + piece * block_seconds, piece * block_seconds
        )
        queue.append(transfer)
        self._coming.update((target, keys[index]) for index in range(first, stop))
        return _end(transfer) - now

    def next_due(self) -> float | None:
        """When the next piece arrives; None: nothing is under way."""
        return min((queue[0].due for queue in self._by_source.values()), default=None)

    def arrived(self, now: float) -> tuple[Transfer, int, int] | None:
        """The next piece that has arrived by `now`: its transfer, and from which block up to which; None: nothing has."""
        due = self.next_due()
        if due is None or due > now:
            return None
        queue = next(queue for queue in self._by_source.values() if queue[0].due == due)
        transfer = queue[0]
        first, last = transfer.first, min(transfer.first + transfer.piece, transfer.stop)
        transfer.first = last
        self._coming.difference_update((transfer.target, transfer.keys[index]) for index in range(first, last))
        if last == transfer.stop:
            self._next(queue)
        else:
            transfer.due += transfer.seconds
        return transfer, first, last

    def drop(self, transfer: Transfer) -> None:
        """What has not arrived of it will not: there is no room, or nothing to send any more. Its time stays taken."""
        queue = self._by_source.get(transfer.source, [])
        if transfer in queue:
            self._forget(transfer)
            transfer.stop = transfer.first
            self._next(queue)

    def delay(self, source: Source, seconds: float) -> None:
        """Something that goes first takes `source` for so long."""
        for transfer in self._by_source.get(source, ()):
            transfer.due += seconds

    def clear(self, target: TierName) -> None:
        """Nothing comes to `target` any more."""
        for queue in list(self._by_source.values()):
            for transfer in [each for each in queue if each.target == target]:
                self.drop(transfer)

    def _next(self, queue: list[Transfer]) -> None:
        done = queue.pop(0)
        if not queue:
            del self._by_source[done.source]

    def _forget(self, transfer: Transfer) -> None:
        self._coming.difference_update(
            (transfer.target, transfer.keys[index]) for index in range(transfer.first, transfer.stop)
        )


def _end(transfer: Transfer) -> float:
    """When its last piece arrives. All pieces are taken to be whole: the last one may be a little sooner."""
    pieces = -(-(transfer.stop - transfer.first) // transfer.piece)
    return transfer.due + max(0, pieces - 1) * transfer.seconds
