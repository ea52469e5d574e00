"""What a rule is, and by what it speaks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from backends.hints.model import Action, Hint, Subject, TierName
from policies.base import Match, WorkerView

if TYPE_CHECKING:
    from gateway.residency.heat import Heat
    from gateway.residency.ledger import Entry, Ledger
    from gateway.residency.sessions import Session, Sessions
    from gateway.residency.words import ClientWords

_IDS: Final = count(1)
"""One row of numbers for all fleets: whoever gets hints of several must tell them apart."""

Workers = Callable[[], Sequence[WorkerView]]
Holds = Callable[[Subject], Mapping[str, Match]]
"""Who holds how much of a prompt now, by worker id."""


class Asked(msgspec.Struct, eq=False):
    """What is known of one request, made once by the caller and given to every call about it.

    Attributes:
        subject: its prompt.
        now: when it was made, in seconds; later calls about it set it.
        stage: its class of work.
        words: what its client said about caching.
        session: its conversation, once found.
        before: hints about that conversation whose worth this request shows; filled when it is sent.
        waited: the worker for which it has been spoken of while it waited.
    """

    subject: Subject
    now: float
    stage: str | None = None
    words: "ClientWords | None" = None
    session: "Session | None" = None
    before: "Sequence[Entry]" = ()
    waited: str = ""


class Voice:
    """Makes hints and enters them into the books; what a rule that is held back wants to say is not said."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: "Ledger") -> None:
        self._ledger = ledger

    def say(
        self,
        into: list[Hint],
        rule: str,
        action: Action,
        worker: str,
        subject: Subject,
        now: float,
        *,
        stop: int,
        start: int = 0,
        source: TierName | None = None,
        target: TierName = "device",
        peer: str | None = None,
        priority: int = 50,
        ttl: float = 0.0,
        reason: str = "",
        answer: bool = False,
        session: "Session | None" = None,
        mark: int = 0,
    ) -> "Entry | None":
        """Append a hint to `into`. Returns its entry in the books; None: it was held back.

        Args are those of `backends.hints.model.Hint`; `session` will show what it was worth; `mark` is as of `ledger.Entry`.
        """
        ledger = self._ledger
        record = ledger.rules.get(rule)
        if record is not None and record.throttled and not record.passes():
            return None
        hint = Hint(
            id=next(_IDS),
            action=action,
            rule=rule,
            worker=worker,
            subject=subject,
            stop=stop,
            start=start,
            source=source,
            target=target,
            peer=peer,
            priority=priority,
            ttl=ttl,
            created=now,
            reason=reason,
            answer=answer,
        )
        into.append(hint)
        entry = ledger.offer(hint, mark)
        if session is not None:
            session.remember(entry)
        return entry


class Context(msgspec.Struct, frozen=True, eq=False):
    """What rules may look at.

    Attributes:
        workers: the fleet's.
        holds: see `Holds`; costs a look-up, not for every request.
        sessions: its conversations.
        voice: by what to speak.
        heat: what conversations begin with; counted if a rule `counts_heat`.
    """

    workers: Workers
    holds: Holds
    sessions: "Sessions"
    voice: Voice
    heat: "Heat"


class Rule:
    """One reason to speak. Each method appends its hints to `into`; a rule has those that it needs."""

    name: str = ""
    """As in the configuration."""
    needs: Literal["", "words", "stage"] = ""
    """`sent` is called only for requests that have this."""
    counts_heat: bool = False
    """It reads `Context.heat`."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def waiting(self, into: list[Hint], asked: Asked, worker: WorkerView, match: Match) -> None:
        """A request waits, and will probably go to `worker`, which holds `match` of it."""

    def sent(self, into: list[Hint], asked: Asked, worker: WorkerView, match: Match) -> None:
        """A request goes to `worker` now. `asked.session` is as it was before. On the hot path."""

    def answered(self, into: list[Hint], asked: Asked, worker: str, held: int, now: float) -> None:
        """It has been answered by `worker`, which had `held` tokens of its prompt in its caches."""

    def reserved(self, into: list[Hint], name: str, stage: str, worker: WorkerView, now: float) -> None:
        """A slot is kept at `worker` for the next request of the conversation `name` and of `stage`."""

    def ended(self, into: list[Hint], session: "Session", now: float) -> None:
        """A conversation is over; called for each of its stages."""

    def draining(self, into: list[Hint], worker: WorkerView, others: Sequence[WorkerView], now: float) -> None:
        """`worker` will be gone soon; `others` are there to take over."""

    def tick(self, into: list[Hint], now: float) -> None:
        """About a second has passed."""


def last_block(subject: Subject, stop: int, block_size: int | None = None) -> int:
    """Hash of the last whole block in the first `stop` tokens, by `block_size` or the smallest that there is; 0: there is none."""
    chains = subject.chains
    if not chains:
        return 0
    size = block_size if block_size is not None and block_size in chains else min(chains)
    hashes = chains[size]
    blocks = min(stop // size, len(hashes))
    return hashes[blocks - 1] if blocks else 0
