"""What one fleet's workers should keep and fetch: the rules, the conversations, the books and the budget, tied together.

Whoever sends requests calls it as they go by, and gets hints back; how a hint is said, and to whom it can be said at all, is not known
here. The gateway calls it in real time and the replay in virtual time: no clock, no I/O.

=================  ============================================================================
`waiting`          a request waits for its turn
`sent`             it goes to a worker (on the hot path)
`answered`         it has ended
`reserved`         a slot is kept for a conversation's next stage
`session_ended`    a client says that a conversation is over
`draining`         a worker will be gone soon
`tick`             about once a second
`event`            a worker has stored blocks, while `wants_events`
=================  ============================================================================
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from backends.hints.model import Action, Hint, Subject, TierName
from gateway.config import residency as config
from gateway.config.base import Struct
from gateway.residency.budget import Budget
from gateway.residency.heat import Heat
from gateway.residency.judging import judge
from gateway.residency.ledger import Ledger
from gateway.residency.rules.base import Asked, Context, Rule, Voice
from gateway.residency.rules.client_words import ClientWordsRule
from gateway.residency.rules.drain import DrainRule
from gateway.residency.rules.hot_prefix import HotPrefixRule
from gateway.residency.rules.planner import PlannerRule
from gateway.residency.rules.queued_next import QueuedNextRule
from gateway.residency.rules.retain import RetainRule
from gateway.residency.rules.session_end import SessionEndRule
from gateway.residency.sessions import Session, Sessions
from policies.base import Match, WorkerView

if TYPE_CHECKING:
    from gateway.residency.ledger import Entry

__all__ = ["Asked", "Residency"]

TICK: Final = 1.0
"""Seconds between two ticks."""

_Numbers = TypeVar("_Numbers", bound=Struct)
_Build = Callable[[Context, config.ResidencyRules], Rule | None]


def _built(
    rule: Callable[[Context, _Numbers], Rule],
    kind: type[_Numbers],
    value: Callable[[config.ResidencyRules], bool | _Numbers],
) -> _Build:
    """How to build a rule from its part of the configuration."""

    def build(context: Context, rules: config.ResidencyRules) -> Rule | None:
        found = config.numbers(value(rules), kind)
        return None if found is None else rule(context, found)

    return build


RULES: Final[Sequence[_Build]] = (
    _built(QueuedNextRule, config.QueuedNext, lambda rules: rules.queued_next),
    _built(RetainRule, config.Retain, lambda rules: rules.retain),
    _built(SessionEndRule, config.SessionEnd, lambda rules: rules.session_end),
    _built(ClientWordsRule, config.ClientWordsRule, lambda rules: rules.client_words),
    _built(HotPrefixRule, config.HotPrefixRule, lambda rules: rules.hot_prefix),
    _built(PlannerRule, config.Planner, lambda rules: rules.planner),
    _built(DrainRule, config.Drain, lambda rules: rules.drain),
)


class Residency:
    """One fleet's.

    Attributes:
        ledger: the books; whoever delivers hints tells it what became of them.
        budget: how much may be said; whoever delivers hints asks it first.
        sessions: the conversations.
    """

    __slots__ = (
        "_answered",
        "_draining",
        "_ended",
        "_heat",
        "_last_tick",
        "_reserved",
        "_sent",
        "_sent_stage",
        "_sent_words",
        "_ticks",
        "_waiting",
        "budget",
        "ledger",
        "rules",
        "sessions",
    )

    def __init__(
        self,
        settings: config.ResidencyConfig,
        *,
        workers: Callable[[], Sequence[WorkerView]],
        holds: Callable[[Subject], Mapping[str, Match]],
    ) -> None:
        """Build the rules that are on.

        Args:
            settings: the section `residency`.
            workers: the fleet's.
            holds: who holds how much of a prompt now, by worker id.
        """
        retain = config.numbers(settings.rules.retain, config.Retain) or config.Retain()
        self.sessions = Sessions(settings.sessions, settings.memory, retain.gap)
        self.ledger = Ledger(settings.throttle, self._hint_ended)
        self.budget = Budget(settings.budget, workers, self.ledger.open.__contains__)
        context = Context(workers, holds, self.sessions, Voice(self.ledger), Heat())
        self.rules = [rule for build in RULES if (rule := build(context, settings.rules)) is not None]
        self._waiting = [rule.waiting for rule in self.rules if type(rule).waiting is not Rule.waiting]
        self._heat = context.heat if any(rule.counts_heat for rule in self.rules) else None
        sent = [rule for rule in self.rules if type(rule).sent is not Rule.sent]
        self._sent = [rule.sent for rule in sent if rule.needs == ""]
        self._sent_words = [rule.sent for rule in sent if rule.needs == "words"]
        self._sent_stage = [rule.sent for rule in sent if rule.needs == "stage"]
        self._answered = [rule.answered for rule in self.rules if type(rule).answered is not Rule.answered]
        self._reserved = [rule.reserved for rule in self.rules if type(rule).reserved is not Rule.reserved]
        self._ended = [rule.ended for rule in self.rules if type(rule).ended is not Rule.ended]
        self._draining = [rule.draining for rule in self.rules if type(rule).draining is not Rule.draining]
        self._ticks = [rule.tick for rule in self.rules if type(rule).tick is not Rule.tick]
        self._last_tick = 0.0

    def waiting(self, asked: Asked, worker: WorkerView, match: Match) -> list[Hint]:
        """It waits, and will probably go to `worker`, which holds `match` of it. `asked.now` is the time."""
        hints: list[Hint] = []
        self._session(asked, match)
        for waiting in self._waiting:
            waiting(hints, asked, worker, match)
        return hints

    def sent(self, asked: Asked, worker: WorkerView, match: Match) -> list[Hint]:
        """It goes to `worker` now, which holds `match` of it. `asked.now` is the time. On the hot path.

        Hints whose `subject` is the request's own may be said inside it; that is for the caller to see. After a retry it is called again.
        """
        session = self._session(asked, match)
        # What was said before is judged by what this request finds; what is said now, by the next one.
        if session.entries:
            asked.before = (*asked.before, *session.entries) if asked.before else session.entries
            session.entries = []
        hints: list[Hint] = []
        held = match.device + match.l1 + match.l2
        if self._heat is not None and held and not session.turns:
            self._heat.saw(asked.subject, held, asked.now)
        for sent in self._sent:
            sent(hints, asked, worker, match)
        if asked.words is not None:
            for sent in self._sent_words:
                sent(hints, asked, worker, match)
        if asked.stage:
            for sent in self._sent_stage:
                sent(hints, asked, worker, match)
        self.sessions.sent(session, asked.subject, worker.id, held, asked.now)
        return hints

    def answered(
        self,
        asked: Asked,
        worker_id: str,
        cached: Match | int,
        now: float,
    ) -> list[Hint]:
        """It has ended.

        Args:
            asked: the request, as given to `sent`.
            worker_id: who answered; empty: nobody did.
            cached: tokens of its prompt that the worker says it had, or what was believed at the decision.
            now: seconds.
        """
        session = asked.session
        if session is None:
            return []
        if not worker_id:
            for entry in asked.before:
                session.remember(entry)
            asked.before = ()
            return []
        held = cached if isinstance(cached, int) else cached.device + cached.l1 + cached.l2
        if asked.before:
            self._judge(session, asked.before, worker_id, held, now)
            asked.before = ()
        if self._heat is not None and self._heat.awaited:
            self._judge(None, self._heat.waited(asked.subject, asked.now), worker_id, held, now)
        hints: list[Hint] = []
        for answered in self._answered:
            answered(hints, asked, worker_id, held, now)
        if asked.words is not None and asked.words.session_end:
            self.sessions.silent(session)
        return hints

    def reserved(self, asked_or_session: Asked | str, stage: str, worker: WorkerView, now: float) -> list[Hint]:
        """A slot is kept at `worker` for the next request of a conversation and of `stage`."""
        name = asked_or_session if isinstance(asked_or_session, str) else asked_or_session.subject.session
        hints: list[Hint] = []
        for reserved in self._reserved:
            reserved(hints, name, stage, worker, now)
        return hints

    def session_ended(self, session: str, now: float) -> list[Hint]:
        """A client says that the conversation which it calls so is over."""
        hints: list[Hint] = []
        for each in self.sessions.named(session):
            if each.ended:
                continue
            self.sessions.silent(each)
            for ended in self._ended:
                ended(hints, each, now)
        return hints

    def draining(self, worker: WorkerView, others: Sequence[WorkerView], now: float) -> list[Hint]:
        """`worker` will be gone soon; `others` are there to take over."""
        hints: list[Hint] = []
        if others:
            for draining in self._draining:
                draining(hints, worker, others, now)
        return hints

    @property
    def next_tick(self) -> float:
        """When `tick` wants to be called again, in seconds; infinite while there is nothing to wait for."""
        return self._last_tick + TICK if self.ledger.open or len(self.sessions) else float("inf")

    def tick(self, now: float) -> list[Hint]:
        """Time has passed: conversations may have fallen silent, prefixes cooled, hints and pins expired."""
        self._last_tick = now
        self.ledger.expire(now)
        self.budget.tick(now)
        if self._heat is not None and self._heat.awaited:
            self._heat.settle_waits()
        hints: list[Hint] = []
        for tick in self._ticks:
            tick(hints, now)
        return hints

    @property
    def wants_events(self) -> bool:
        """Whether `event` is of any use now."""
        return bool(self.ledger.watched)

    def event(self, worker_id: str, tier: TierName, hashes: Sequence[int], stored: bool, now: float) -> None:
        """A worker has stored blocks in a memory, or removed them; `hashes` are the gateway's own."""
        if not stored or not self.ledger.watched:
            return
        watched = self.ledger.watched
        for mark in hashes:
            if (worker_id, mark) in watched:
                self.ledger.event(worker_id, tier, mark, now)

    def degraded(self) -> list[str]:
        """What works less well than it should, in words: rules that are held back. For `/readyz`."""
        return self.ledger.throttled()

    def snapshot(self) -> dict[str, Any]:
        """For the inspector: sums by rule, the latest hints with their fates, conversations and budget."""
        return {
            "rules": {rule.name: {} for rule in self.rules} | self.ledger.by_rule(),
            "hints": self.ledger.rows(),
            "open": len(self.ledger.open),
            "sessions": {
                "count": len(self.sessions),
                "bytes": self.sessions.bytes,
                "median_gap_seconds": round(self.sessions.gaps.median, 3) if self.sessions.gaps.count else None,
            },
            "budget": self.budget.document(),
            "degraded": self.degraded(),
        }

    def _session(self, asked: Asked, match: Match) -> Session:
        session = asked.session
        if session is None:
            session = asked.session = self.sessions.find(asked.subject, asked.stage or "", match.device + match.l1)
        return session

    def _judge(
        self, session: Session | None, entries: "Iterable[Entry]", worker_id: str, held: int, now: float
    ) -> None:
        """End the hints whose worth has shown; the others are waited for on."""
        for entry in entries:
            if entry.ended:
                continue
            verdict = judge(entry, worker_id, held)
            if verdict is None:
                if session is not None:
                    session.remember(entry)
            else:
                self.ledger.fate(entry, verdict[0], verdict[1], now)

    def _hint_ended(self, entry: "Entry") -> None:
        if entry.action is Action.PIN:
            self.budget.ended(entry)
