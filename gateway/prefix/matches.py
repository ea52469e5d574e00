"""What a look-up in the prefix map found: for every worker the leading blocks that it holds, by tier."""

import functools
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.prefix.holders import PLANES, SLOT, Holder, Tier
from policies.base import NO_MATCH, Match

MAX_SPELLED: Final = 16_384
"""Workers in all kept answers together: about 2 MB."""

_L1, _L2, _E = 1 << Tier.L1, 1 << Tier.L2, 1 << Tier.EXPECTED


class Matches(msgspec.Struct, frozen=True, gc=False):
    """A staircase: at each depth where some worker's run ends, the bits of those whose runs reach it.

    Kept in this form because finding it costs the same for one worker as for a thousand; `of` and `held` spell it out.
    It belongs to the moment of the look-up: ask before the map changes.

    Attributes:
        block_size: tokens per block.
        steps: (blocks, mask), blocks ascending; `mask` has a bit per (slot, tier) whose run is at least that long.
        holders: the workers by slot; None where there is none.
        spelled: what `held` has said about other staircases of the same holders.
    """

    block_size: int
    steps: list[tuple[int, int]]
    holders: list[Holder | None]
    spelled: dict[tuple[tuple[int, int], ...], Mapping[str, Match]] = msgspec.field(default_factory=dict)

    def of(self, holder: Holder) -> Match:
        """What one worker holds. Tokens that are only expected count as `device`, with the source ``expected``."""
        if holder.slot < 0:
            return NO_MATCH
        shift = PLANES * holder.slot
        return self._match([mask >> shift & SLOT for _, mask in self.steps], holder.source)

    def held(self) -> Mapping[str, Match]:
        """Every worker that holds at least the first block, by name. Workers that hold the same share one `Match`.

        Prompts that begin alike (with one system prompt, say) have the same staircase again and again: its answer is kept,
        and is the very same object then.
        """
        key = tuple(self.steps)
        found = self.spelled.get(key)
        if found is None:
            if len(self.spelled) * len(self.holders) >= MAX_SPELLED:
                self.spelled.clear()
            found = self.spelled[key] = self._spell()
        return found

    def _spell(self) -> dict[str, Match]:
        width = len(self.holders)
        # One hexadecimal digit per slot, slot 0 first; a column is then all that is known about one worker.
        rows = [f"{mask:0{width}x}"[::-1] for _, mask in self.steps]
        seen: dict[tuple[str, tuple[str, ...]], Match] = {}
        found: dict[str, Match] = {}
        for holder, column in zip(self.holders, zip(*rows, strict=True), strict=False):
            if holder is None or column[0] == "0":
                continue
            key = holder.source, column
            match = seen.get(key)
            if match is None:
                match = seen[key] = self._match([int(digit, 16) for digit in column], holder.source)
            found[holder.name] = match
        return found

    def _match(self, digits: list[int], source: str) -> Match:
        device = l1 = l2 = expected = 0
        for (blocks, _), digit in zip(self.steps, digits, strict=True):
            if digit == SLOT:  # by far the most common: held on the device, so in every run
                device = l1 = l2 = expected = blocks
                continue
            if digit & _L1:
                l1 = blocks
            if digit & _L2:
                l2 = blocks
            if digit & _E:
                expected = blocks
        if not expected:
            return NO_MATCH
        size = self.block_size
        return _make(
            (device + expected - l2) * size,
            (l1 - device) * size,
            (l2 - l1) * size,
            "expected" if expected > l2 else source,
        )


# Making a frozen dataclass costs 1 us, finding it here 0.1 us, and lengths of matches repeat.
_make = functools.lru_cache(maxsize=4096)(Match)
