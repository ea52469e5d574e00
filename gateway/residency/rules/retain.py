"""`retain`: a prompt and its answer are kept for as long as they are expected to be worth the room that they take.

For how long is learned by `gateway.residency.keeping`: each part of a prompt (what many share, what is one conversation's) gets a time of
its own, from how soon such parts came back, and from how short the fleet's device memory is; while it is not short, nothing is said.

Where nobody knows how much memory the workers have, the gaps from one turn to the next (`gateway.residency.gaps`) tell: a prompt is kept for
the configured quantile of its conversation's gaps, or of everybody's where that is longer. Nothing is said of turns after which few
come back.

All are kept equally firmly: what was used longest ago still goes first among that whose time is not over, as without hints. Keeping those
firmer that come back sooner was tried and was worse (docs/adr/0017-residency-rules.md, 0019).
"""

from math import ceil
from typing import TYPE_CHECKING, Final

from backends.hints.model import Action
from gateway.residency.gaps import score
from gateway.residency.keeping.model import KeepingModel, Kept
from gateway.residency.rules.base import Asked, Context, Rule
from gateway.residency.sessions import tail_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.hints.model import Hint
    from gateway.config.residency import Retain
    from gateway.residency.keeping.model import Directive
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
        self._model: KeepingModel | None = None
        self._block_size = 0

    def sent(self, into: "list[Hint]", asked: Asked, worker: "WorkerView", match: "Match") -> None:  # noqa: ARG002 - a Rule's signature
        """About the request's own prompt."""
        subject = asked.subject
        kept = asked.kept
        if kept is None and (model := self._model_of(asked)) is not None:
            kept = asked.kept = model.asked(tail_chain(subject), asked.now)
        words = asked.words
        if subject.tokens < self._numbers.min_tokens or (words is not None and words.session_end):
            return
        if isinstance(kept, Kept):
            self._say(into, asked, worker.id, kept.directives, kept.blocks, asked.now)
        else:
            self._by_gaps(into, asked, worker.id)

    def answered(self, into: "list[Hint]", asked: Asked, worker: str, held: int, now: float) -> None:  # noqa: ARG002 - as above
        """The answer's length tells more: what was said may have to be said anew."""
        kept, model = asked.kept, self._model
        if isinstance(kept, Kept) and model is not None:
            directives = model.answered(kept, asked.output_tokens, now)
            words = asked.words
            if directives and asked.subject.tokens >= self._numbers.min_tokens and not (words and words.session_end):
                self._say(into, asked, worker, directives, kept.blocks, now)

    def tick(self, into: "list[Hint]", now: float) -> None:  # noqa: ARG002 - as above
        """Follow the fleet's memory. Says nothing."""
        if self._model is not None and (capacity := self._capacity()):
            self._model.resize(self._block_size, capacity)

    def _model_of(self, asked: Asked) -> KeepingModel | None:
        """The model, once there are prompts with blocks and it is known how much the fleet's memory holds."""
        if self._model is None and asked.subject.chains and (capacity := self._capacity()):
            self._block_size = min(asked.subject.chains)
            self._model = KeepingModel(self._block_size, capacity)
        return self._model if self._block_size in asked.subject.chains else None

    def _capacity(self) -> int:
        """Tokens of device memory in the whole fleet; 0 where a worker's is not known."""
        total = 0
        for worker in self.context.workers():
            tokens = worker.capabilities.kv_capacity_tokens
            if not tokens:
                return 0
            total += tokens
        return total

    def _say(
        self, into: "list[Hint]", asked: Asked, worker: str, directives: "Sequence[Directive]", blocks: int, now: float
    ) -> None:
        subject = asked.subject
        size = self._block_size
        for index, run in enumerate(directives):
            last = run.stop >= blocks
            said = self.context.voice.say(
                into,
                self.name,
                Action.RETAIN,
                worker,
                subject,
                now,
                start=run.start * size,
                stop=subject.tokens if last else run.stop * size,
                priority=run.priority,
                ttl=float(ceil(run.ttl)),
                reason="it is worth its room for so long",
                answer=last,
                follows=index > 0,
                session=asked.session,
            )
            if said is None:
                return

    def _by_gaps(self, into: "list[Hint]", asked: Asked, worker: str) -> None:
        subject, session, numbers = asked.subject, asked.session, self._numbers
        sessions = self.context.sessions
        if session is None or sessions.returns.odds(session.turns + 1) < ODDS:
            return
        ttl = sessions.gaps.quantile(self._score)
        if session.gaps is not None:
            ttl = max(ttl, session.gaps.quantile(self._score))
        self.context.voice.say(
            into,
            self.name,
            Action.RETAIN,
            worker,
            subject,
            asked.now,
            stop=subject.tokens,
            priority=PRIORITY,
            ttl=max(numbers.shortest, min(numbers.longest, ttl)),
            reason="its next turn is expected",
            answer=True,
            session=session,
        )
