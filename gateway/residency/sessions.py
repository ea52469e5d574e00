"""Conversations: which request is the next turn of which, what its prompt was, where it went, and when it may come back.

A conversation is known by the name that its client gives it or, without one, by its prompts: a prompt that goes on from a known one is
the next turn. Each stage of a conversation (planner, generator) has prompts of its own and counts apart.

Bounded in number and in bytes: beyond the bytes the prompts of those that were silent longest are dropped, while where they went and
how soon they return stays known; beyond the number they are forgotten.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from math import log
from typing import TYPE_CHECKING, Final

from gateway.residency.gaps import FLEET_SHARE, SHARE, SHORTEST, Gaps, Returns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.hints.model import Subject
    from gateway.residency.ledger import Entry

LOOK_BACK: Final = 64
"""Blocks from the end of a prompt in which the end of the turn before is looked for, and from the end of what a worker holds of it."""
MOST_ENTRIES: Final = 24
"""Hints that are remembered with a conversation."""
SESSION_BYTES: Final = 900
"""Of a conversation without its prompt."""
HASH_BYTES: Final = 40
TOKEN_BYTES: Final = 4


class Session:
    """One conversation, or one stage of it.

    Attributes:
        key: by which it is known here.
        name: as its client calls it; empty: it has no name.
        stage: of its requests; empty: none.
        subject: its latest prompt; None: dropped to save memory.
        worker: id of the one that the latest request went to; empty: none has.
        turns: requests so far.
        seen: when the latest one was sent.
        gaps: what was learned of when the next comes; None before the second.
        shared: leading tokens that others had brought before its first turn: they are not its own.
        entries: hints about it that are waited for.
        pinned: tokens that are pinned for it, on `pinned_at`, until `pinned_until`.
        ended: it was said to be over.
    """

    __slots__ = (
        "bytes",
        "ended",
        "entries",
        "gaps",
        "key",
        "name",
        "pinned",
        "pinned_at",
        "pinned_until",
        "seen",
        "shared",
        "stage",
        "subject",
        "tail",
        "turns",
        "worker",
    )

    def __init__(self, key: str, name: str, stage: str) -> None:
        self.key = key
        self.name = name
        self.stage = stage
        self.subject: Subject | None = None
        self.worker = ""
        self.turns = 0
        self.seen = 0.0
        self.gaps: Gaps | None = None
        self.shared = 0
        self.entries: list[Entry] = []
        self.pinned = 0
        self.pinned_at = ""
        self.pinned_until = 0.0
        self.ended = False
        self.tail = 0
        self.bytes = SESSION_BYTES

    def remember(self, entry: "Entry") -> None:
        """Wait for what becomes of a hint; of many, the latest are waited for."""
        self.entries.append(entry)
        if len(self.entries) > MOST_ENTRIES:
            del self.entries[0]


Silent = Callable[[Session], None]
"""Told of each conversation that is forgotten."""


class Sessions:
    """One fleet's conversations.

    Attributes:
        gaps: what was learned of all.
        returns: how often another turn comes.
        bytes: memory of all that is remembered, as estimated from lengths.
    """

    __slots__ = ("_by_key", "_full", "_most", "_most_bytes", "_next", "_tails", "bytes", "gaps", "returns", "stages")

    def __init__(self, most: int, most_bytes: int, gap: float) -> None:
        """At most so many, in so many bytes; `gap`: seconds assumed between two turns before any were seen."""
        self._most = most
        self._most_bytes = most_bytes
        self._by_key: OrderedDict[str, Session] = OrderedDict()
        self._full: OrderedDict[str, Session] = OrderedDict()
        self._tails: dict[int, Session] = {}
        self._next = 0
        self.stages: set[str] = set()
        self.bytes = 0
        self.gaps = Gaps(gap)
        self.returns = Returns()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        """Those silent longest first. Not to be changed meanwhile."""
        return iter(self._by_key.values())

    @property
    def latest_first(self) -> Iterator[Session]:
        """Those with their prompts, by their latest request."""
        return reversed(self._full.values())

    @property
    def silent_first(self) -> Iterator[Session]:
        """The same the other way round."""
        return iter(self._full.values())

    def named(self, name: str) -> list[Session]:
        """All stages of the conversation that its client calls so."""
        keys = [name, *(_key(name, stage) for stage in self.stages)]
        return [session for key in keys if (session := self._by_key.get(key)) is not None]

    def get(self, name: str, stage: str) -> Session | None:
        """One stage of a conversation."""
        return self._by_key.get(_key(name, stage))

    def find(self, subject: "Subject", stage: str, held: int = 0) -> Session:
        """The conversation that a prompt belongs to; a new one where it goes on from none. `held`: tokens of it that a worker holds."""
        name = subject.session
        if name:
            key = _key(name, stage)
            found = self._by_key.get(key)
            if found is not None:
                return found
        else:
            found = self._before(subject, stage, held)
            if found is not None:
                return found
            self._next += 1
            key = f"\0{self._next}"
        return self._new(key, name, stage)

    def expect(self, name: str, stage: str) -> Session:
        """The conversation that its client calls so, known from now on, before its first request of that stage."""
        return self.get(name, stage) or self._new(_key(name, stage), name, stage)

    def _new(self, key: str, name: str, stage: str) -> Session:
        if stage and len(self.stages) < 64:
            self.stages.add(stage)
        session = self._by_key[key] = Session(key, name, stage)
        self.bytes += SESSION_BYTES
        if len(self._by_key) > self._most or self.bytes > self._most_bytes:
            self._bound()
        return session

    def sent(self, session: Session, subject: "Subject", worker: str, held: int, now: float) -> None:
        """A turn goes to `worker`, which holds `held` tokens of its prompt."""
        if session.turns:
            if now > session.seen:
                gap = now - session.seen
                logarithm = log(max(SHORTEST, gap))
                if session.gaps is None:
                    session.gaps = Gaps(self.gaps.median)
                session.gaps.learn(logarithm, SHARE)
                self.gaps.learn(logarithm, FLEET_SHARE)
            if not session.ended:
                self.returns.saw(session.turns, came=True)
        else:
            session.shared = held
        session.ended = False
        session.turns += 1
        session.seen = now
        session.worker = worker
        known = self._by_key.get(session.key)
        if known is not session:
            # It was forgotten since it was found.
            if known is not None:
                self._forget(known)
            self._by_key[session.key] = session
            self.bytes += session.bytes
        else:
            self._by_key.move_to_end(session.key)
        self._hold(session, subject)

    def silent(self, session: Session) -> None:
        """A conversation is over, or taken to be."""
        if not session.ended:
            session.ended = True
            self.returns.saw(session.turns, came=False)

    def drop(self, session: Session) -> None:
        """Let its prompt go; what is left is small."""
        if session.subject is None:
            return
        session.subject = None
        if self._tails.get(session.tail) is session:
            del self._tails[session.tail]
        session.tail = 0
        self._full.pop(session.key, None)
        self.bytes -= session.bytes - SESSION_BYTES
        session.bytes = SESSION_BYTES

    def _before(self, subject: "Subject", stage: str, held: int) -> Session | None:
        """The conversation whose latest prompt this one goes on from: one of its last blocks ends that prompt.

        The answer in between is held as well, so that the end of the prompt before is also not far from the end of what is held.
        """
        chains = subject.chains
        if not chains:
            return None
        size = min(chains) if len(chains) > 1 else next(iter(chains))
        hashes = chains[size]
        known = self._tails.__contains__
        # The iteration is C's: 25 ns a block.
        tail = next(filter(known, islice(reversed(hashes), LOOK_BACK)), None)
        if tail is None:
            end = held // size
            if not 0 < end < len(hashes) - LOOK_BACK:
                return None
            tail = next(filter(known, reversed(hashes[max(0, end - LOOK_BACK) : end])), None)
            if tail is None:
                return None
        session = self._tails[tail]
        before = session.subject
        return session if session.stage == stage and (before is None or before.tokens <= subject.tokens) else None

    def _hold(self, session: Session, subject: "Subject") -> None:
        """Keep `subject` in place of the prompt before, within the bytes."""
        if not session.name:
            hashes = tail_chain(subject)
            tail = hashes[-1] if hashes else 0
            if session.tail != tail:
                if session.tail and self._tails.get(session.tail) is session:
                    del self._tails[session.tail]
                session.tail = tail
            if tail:
                self._tails[tail] = session
        size = weight(subject)
        self.bytes += size - session.bytes
        session.bytes = size
        if session.subject is None:
            self._full[session.key] = session
        else:
            self._full.move_to_end(session.key)
        session.subject = subject
        if len(self._by_key) > self._most or self.bytes > self._most_bytes:
            self._bound()

    def _bound(self) -> None:
        while self.bytes > self._most_bytes and self._full:
            self.drop(next(iter(self._full.values())))
        while self._by_key and (len(self._by_key) > self._most or self.bytes > self._most_bytes):
            self._forget(next(iter(self._by_key.values())))

    def _forget(self, session: Session) -> None:
        self.silent(session)
        self.drop(session)
        self._by_key.pop(session.key, None)
        self.bytes -= SESSION_BYTES


def weight(subject: "Subject") -> int:
    """Bytes that a conversation with this prompt takes: its hashes and ids are counted as if they were nobody else's."""
    hashes = 0
    for chain in subject.chains.values():
        hashes += len(chain)
    return SESSION_BYTES + HASH_BYTES * hashes + (TOKEN_BYTES * subject.tokens if subject.ids is not None else 0)


def tail_chain(subject: "Subject") -> "Sequence[int]":
    """The prompt's hashes by its smallest block size."""
    chains = subject.chains
    if len(chains) == 1:
        for only in chains.values():
            return only
    return chains[min(chains)] if chains else ()


def _key(name: str, stage: str) -> str:
    return f"{name}\0{stage}" if stage else name
