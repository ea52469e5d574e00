"""`retain`: between two turns of a live conversation its prompt is kept, for as long and as firmly as its next turn is expected to take.

What is learned are the gaps from one turn to the next (`gateway.residency.gaps`): of this conversation and, before it has any, of all.
It is kept for the configured quantile of its gaps; the firmer, the sooner it comes back compared with others: 60 for one as quick as the
fleet's median, 10 more or less for each factor of two. Nothing is said of first turns where conversations mostly have no second.
"""

from math import log
from typing import TYPE_CHECKING, Final

from backends.hints.model import Action
from gateway.residency.gaps import score
from gateway.residency.rules.base import Asked, Context, Rule

if TYPE_CHECKING:
    from backends.hints.model import Hint
    from gateway.config.residency import Retain
    from policies.base import Match, WorkerView

MIDDLE: Final = 60
STEP: Final = 10
LOWEST, HIGHEST = 51, 80
"""Above what nothing is said of (50), below what a client asks for itself."""
ODDS: Final = 0.3
"""Nothing is said of a turn after which, by what was seen of others, fewer come back."""


_DOUBLE: Final = log(2.0)


class RetainRule(Rule):
    """See the module."""

    name = "retain"

    def __init__(self, context: Context, numbers: "Retain") -> None:
        """`numbers`: as configured."""
        super().__init__(context)
        self._numbers = numbers
        self._score = score(numbers.quantile)

    def sent(self, into: "list[Hint]", asked: Asked, worker: "WorkerView", match: "Match") -> None:  # noqa: ARG002 - a Rule's signature
        """About the request's own prompt."""
        subject, session, numbers = asked.subject, asked.session, self._numbers
        if subject.tokens < numbers.min_tokens or session is None:
            return
        words = asked.words
        if words is not None and words.session_end:
            return
        sessions = self.context.sessions
        if sessions.returns.odds(session.turns + 1) < ODDS:
            return
        gaps = session.gaps
        if gaps is None:
            priority, ttl = MIDDLE, sessions.gaps.quantile(self._score)
        else:
            # Both means are natural logarithms.
            priority = int(MIDDLE + (sessions.gaps.mean - gaps.mean) * (STEP / _DOUBLE))
            priority = LOWEST if priority < LOWEST else min(priority, HIGHEST)
            ttl = gaps.quantile(self._score)
        self.context.voice.say(
            into,
            self.name,
            Action.RETAIN,
            worker.id,
            subject,
            asked.now,
            stop=subject.tokens,
            priority=priority,
            ttl=max(numbers.shortest, min(numbers.longest, ttl)),
            reason="its next turn is expected",
            session=session,
        )
