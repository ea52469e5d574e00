"""Whether a hint was of use, as shown by a later request for what it spoke of. A pure function."""

from typing import TYPE_CHECKING, Final

from backends.hints.model import Action, Fate

if TYPE_CHECKING:
    from gateway.residency.ledger import Entry

HALF: Final = 0.5
"""Share of its tokens that must have been held: engines credit whole blocks or segments only, and never the last token."""


def judge(entry: "Entry", worker_id: str, held: int) -> tuple[Fate, str] | None:
    """How `entry` ends; None: that does not show yet.

    Args:
        entry: a hint that has not ended.
        worker_id: who has computed a prompt that begins with what the hint speaks of.
        held: tokens of it that it had in its caches.
    """
    if entry.worker != worker_id:
        return None
    if entry.fate is None:
        return Fate.SKIPPED, "overtaken: it was asked for before anybody had said it"
    if entry.fate is Fate.SENT and entry.action is not Action.PREFETCH:  # what is being fetched may be there already
        return Fate.FAILED, "no answer when it was asked for"
    if entry.action is Action.DEMOTE:
        return Fate.WASTED, "asked for again"
    if entry.action is Action.UNPIN:
        return None
    if held - entry.start >= HALF * (entry.stop - entry.start):
        return Fate.USEFUL, "held when it was asked for"
    return Fate.WASTED, "not held when it was asked for"
