"""Residency in the running gateway: one fleet's `Residency` in real time, and whoever says its hints.

`Residency` (`gateway.residency.residency`) decides what to wish and knows no sockets; `Prober` knows who understands what; `Delivery`
says what is said beside requests. Here they meet. What goes inside a request is given back to whoever sends it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from backends.hints.model import Action, Fate, Hint, Subject
from gateway.prompt.blocks import Chain

if TYPE_CHECKING:
    from backends.hints.base import HintCall
    from gateway.admission.stages import Stage
    from gateway.fleet.worker import Worker
    from gateway.prefix.feed import Feeds
    from gateway.residency.delivery import Delivery
    from gateway.residency.ledger import Entry
    from gateway.residency.probing import Prober
    from gateway.residency.residency import Residency
    from gateway.residency.speakers import Speaker
    from policies.base import Match

_log = structlog.get_logger(__name__)

INSIDE: Final = "inside"
BESIDE: Final = "beside"
NOBODY: Final = "nobody"
FAULT_EVERY: Final = 60.0
"""Seconds between two log lines about mistakes in the code."""


class Note(msgspec.Struct, frozen=True, gc=False):
    """A hint as a request's record keeps it: what the books say of it, now and later.

    Attributes:
        entry: in the books.
        way: ``inside`` the request, ``beside`` it, or ``nobody`` can say it to that worker.
        driver: who says it; empty where nobody does.
    """

    entry: "Entry"
    way: str
    driver: str

    def document(self, start: float) -> dict[str, Any]:
        """For JSON; times count from `start`."""
        entry = self.entry
        fate = entry.fate
        return {
            "id": entry.id,
            "at": round(entry.created - start, 6),
            "rule": entry.rule,
            "action": entry.action.value,
            "worker": entry.worker,
            "start": entry.start,
            "stop": entry.stop,
            "source": entry.source,
            "target": entry.target,
            "peer": entry.peer,
            "priority": entry.priority,
            "ttl": entry.ttl,
            "reason": entry.reason,
            "way": self.way,
            "driver": self.driver or None,
            "fate": fate.value if fate is not None else "offered",
            "detail": entry.detail,
            "changed": round(entry.changed - start, 6),
        }


class FleetResidency:
    """One fleet's.

    Attributes:
        name: the fleet's.
        core: what to wish.
        workers: the fleet's, by id.
        silent: none of them understands any hint, so nothing is wished, at no cost.
        faults: times that a rule or a driver has failed: mistakes in the code.
    """

    __slots__ = ("_clock", "_delivery", "_prober", "_told", "core", "faults", "name", "silent", "workers")

    def __init__(
        self, name: str, core: "Residency", prober: "Prober", delivery: "Delivery", clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.core = core
        self.workers: Mapping[str, Worker] = {}
        self.silent = True
        self.faults = 0
        self._told = float("-inf")
        self._prober = prober
        self._delivery = delivery
        self._clock = clock

    def failed(self) -> None:
        """In an ``except``: count the exception, and log it if none was lately."""
        self.faults += 1
        now = self._clock()
        if now - self._told >= FAULT_EVERY:
            self._told = now
            _log.exception("residency failed; requests go on without hints", model=self.name, faults=self.faults)

    def listen(self) -> None:
        """Find out whether anybody understands anything; to be called when that may have changed."""
        self.silent = not any(self._prober.speakers(worker).all for worker in self.workers)

    def say(
        self, hints: Sequence[Hint], own: Subject | None = None, worker_id: str = ""
    ) -> "tuple[list[tuple[Speaker, Hint]], list[Note]]":
        """Send hints on their way. Synchronous; waits for nothing.

        Args:
            hints: from `core`.
            own: the prompt of a request that is about to be sent to `worker_id`; None: there is no such request.
            worker_id: see `own`.

        Returns:
            Those that this request is to carry, and a note on each hint.
        """
        inside: list[tuple[Speaker, Hint]] = []
        notes: list[Note] = []
        ledger = self.core.ledger
        for hint in hints:
            entry = ledger.open.get(hint.id)
            mine = own is not None and hint.subject is own and hint.worker == worker_id
            way = self._prober.speakers(hint.worker).way(hint, own=mine)
            if entry is not None:
                notes.append(
                    Note(entry, NOBODY, "")
                    if way is None
                    else Note(entry, INSIDE if way.inside else BESIDE, way.speaker.driver.name)
                )
            if way is None:
                ledger.fate(hint, Fate.SKIPPED, "no driver can say it to this worker", self._clock())
            elif way.inside:
                inside.append((way.speaker, hint))
            elif (worker := self.workers.get(hint.worker)) is not None:
                self._delivery.offer(hint, way.speaker, worker)
            else:
                ledger.fate(hint, Fate.SKIPPED, "its worker is gone", self._clock())
        return inside, notes

    def fate(
        self, hints: "Sequence[tuple[Speaker, Hint]]", fate: Fate, detail: str = "", now: float | None = None
    ) -> None:
        """What became of hints that a request carried; `now`: where the caller knows it."""
        if now is None:
            now = self._clock()
        ledger = self.core.ledger
        for _, hint in hints:
            ledger.fate(hint, fate, detail, now)

    def refused(self, hints: "Sequence[tuple[Speaker, Hint]]", detail: str) -> None:
        """A worker took offence at what a request carried, and took the request without: it is not said again for a while."""
        self.fate(hints, Fate.REFUSED, detail)
        for speaker, hint in hints:
            if self._prober.refuse(hint.worker, speaker):
                _log.warning("a worker refuses hints", worker=hint.worker, driver=speaker.name, detail=detail)

    def ended(self, session: str) -> int:
        """A session is over. How many hints that gave."""
        try:
            hints = self.core.session_ended(session, self._clock())
            self.say(hints)
        except Exception:  # noqa: BLE001 - whoever calls has nothing to do with it
            self.failed()
            return 0
        return len(hints)

    def reserved(self, session: str, stage: "Stage", worker: "Worker") -> None:
        """A slot is kept at `worker` for a conversation's request of `stage`: `gateway.admission.reservations.Warm`."""
        try:
            self.say(self.core.reserved(session, stage.name, worker, self._clock()))
        except Exception:  # noqa: BLE001 - the gate that calls has better things to do
            self.failed()

    def draining(self, worker: "Worker", among: "Collection[Worker] | None" = None) -> int:
        """A worker will be gone soon; one of `among` (None: all others) takes over. How many hints that gave."""
        others = [
            each
            for each in self.workers.values()
            if each is not worker and each.routable and (among is None or each in among)
        ]
        try:
            hints = self.core.draining(worker, others, self._clock())
            self.say(hints)
        except Exception:  # noqa: BLE001 - as above
            self.failed()
            return 0
        return len(hints)

    def document(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "model": self.name,
            "silent": self.silent,
            "faults": self.faults,
            **self.core.snapshot(),
            "workers": [
                probed.document() for worker in self.workers if (probed := self._prober.workers.get(worker)) is not None
            ],
        }


def moved_bytes(workers: "Mapping[str, Worker]", hint: Hint, call: "HintCall | None" = None) -> int:
    """Bytes of KV that a hint makes its worker move: what the call says, else its tokens at the worker's size of a token."""
    if hint.action is not Action.PREFETCH:
        return 0
    if call is not None and call.bytes_moved:
        return call.bytes_moved
    worker = workers.get(hint.worker)
    return 0 if worker is None else (hint.stop - hint.start) * worker.capabilities.profile.kv_bytes_per_token


def holds_of(feeds: "Callable[[], Feeds | None]") -> "Callable[[Subject], Mapping[str, Match]]":
    """A function that says what each worker holds of a subject now."""

    def holds(subject: Subject) -> "Mapping[str, Match]":
        known = feeds()
        if known is None or not subject.chains:
            return {}
        return known.match({size: Chain(size, list(hashes), subject.tokens) for size, hashes in subject.chains.items()})

    return holds
