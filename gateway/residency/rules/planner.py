"""`planner`: when a conversation's first stage starts, what its next stage will need is fetched.

A slot is reserved at a worker for the next stage's request (`gateway.admission.reservations`) long before that request comes. What it
will begin with is known: the prompt of that stage in this conversation before; for a new conversation, what all prompts of that stage
have in common (instructions, tools, few-shot examples).
"""

from typing import TYPE_CHECKING, Final

from gateway.residency.common import Commons
from gateway.residency.rules.base import Asked, Context, Rule
from gateway.residency.rules.bring import bring
from policies.base import NO_MATCH

if TYPE_CHECKING:
    from backends.hints.model import Hint
    from gateway.config.residency import Planner
    from gateway.residency.sessions import Session
    from policies.base import Match, WorkerView

STAGES: Final = 64
REASON: Final = "a slot is kept for the stage that follows"


class PlannerRule(Rule):
    """See the module."""

    name = "planner"
    needs = "stage"

    def __init__(self, context: Context, numbers: "Planner") -> None:
        """`numbers`: as configured."""
        super().__init__(context)
        self._numbers = numbers
        self._commons = Commons(STAGES, subjects=True)

    def sent(self, into: "list[Hint]", asked: Asked, worker: "WorkerView", match: "Match") -> None:  # noqa: ARG002 - a Rule's signature
        """Learn what the prompts of a stage have in common. Says nothing."""
        if asked.stage:
            self._commons.saw(asked.stage, asked.subject, asked.session)

    def reserved(self, into: "list[Hint]", name: str, stage: str, worker: "WorkerView", now: float) -> None:
        """Bring it to `worker`."""
        session = self.context.sessions.get(name, stage) if name else None
        if session is not None and session.subject is not None:
            subject, stop = session.subject, session.subject.tokens
        else:
            common = self._commons.get(stage)
            if common is None or common.subject is None:
                return
            subject, stop = common.subject, common.tokens
        if stop < max(1, self._numbers.min_tokens):
            return
        holds = self.context.holds(subject)
        waiting: Session | None = session
        if waiting is None and name:
            # The request that will show what this was worth is the first of its conversation and stage: it is made known now.
            waiting = self.context.sessions.expect(name, stage)
        bring(
            into,
            self.context.voice,
            self.name,
            subject,
            worker,
            holds.get(worker.id, NO_MATCH),
            now,
            stop=stop,
            least=max(1, self._numbers.min_tokens),
            reason=REASON,
            peers=holds,
            session=waiting,
        )
