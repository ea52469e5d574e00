"""`drain`: a worker that is about to leave hands its live conversations over.

Each conversation that was there lately gets one worker to go to: the one that has most of it already, else the one with the least to do,
those that are to go there counted. What is in shared storage is fetched from there, the rest from the leaving worker's memory while it
still has it. So does what many conversations begin with and nobody else has. The policy is not told: it sees who holds what, and sends the next turn there by itself.
"""

from typing import TYPE_CHECKING, Final

from gateway.residency.rules.base import Context, Rule
from gateway.residency.rules.bring import bring
from policies.base import NO_MATCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.hints.model import Hint
    from gateway.config.residency import Drain
    from policies.base import WorkerView

MOST_PREFIXES: Final = 16
HOT: Final = 1.0
"""Conversations a minute that begin with a prefix, from which on it is worth moving by itself."""
REASON: Final = "its worker is about to leave"


class DrainRule(Rule):
    """See the module."""

    name = "drain"
    counts_heat = True

    def __init__(self, context: Context, numbers: "Drain") -> None:
        """`numbers`: as configured."""
        super().__init__(context)
        self._numbers = numbers

    def draining(self, into: "list[Hint]", worker: "WorkerView", others: "Sequence[WorkerView]", now: float) -> None:
        """Bring what lives at `worker` to `others`, the latest first."""
        load = {other.id: other.in_flight_tokens for other in others}
        self._conversations(into, worker, others, load, now)
        self._prefixes(into, worker, others, load, now)

    def _conversations(
        self,
        into: "list[Hint]",
        worker: "WorkerView",
        others: "Sequence[WorkerView]",
        load: dict[str, int],
        now: float,
    ) -> None:
        numbers = self._numbers
        least = max(1, numbers.min_tokens)
        moved = 0
        for session in self.context.sessions.latest_first:
            if moved >= numbers.most or now - session.seen > numbers.alive:
                break
            subject = session.subject
            if session.worker != worker.id or session.ended or subject is None or subject.tokens < least:
                continue
            holds = self.context.holds(subject)
            target = min(
                others,
                key=lambda other: (
                    -holds.get(other.id, NO_MATCH).device - holds.get(other.id, NO_MATCH).l1,
                    load[other.id],
                ),
            )
            leaving = holds.get(worker.id, NO_MATCH)
            moved += 1
            load[target.id] += subject.tokens
            bring(
                into,
                self.context.voice,
                self.name,
                subject,
                target,
                holds.get(target.id, NO_MATCH),
                now,
                stop=subject.tokens,
                least=least,
                reason=REASON,
                peers={worker.id: leaving},
                session=session,
            )

    def _prefixes(
        self,
        into: "list[Hint]",
        worker: "WorkerView",
        others: "Sequence[WorkerView]",
        load: dict[str, int],
        now: float,
    ) -> None:
        least = max(1, self._numbers.min_tokens)
        for prefix in self.context.heat.hottest(now, least)[:MOST_PREFIXES]:
            subject = prefix.subject
            if subject is None or prefix.heat(now) < HOT:
                continue
            holds = self.context.holds(subject)
            leaving = holds.get(worker.id, NO_MATCH)
            if leaving.device + leaving.l1 < prefix.tokens or any(
                holds.get(other.id, NO_MATCH).tokens >= prefix.tokens for other in others
            ):
                continue
            target = min(others, key=lambda other: load[other.id])
            load[target.id] += prefix.tokens
            said = bring(
                into,
                self.context.voice,
                self.name,
                subject,
                target,
                holds.get(target.id, NO_MATCH),
                now,
                stop=prefix.tokens,
                least=least,
                reason="many conversations begin with it, and its worker is about to leave",
                peers={worker.id: leaving},
            )
            self.context.heat.wait(prefix, said)
