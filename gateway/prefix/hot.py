"""Which prefixes are asked for most: a bounded count of what requests found in the caches.

The prefix of a request is the part of its prompt that the worker it went to already held. That is what it has in common with
earlier ones: a system prompt for a new conversation, all earlier turns for the next turn of an old one. Nothing of the text is
kept, only the hash of the last block, which also tells who holds it now.
"""

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.prompt.blocks import Chain
    from policies.base import Match

KEPT: Final = 512
"""Prefixes that survive a clearing; up to four times as many are held before the next. About 0.4 MB."""
HALF_LIFE: Final = 600.0
"""Seconds after which a prefix that nobody asks for counts half as much."""


class HotPrefix(msgspec.Struct, gc=False):
    """One prefix.

    Attributes:
        model: the fleet's name.
        block_hash: of its last block.
        block_size: tokens per block.
        tokens: its length.
        hits: requests that found it at the worker they went to.
        first, last: monotonic seconds of the first and the latest of them.
    """

    model: str
    block_hash: int
    block_size: int
    tokens: int
    hits: int
    first: float
    last: float

    @property
    def saved(self) -> int:
        """Tokens that those requests spared their workers, by our prediction."""
        return self.hits * self.tokens

    def heat(self, now: float) -> float:
        """Tokens saved, old ones counting less."""
        return float(self.hits * self.tokens * 0.5 ** ((now - self.last) / HALF_LIFE))


class HotPrefixes:
    """Counts prefixes. `saw` costs 0.5 us; whatever comes in, no more than 4 x `KEPT` are held."""

    __slots__ = ("_kept", "_most", "_seen")

    def __init__(self, kept: int = KEPT) -> None:
        """`kept`: prefixes that survive a clearing."""
        self._kept = kept
        self._most = 4 * kept
        self._seen: dict[int, HotPrefix] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, model: str, chains: "Mapping[int, Chain]", match: "Match", now: float) -> None:
        """A request goes to a worker that holds `match` of its prompt. Nothing is counted where that is nothing."""
        held = match.device + match.l1 + match.l2
        if not held:
            return
        for size, chain in chains.items():
            blocks, rest = divmod(held, size)
            hashes = chain.hashes
            if rest or not blocks or blocks > len(hashes):
                continue
            key = hashes[blocks - 1]
            found = self._seen.get(key)
            if found is None:
                if len(self._seen) >= self._most:
                    self._clear(now)
                self._seen[key] = HotPrefix(model, key, size, held, 1, now, now)
            else:
                found.hits += 1
                found.last = now
            return

    def hottest(self, limit: int, now: float) -> list[HotPrefix]:
        """Those that saved most of late, the first one most."""
        return sorted(self._seen.values(), key=lambda prefix: prefix.heat(now), reverse=True)[:limit]

    def _clear(self, now: float) -> None:
        """Forget all but the hottest: 2 ms for 2,048, so some 1 us for each new prefix."""
        self._seen = {prefix.block_hash: prefix for prefix in self.hottest(self._kept, now)}
