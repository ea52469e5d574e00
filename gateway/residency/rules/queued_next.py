"""`queued-next`: while a request waits for its turn, what it will need is fetched.

The gateway knows what each worker will compute next, before the worker does. A request that waits will probably go where the policy
would send it now; what that worker has of its prompt in slower memory is brought nearer meanwhile, and what only another worker has is
fetched from there. (CachedAttention calls this scheduler-aware fetching.)
"""

from typing import TYPE_CHECKING

from gateway.residency.rules.base import Asked, Context, Rule
from gateway.residency.rules.bring import bring

if TYPE_CHECKING:
    from backends.hints.model import Hint
    from gateway.config.residency import QueuedNext
    from policies.base import Match, WorkerView


class QueuedNextRule(Rule):
    """See the module."""

    name = "queued-next"

    def __init__(self, context: Context, numbers: "QueuedNext") -> None:
        """`numbers`: as configured."""
        super().__init__(context)
        self._numbers = numbers

    def waiting(self, into: "list[Hint]", asked: Asked, worker: "WorkerView", match: "Match") -> None:
        """Once for each worker that it is expected to go to."""
        if asked.waited == worker.id:
            return
        asked.waited = worker.id
        subject, numbers = asked.subject, self._numbers
        if subject.tokens < numbers.min_tokens:
            return
        bring(
            into,
            self.context.voice,
            self.name,
            subject,
            worker,
            match,
            asked.now,
            stop=subject.tokens,
            least=max(1, numbers.min_tokens),
            reason="it waits for its turn",
            peers=self.context.holds(subject) if numbers.peers else None,
            session=asked.session,
        )
