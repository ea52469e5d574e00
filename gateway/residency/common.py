"""What the prompts of one kind have in common: those of one stage, or with one `prompt_cache_key`. No clock, no I/O; bounded."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from gateway.residency.sessions import tail_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.hints.model import Subject

KINDS: Final = 1_024
"""Kinds that are remembered: those asked for last."""


class Common:
    """One kind's.

    Attributes:
        subject: one of its prompts, the latest.
        tokens: how many leading tokens of it others of its kind had, too; 0: none have been compared yet.
    """

    __slots__ = ("_session", "subject", "tokens")

    def __init__(self, subject: "Subject", session: object) -> None:
        self.subject = subject
        self.tokens = 0
        self._session = session

    def saw(self, subject: "Subject", session: object) -> None:
        """A further prompt of the kind. Those of one conversation have in common what is theirs alone: they are not compared."""
        if session is self._session:
            return
        sizes = subject.chains.keys() & self.subject.chains.keys()
        if sizes:
            size = min(sizes)
            self.tokens = size * same(subject.chains[size], self.subject.chains[size])
        self.subject = subject
        self._session = session


class Commons:
    """All kinds'."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, Common] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def saw(self, kind: str, subject: "Subject", session: object) -> None:
        """A prompt of a kind, and the conversation that it belongs to. Costs the logarithm of its length."""
        if not tail_chain(subject):
            return
        found = self._kinds.get(kind)
        if found is None:
            self._kinds[kind] = Common(subject, session)
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
            return
        self._kinds.move_to_end(kind)
        found.saw(subject, session)

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
