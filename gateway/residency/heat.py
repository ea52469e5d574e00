"""How hot each shared prefix is: conversations that begin with it, in a minute, those of late counting most. No clock, no I/O; bounded."""

from math import exp, inf, log
from typing import TYPE_CHECKING, Final

from gateway.residency.sessions import weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from backends.hints.model import Subject
    from gateway.residency.ledger import Entry

HALF_LIFE: Final = 60.0
"""Seconds after which a request counts half."""
KEPT: Final = 256
"""Prefixes that survive a clearing; up to four times as many are held."""
MOST_BYTES: Final = 32 * 1024 * 1024
MOST_ENTRIES: Final = 16
"""Hints about one prefix that are waited for."""
_RATE: Final = log(2.0) / HALF_LIFE


class Prefix:
    """One prefix that several conversations begin with.

    Attributes:
        mark: hash of its last block.
        blocks, size: its length in blocks, and tokens per block.
        subject: a prompt that begins with it; None before the second, and where memory is short.
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

    def __init__(self, mark: int, blocks: int, size: int) -> None:
        self.mark = mark
        self.blocks = blocks
        self.size = size
        self.subject: Subject | None = None
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
        awaited: those with hints that have not ended, by their mark.
        bytes: of the prompts that are kept, as of `gateway.residency.sessions.weight`.
    """

    __slots__ = ("_kept", "_most_bytes", "_seen", "awaited", "bytes", "cared")

    def __init__(self, kept: int = KEPT, most_bytes: int = MOST_BYTES) -> None:
        """`kept`: prefixes that survive a clearing; `most_bytes`: of the prompts that are kept with them."""
        self._kept = kept
        self._most_bytes = most_bytes
        self.bytes = 0
        self._seen: dict[int, Prefix] = {}
        self.cared: list[Prefix] = []
        self.awaited: dict[int, Prefix] = {}

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
                found = self._seen[mark] = Prefix(mark, blocks, size)
            elif found.subject is None:
                self._hold(found, subject, now)
            found.saw(now)
            return found
        return None

    def hottest(self, now: float, least: int) -> list[Prefix]:
        """Those of at least so many tokens that can be spoken of, by the tokens that they spare in a minute, the first one most."""
        found = [each for each in self._seen.values() if each.tokens >= least and each.subject is not None]
        return sorted(found, key=lambda each: each.heat(now) * each.tokens, reverse=True)

    def settle(
        self, now: float, *, up: float, down: float, replicas: int, sessions: int, most: int, least: int = 0
    ) -> list[tuple[Prefix, int]]:
        """How many workers should hold each prefix now.

        One more from `up` conversations a minute and worker on, one less below `down`: between the two it stays as it is. A `down` above
        half of `up` counts as that: the second worker would come and go.

        Returns:
            Those for which that has changed, with the number before.
        """
        changed: list[tuple[Prefix, int]] = []
        down = min(down, up / 2)
        hottest = self.hottest(now, least)
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

    def wait(self, prefix: Prefix, entries: "Sequence[Entry]") -> None:
        """Hints about a prefix: later requests that begin with it show what they were worth."""
        if entries:
            prefix.entries = [*prefix.entries, *entries][-MOST_ENTRIES:]
            self.awaited[prefix.mark] = prefix

    def waited(self, subject: "Subject", since: float) -> "list[Entry]":
        """Hints about what `subject` begins with, given before `since`, that have not ended."""
        found = in_prompt(self.awaited.values(), subject)
        return [entry for prefix in found for entry in prefix.entries if entry.created < since and not entry.ended]

    def settle_waits(self) -> None:
        """Forget hints that have ended."""
        for prefix in list(self.awaited.values()):
            prefix.entries = [entry for entry in prefix.entries if not entry.ended]
            if not prefix.entries:
                del self.awaited[prefix.mark]

    def _clear(self, now: float) -> None:
        hottest = sorted(self._seen.values(), key=lambda each: (each.wanted, each.heat(now)), reverse=True)
        self._seen = {prefix.mark: prefix for prefix in hottest[: self._kept]}
        self.bytes = sum(weight(prefix.subject) for prefix in self._seen.values() if prefix.subject is not None)

    def _hold(self, prefix: Prefix, subject: "Subject", now: float) -> None:
        """Keep a prompt with a prefix, and let those of the coldest go where that is too much."""
        prefix.subject = subject
        self.bytes += weight(subject)
        if self.bytes <= self._most_bytes:
            return
        for cold in reversed(self.hottest(now, 0)):
            if cold.subject is not None:
                self.bytes -= weight(cold.subject)
                cold.subject, cold.wanted = None, 0
            if self.bytes <= self._most_bytes / 2:
                break
        self.cared = [each for each in self.cared if each.subject is not None]


def in_prompt(prefixes: "Iterable[Prefix]", subject: "Subject") -> list[Prefix]:
    """Those that `subject` begins with."""
    chains = subject.chains
    return [
        prefix
        for prefix in prefixes
        if (hashes := chains.get(prefix.size)) is not None
        and len(hashes) >= prefix.blocks
        and hashes[prefix.blocks - 1] == prefix.mark
    ]
