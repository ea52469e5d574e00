"""`hot-prefix`: what many conversations begin with is brought to more workers as it gets hot, and let go as it cools.

The prefix of a new conversation is what the worker that it goes to holds of it already: a system prompt, a document. How many new
conversations a minute begin with one is its heat. From `up` a minute and worker on one more worker should hold it (the one with the
least to do gets it from one that has it), below `down` one less (the one with the most to do may forget it). While it is hot, each request
that begins with it asks its worker to keep it.

Off unless it is configured: where nothing else than a warm request can bring it, that costs a prefill.
"""

from typing import TYPE_CHECKING, Final

from backends.hints.model import Action
from gateway.residency.heat import HALF_LIFE, Prefix, in_prompt
from gateway.residency.rules.base import Asked, Context, Rule, last_block
from gateway.residency.rules.bring import bring
from policies.base import NO_MATCH

if TYPE_CHECKING:
    from backends.hints.model import Hint
    from gateway.config.residency import HotPrefixRule as Numbers
    from policies.base import Match, WorkerView

PRIORITY: Final = 90
AGAIN: Final = 15.0
"""Seconds from one try to bring a prefix somewhere to the next."""


class HotPrefixRule(Rule):
    """See the module.

    Attributes:
        heat: of all prefixes.
    """

    name = "hot-prefix"
    counts_heat = True

    def __init__(self, context: Context, numbers: "Numbers") -> None:
        """`numbers`: as configured."""
        super().__init__(context)
        self._numbers = numbers
        self.heat = context.heat

    def sent(self, into: "list[Hint]", asked: Asked, worker: "WorkerView", match: "Match") -> None:  # noqa: ARG002 - a Rule's signature
        """Where a conversation begins with something hot, that is to be kept."""
        if not self.heat.cared:
            return
        session, subject = asked.session, asked.subject
        for prefix in in_prompt(self.heat.cared, subject):
            if session is None or not session.turns:
                self.context.voice.say(
                    into,
                    self.name,
                    Action.RETAIN,
                    worker.id,
                    subject,
                    asked.now,
                    stop=prefix.tokens,
                    priority=PRIORITY,
                    ttl=2 * HALF_LIFE,
                    reason="many conversations begin with it",
                )

    def tick(self, into: "list[Hint]", now: float) -> None:
        """Follow the heat."""
        numbers = self._numbers
        changed = self.heat.settle(
            now,
            up=numbers.up,
            down=numbers.down,
            replicas=numbers.replicas,
            sessions=numbers.sessions,
            most=numbers.most,
            least=numbers.min_tokens,
        )
        for prefix, before in changed:
            if prefix.wanted < before:
                self._let_go(into, prefix, now)
            else:
                prefix.released.clear()
        for prefix in self.heat.cared:
            self._spread(into, prefix, now)

    def _spread(self, into: "list[Hint]", prefix: Prefix, now: float) -> None:
        """Bring it to one more worker, if too few have it or are about to, and the last try was a while ago."""
        if prefix.wanted < 2 or now - prefix.spread_at < AGAIN:
            return
        subject = prefix.subject
        if subject is None:
            return
        holds = self.context.holds(subject)
        having = {name for name, match in holds.items() if match.device >= prefix.tokens}
        having |= {entry.worker for entry in prefix.entries if not entry.ended and entry.action is Action.PREFETCH}
        if not having or len(having) >= prefix.wanted:
            return
        free = [worker for worker in self.context.workers() if worker.routable and worker.id not in having]
        if not free:
            return
        target = min(free, key=_busy)
        prefix.spread_at = now
        said = bring(
            into,
            self.context.voice,
            self.name,
            subject,
            target,
            holds.get(target.id, NO_MATCH),
            now,
            stop=prefix.tokens,
            least=max(1, self._numbers.min_tokens // 2),
            reason=f"{prefix.heat(now):.0f} conversations a minute begin with it",
            peers=holds,
        )
        self.heat.wait(prefix, said)

    def _let_go(self, into: "list[Hint]", prefix: Prefix, now: float) -> None:
        """One worker of those that have it, and are too many, may forget it."""
        subject = prefix.subject
        if subject is None:
            return
        holds = self.context.holds(subject)
        having = [
            worker
            for worker in self.context.workers()
            if worker.id not in prefix.released and holds.get(worker.id, NO_MATCH).device >= prefix.tokens
        ]
        if len(having) <= max(1, prefix.wanted):
            # The last copy goes the way of everything else: by not being used.
            return
        worker = max(having, key=_busy)
        prefix.released.add(worker.id)
        entry = self.context.voice.say(
            into,
            self.name,
            Action.DEMOTE,
            worker.id,
            subject,
            now,
            stop=prefix.tokens,
            priority=0,
            reason="fewer conversations begin with it",
            mark=last_block(subject, prefix.tokens),
        )
        if entry is not None:
            self.heat.wait(prefix, [entry])


def _busy(worker: "WorkerView") -> tuple[float, int]:
    return worker.in_flight_tokens, worker.in_flight
