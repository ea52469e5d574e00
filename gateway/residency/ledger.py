"""The books of all hints: what each was about, what became of it, and whether it was of any use.

Every hint ends exactly once, in one of `ENDS`. Between, its fate only moves forward: sent, accepted, confirmed. A prefetch, a retention
or a pin was *useful* if what it spoke of was asked for again and held before the hint expired; a demotion, if it was not asked for.

No clock, no I/O.
"""

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.hints.model import Action, Fate, Hint, TierName
from gateway.residency.throttle import RuleRecord

if TYPE_CHECKING:
    from gateway.config.residency import Throttle

ENDS: Final = frozenset({Fate.SKIPPED, Fate.REFUSED, Fate.FAILED, Fate.USEFUL, Fate.WASTED})
SHOWN: Final = 200
"""Latest hints that `rows` has."""
MOST_OPEN: Final = 50_000
"""Hints that are followed at once: about 25 MB. The oldest are given up."""
MOST_SUMS: Final = 8_192
"""Different (rule, worker, action) that are counted apart; of more, the worker's name is left out."""
PATIENCE: Final = 120.0
"""Seconds after which a hint without a `ttl` of its own has expired."""

OFFERED: Final = "offered"

# Members of an enum are hashed by Python code, 0.2 us each; there is one object of each, so its id does as well.
_END: Final = 4
_RANK: Final = {
    id(fate): rank
    for rank, fates in enumerate([(Fate.SENT,), (Fate.ACCEPTED,), (Fate.CONFIRMED,), tuple(ENDS)], 1)
    for fate in fates
}
_ORDER: Final = tuple(Fate)
_INDEX: Final = {id(fate): index for index, fate in enumerate(_ORDER, 1)}


class Sum(msgspec.Struct, frozen=True, gc=False):
    """How many hints of one kind there were: offered, and by fate in the order of `Fate`."""

    rule: str
    worker: str
    action: Action
    counts: list[int]


class Entry(msgspec.Struct, gc=False):
    """One hint in the books, without the prompt itself, which is large.

    Attributes:
        id: the hint's; so are all others up to `created`.
        expires: when it ends if nothing else happens.
        mark: hash of the last whole block that it speaks of, 0 where that is not followed.
        fate: the latest; None: offered.
        detail: why.
        changed: when.
        counts: where hints of its kind are counted.
        rank: how far it has come, as a number.
    """

    id: int
    action: Action
    rule: str
    worker: str
    session: str
    start: int
    stop: int
    source: TierName | None
    target: TierName
    peer: str | None
    priority: int
    ttl: float
    reason: str
    created: float
    expires: float
    mark: int
    fate: Fate | None
    detail: str
    changed: float
    counts: list[int]
    rank: int = 0

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self.rank == _END

    @property
    def said(self) -> bool:
        """Whether the worker was told, as far as is known, and it has not ended."""
        return 0 < self.rank < _END


Ended = Callable[[Entry], None]
"""Told of each hint that ends."""


class Ledger:
    """One fleet's.

    Attributes:
        rules: how each rule does, by name.
        open: hints that have not ended, by id.
        offered, ended: hints that came in and that ended; what is between is `open`.
        watched: open prefetches by worker and the hash of their last block: an event that names it confirms them.
        news: what began or stopped to be held back since somebody looked, in words; whoever logs it clears it.
    """

    __slots__ = (
        "_expiries",
        "_sums",
        "_throttle",
        "_told",
        "ended",
        "news",
        "offered",
        "open",
        "recent",
        "rules",
        "watched",
    )

    def __init__(self, throttle: "Throttle", told: Ended | None = None) -> None:
        """`told`: see `Ended`."""
        self._throttle = throttle
        self._told = told
        self._sums: dict[tuple[str, str, int], Sum] = {}
        self._expiries: list[tuple[float, int]] = []
        self.open: dict[int, Entry] = {}
        self.recent: deque[Entry] = deque(maxlen=SHOWN)
        self.rules: dict[str, RuleRecord] = {}
        self.watched: dict[tuple[str, int], Entry] = {}
        self.news: list[str] = []
        self.offered = 0
        self.ended = 0

    def passes(self, rule: str) -> bool:
        """Whether `rule` may give a hint now; to be asked once for each."""
        record = self.rules.get(rule)
        return record is None or record.passes()

    def offer(self, hint: Hint, mark: int = 0) -> Entry:
        """Take a new hint into the books; `mark`: see `Entry`."""
        created, rule, worker, action = hint.created, hint.rule, hint.worker, hint.action
        expires = created + (hint.ttl or PATIENCE)
        found = self._sums.get((rule, worker, id(action)))
        counts = self._count(rule, worker, action) if found is None else found.counts
        entry = Entry(
            hint.id,
            action,
            rule,
            worker,
            hint.subject.session,
            hint.start,
            hint.stop,
            hint.source,
            hint.target,
            hint.peer,
            hint.priority,
            hint.ttl,
            hint.reason,
            created,
            expires,
            mark,
            None,
            "",
            created,
            counts,
        )
        if len(self.open) >= MOST_OPEN:
            self._end(next(iter(self.open.values())), Fate.WASTED, "given up: too many to follow", created, judge=False)
        self.open[hint.id] = entry
        self.recent.append(entry)
        heappush(self._expiries, (expires, hint.id))
        self.offered += 1
        counts[0] += 1
        if mark and action is Action.PREFETCH:
            self.watched[worker, mark] = entry
        return entry

    def fate(self, hint: "Hint | Entry", fate: Fate, detail: str, now: float) -> bool:
        """What became of a hint. Whether that is news: what has ended stays as it ended, and nothing moves backward."""
        entry = self.open.get(hint.id)
        if entry is None:
            return False
        rank = _RANK[id(fate)]
        if rank == _END:
            self._end(entry, fate, detail, now)
            return True
        if rank <= entry.rank:
            return False
        entry.rank, entry.fate, entry.detail, entry.changed = rank, fate, detail[:200], now
        entry.counts[_INDEX[id(fate)]] += 1
        if fate is not Fate.SENT and entry.action is Action.UNPIN:
            self._end(entry, Fate.USEFUL, detail, now, judge=False)
        return True

    def event(self, worker_id: str, tier: TierName, mark: int, now: float) -> None:
        """`worker_id` has stored the block `mark` in `tier`: confirms a prefetch that wished it."""
        entry = self.watched.get((worker_id, mark))
        if entry is not None and entry.target == tier and entry.said:
            self.fate(entry, Fate.CONFIRMED, "its worker's event says so", now)

    def expire(self, now: float) -> None:
        """End what has expired."""
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            entry = self.open.get(heappop(expiries)[1])
            if entry is None:
                continue
            if entry.fate is None:
                self._end(entry, Fate.SKIPPED, "nobody said it in time", now)
            elif entry.action is Action.DEMOTE or entry.action is Action.UNPIN:
                self._end(entry, Fate.USEFUL, "nobody asked for it", now)
            else:
                self._end(entry, Fate.WASTED, "nobody asked for it", now)
        if len(expiries) > 2 * len(self.open) + 1024:
            self._expiries = [(entry.expires, entry.id) for entry in self.open.values()]
            heapify(self._expiries)

    def counts(self) -> "Iterator[tuple[str, str, Action, str, int]]":
        """(rule, worker, action, ``offered`` or a fate, how many so far), zeros left out."""
        for each in self._sums.values():
            for fate, count in zip((OFFERED, *_ORDER), each.counts, strict=True):
                if count:
                    yield each.rule, each.worker, each.action, str(fate), count

    def by_rule(self) -> dict[str, dict[str, Any]]:
        """Per rule: its sums by fate over all workers, and whether it is held back."""
        rules: dict[str, dict[str, Any]] = {}
        for rule, _, _, fate, count in self.counts():
            row = rules.setdefault(rule, {})
            row[fate] = row.get(fate, 0) + count
        for rule, row in rules.items():
            record = self.rules.get(rule)
            row["throttled"] = record is not None and record.throttled
            row["held_back"] = record.held if record is not None else 0
            row["useful_share"] = round(record.share, 3) if record is not None and record.looked_at else None
        return rules

    def rows(self) -> list[dict[str, Any]]:
        """The latest hints, the last one first."""
        return [
            {
                **msgspec.structs.asdict(entry),
                "action": entry.action.value,
                "fate": entry.fate.value if entry.fate is not None else OFFERED,
            }
            for entry in reversed(self.recent)
        ]

    def throttled(self) -> list[str]:
        """What is held back, in words, for `/readyz`."""
        return [_held_back(name, record) for name, record in self.rules.items() if record.throttled]

    def _end(self, entry: Entry, fate: Fate, detail: str, now: float, *, judge: bool = True) -> None:
        del self.open[entry.id]
        if entry.mark and self.watched.get((entry.worker, entry.mark)) is entry:
            del self.watched[entry.worker, entry.mark]
        entry.rank, entry.fate, entry.detail, entry.changed = _END, fate, detail[:200], now
        self.ended += 1
        entry.counts[_INDEX[id(fate)]] += 1
        if judge and (fate is Fate.USEFUL or fate is Fate.WASTED):
            record = self.rules.get(entry.rule)
            if record is None:
                record = self.rules[entry.rule] = RuleRecord(self._throttle)
            if record.resolved(fate is Fate.USEFUL):
                self.news.append(
                    _held_back(entry.rule, record) if record.throttled else f"hints of rule {entry.rule} are said again"
                )
        if self._told is not None:
            self._told(entry)

    def _count(self, rule: str, worker: str, action: Action) -> list[int]:
        """Where hints of a kind that has not been met yet are counted."""
        if len(self._sums) >= MOST_SUMS:
            worker = ""
        key = rule, worker, id(action)
        return self._sums.setdefault(key, Sum(rule, worker, action, [0] * (1 + len(_ORDER)))).counts


_SHOWN: Final = tuple(name for name in Entry.__struct_fields__ if name not in {"counts", "rank", "mark"})


def _held_back(rule: str, record: RuleRecord) -> str:
    return (
        f"hints of rule {rule} are mostly of no use ({record.useful} of the last {record.looked_at} were):"
        " most are not said any more"
    )
