"""`retain`: between two turns of a conversation its prompt and its answer are kept.

For how long is learned from the gaps from one turn to the next (`gateway.residency.gaps`): for the configured quantile of the
conversation's own gaps, or of everybody's where that is longer. Nothing is said of turns after which few come back.

All are kept equally firmly: what was used longest ago still goes first among that whose time is not over, as without hints. Keeping those
firmer that come back sooner was tried and was worse (docs/adr/0017-residency-rules.md), and so were times learned for each part of a
prompt (0019). On recorded traffic it has not been better than LRU so far: it is off unless it is asked for.
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
        subject, session, numbers, words = asked.subject, asked.session, self._numbers, asked.words
        if session is None or subject.tokens < numbers.min_tokens or (words is not None and words.session_end):
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
