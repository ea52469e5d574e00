"""What a hint is: a wish about where a part of a prompt's KV should be, or how long it should stay there.

Independent of any wire and of who wishes. A hint may be lost, refused or ignored: nothing depends on it but speed.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from array import array

TierName = Literal["device", "l1", "l2"]
"""The worker's device memory, its CPU memory, and the storage that workers share."""


class Action(StrEnum):
    """What is wished."""

    PREFETCH = "prefetch"
    """Bring it from `Hint.source` (or the worker `Hint.peer`) to `Hint.target` before it is asked for."""
    RETAIN = "retain"
    """Evict it after others, by `Hint.priority`, for `Hint.ttl` seconds."""
    PIN = "pin"
    """Do not evict it until unpinned, or for `Hint.ttl` seconds."""
    UNPIN = "unpin"
    """Take a pin back."""
    DEMOTE = "demote"
    """It will not be asked for again soon: evict it before others."""


class Subject(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The prompt that hints speak of. One object is shared by all hints about a prompt.

    Attributes:
        fleet: whose workers.
        tokens: its length.
        chains: its block hashes (the gateway's own) by block size, first block first.
        ids: makes its token ids (uint32); None where they are not known exactly, and only the request itself can carry hints.
        salt: `cache_salt` of the request, as the worker gets it.
        lora: the adapter's name.
        session: the conversation it belongs to; empty when that is not known.
    """

    fleet: str
    tokens: int
    chains: Mapping[int, Sequence[int]]
    ids: "Callable[[], array[int]] | None" = None
    salt: str | None = None
    lora: str | None = None
    session: str = ""


class Hint(msgspec.Struct, frozen=True, eq=False, gc=False, kw_only=True):
    """One wish, to one worker.

    Attributes:
        id: unique in this process.
        action: see there.
        rule: who wishes: the name of a rule as in the configuration.
        worker: id of the worker.
        subject: the prompt.
        start, stop: which tokens of it, ``[start, stop)``.
        source: for prefetches: the tier that has it.
        target: the tier that is spoken of; for prefetches, where it should come to.
        peer: for prefetches from another worker's memory: whose.
        priority: 0 (first to go) to 100 (last to go).
        ttl: seconds for which the wish stands; 0: until further notice.
        created: seconds on the caller's clock.
        reason: why, in a few words for a person.
        answer: of retention: what the request generates is meant as well, as far as it goes on where `stop` is.
    """

    id: int
    action: Action
    rule: str
    worker: str
    subject: Subject
    stop: int
    start: int = 0
    source: TierName | None = None
    target: TierName = "device"
    peer: str | None = None
    priority: int = 50
    ttl: float = 0.0
    created: float = 0.0
    reason: str = ""
    answer: bool = False


class Fate(StrEnum):
    """What became of a hint. Every hint ends in exactly one of `SKIPPED`, `REFUSED`, `FAILED`, `USEFUL`, `WASTED`."""

    SKIPPED = "skipped"
    """Not sent: over budget, its rule throttled, its worker can't, or it was overtaken by events."""
    SENT = "sent"
    ACCEPTED = "accepted"
    """The worker's answer said so; with hints inside a request: the request was answered."""
    REFUSED = "refused"
    """The worker's answer said no."""
    FAILED = "failed"
    """No answer, or none in time."""
    CONFIRMED = "confirmed"
    """An event of the worker shows that it was done."""
    USEFUL = "useful"
    """What it spoke of was asked for again, and held, before it expired."""
    WASTED = "wasted"
    """It expired and nobody had asked."""
