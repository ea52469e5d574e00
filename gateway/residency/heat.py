"""How hot each shared prefix is: conversations that begin with it, in a minute, those of late counting most. No clock, no I/O; bounded."""

from math import exp, inf, log
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from backends.hints.model import Subject
    from gateway.residency.ledger import Entry

HALF_LIFE: Final = 60.0
"""Seconds after which a request counts half."""
KEPT: Final = 256
"""Prefixes that survive a clearing; up to four times as many are held."""
_RATE: Final = log(2.0) / HALF_LIFE


class Prefix:
    """One prefix that several conversations begin with.

    Attributes:
        mark: hash of its last block.
        blocks, size: its length in blocks, and tokens per block.
        subject: a prompt that begins with it.
        sessions: conversations that have begun with it.
        wanted: workers that should hold it; 0: it is not cared for.
        entries: hints about it that have not ended.
        released: workers that were told to forget it since it was wanted at more of them last.
        spread_at: when it was brought to a further worker last.
    """

    __slots__ = (
        "_at",
        "_weight",
        "blocks",
        "entries",
        "mark",
        "released",
        "sessions",
        "size",
        "spread_at",
        "subject",
        "wanted",
    )

    def __init__(self, mark: int, blocks: int, size: int, subject: "Subject") -> None:
        self.mark = mark
        self.blocks = blocks
        self.size = size
        self.subject = subject
        self.sessions = 0
        self.wanted = 0
        self.entries: list[Entry] = []
        self.released: set[str] = set()
        self.spread_at = -inf
        self._weight = 0.0
        self._at = 0.0

    @property
    def tokens(self) -> int:
        """Its length in tokens."""
        return self.blocks * self.size

    def saw(self, now: float) -> None:
        """A conversation begins with it."""
        self._weight = self._weight * exp(-_RATE * max(0.0, now - self._at)) + 1.0
        self._at = max(self._at, now)
        self.sessions += 1

    def heat(self, now: float) -> float:
        """Conversations a minute: each counts exp(-rate x age), so a steady stream of r a second adds up to r / rate."""
        return self._weight * exp(-_RATE * max(0.0, now - self._at)) * _RATE * 60.0


class Heat:
    """All prefixes of one fleet.

    Attributes:
        cared: those of which it is seen to that workers hold them.
    """

    __slots__ = ("_kept", "_seen", "cared")

    def __init__(self, kept: int = KEPT) -> None:
        """`kept`: prefixes that survive a clearing."""
        self._kept = kept
        self._seen: dict[int, Prefix] = {}
        self.cared: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, subject: "Subject", held: int, now: float) -> Prefix | None:
        """A conversation begins, and `held` tokens of its prompt were there already: what it has in common with earlier ones."""
        for size, hashes in subject.chains.items():
            blocks, rest = divmod(held, size)
            if rest or not blocks or blocks > len(hashes):
                continue
            mark = hashes[blocks - 1]
            found = self._seen.get(mark)
            if found is None:
                if len(self._seen) >= 4 * self._kept:
                    self._clear(now)
                found = self._seen[mark] = Prefix(mark, blocks, size, subject)
            found.saw(now)
            return found
        return None

    def settle(
        self, now: float, *, up: float, down: float, replicas: int, sessions: int, most: int
    ) -> list[tuple[Prefix, int]]:
        """How many workers should hold each prefix now.

        One more from `up` conversations a minute and worker on, one less below `down`: between the two it stays as it is. A `down` above
        half of `up` counts as that: the second worker would come and go.

        Returns:
            Those for which that has changed, with the number before.
        """
        changed: list[tuple[Prefix, int]] = []
        down = min(down, up / 2)
        hottest = sorted(self._seen.values(), key=lambda each: each.heat(now) * each.tokens, reverse=True)
        for rank, prefix in enumerate(hottest):
            heat, before = prefix.heat(now), prefix.wanted
            wanted = before
            if rank >= most or (wanted and heat / wanted < down):
                wanted = 0 if rank >= most or wanted == 1 else wanted - 1
            elif prefix.sessions >= sessions and heat >= up * max(1, wanted):
                wanted = min(replicas, wanted + 1)
            if wanted != before:
                prefix.wanted = wanted
                changed.append((prefix, before))
        self.cared = [prefix for prefix in hottest[:most] if prefix.wanted]
        return changed

    def in_prompt(self, subject: "Subject") -> list[Prefix]:
        """Those that are cared for and that `subject` begins with."""
        chains = subject.chains
        return [
            prefix
            for prefix in self.cared
            if (hashes := chains.get(prefix.size)) is not None
            and len(hashes) >= prefix.blocks
            and hashes[prefix.blocks - 1] == prefix.mark
        ]

    def _clear(self, now: float) -> None:
        hottest = sorted(self._seen.values(), key=lambda each: (each.wanted, each.heat(now)), reverse=True)
        self._seen = {prefix.mark: prefix for prefix in hottest[: self._kept]}
