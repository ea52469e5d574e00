"""What the prompts of one kind have in common: those of one stage, or with one `prompt_cache_key`. No clock, no I/O; bounded."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.hints.model import Subject
    from gateway.residency.ledger import Entry

MOST_BLOCKS: Final = 4_096
"""What goes beyond is not compared: 65,536 tokens of 16-token blocks, 160 KB."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""Of the hashes of all kinds together."""


class Common:
    """One kind's.

    Attributes:
        subject: its latest prompt; None where nobody needs more than its length in common.
        tokens: how many leading tokens of the latest prompt another conversation's had, too; 0: none have been compared yet.
        entries: hints about what is in common that are waited for.
    """

    __slots__ = ("entries", "hashes", "session", "size", "subject", "tokens")

    def __init__(self) -> None:
        self.subject: Subject | None = None
        self.tokens = 0
        self.entries: list[Entry] = []
        self.hashes: Sequence[int] = ()
        self.size = 0
        self.session: object = None


class Commons:
    """All kinds'."""

    __slots__ = ("_blocks", "_keep", "_kinds", "_most")

    def __init__(self, most: int, *, subjects: bool) -> None:
        """At most so many kinds, those asked for last; whether their latest prompts are kept."""
        self._most = most
        self._keep = subjects
        self._kinds: OrderedDict[str, Common] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def blocks(self) -> int:
        """Hashes that are kept."""
        return self._blocks

    def saw(self, kind: str, subject: "Subject", session: object) -> Common | None:
        """A prompt of a kind, and the conversation that it belongs to. Costs the logarithm of its length; None: it has no block.

        Prompts of one conversation have in common what is theirs alone: they are not compared.
        """
        chains = subject.chains
        if not chains:
            return None
        size = min(chains)
        hashes = chains[size][:MOST_BLOCKS]
        if not hashes:
            return None
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = Common()
        elif session is not found.session and size == found.size:
            found.tokens = size * same(hashes, found.hashes)
        self._kinds.move_to_end(kind)
        self._blocks += len(hashes) - len(found.hashes)
        found.hashes, found.size, found.session = hashes, size, session
        if self._keep:
            found.subject = subject
        while len(self._kinds) > self._most or (self._blocks * 40 > MOST_BYTES and len(self._kinds) > 1):
            self._blocks -= len(self._kinds.popitem(last=False)[1].hashes)
        return found

    def get(self, kind: str) -> Common | None:
        """What is known of a kind."""
        return self._kinds.get(kind)


def same(one: "Sequence[int]", other: "Sequence[int]") -> int:
    """How many leading blocks two chains share. A block's hash names all before it, so halving finds the place."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
