"""`retain`: between two turns of a live conversation its prompt is kept, for as long as its next turn is expected to take.

What is learned are the gaps from one turn to the next (`gateway.residency.gaps`): of this conversation and, before it has any, of all. The
prompt and its answer are kept for the configured quantile of its gaps, or of everybody's where that is longer; a conversation that comes
back sooner or later than others is known better with each turn. Nothing is said of turns after which few come back.

All conversations are kept equally firmly: the one used longest ago still goes first among those whose time is not over, as without hints.
Keeping those firmer that come back sooner was tried and was worse (docs/adr/0017-residency-rules.md).
"""

from typing import TYPE_CHECKING, Final

from backends.hints.model import Action
from gateway.residency.gaps import score
from gateway.residency.rules.base import Asked, Context, Rule

if TYPE_CHECKING:
    from backends.hints.model import Hint
    from gateway.config.residency import Retain
    from policies.base import Match, WorkerView

PRIORITY: Final = 60
"""Above what nothing is said of (50), below what a client asks for itself."""
ODDS: Final = 0.3
"""Nothing is said of a turn after which, by what was seen of others, fewer come back."""


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
        ttl = sessions.gaps.quantile(self._score)
        if session.gaps is not None:
            ttl = max(ttl, session.gaps.quantile(self._score))
        self.context.voice.say(
            into,
            self.name,
            Action.RETAIN,
            worker.id,
            subject,
            asked.now,
            stop=subject.tokens,
            priority=PRIORITY,
            ttl=max(numbers.shortest, min(numbers.longest, ttl)),
            reason="its next turn is expected",
            answer=True,
            session=session,
        )
