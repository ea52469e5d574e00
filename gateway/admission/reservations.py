"""Slots that are kept for requests to come: when a conversation's planner starts, its generator's worker is chosen. No clock, no I/O."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.admission.stages import Stage
    from gateway.fleet.worker import Worker

SESSIONS: Final = 10_000
"""Conversations of which it is remembered where their latest request of a stage went."""

Warm = Callable[[str, "Stage", "Worker"], None]
"""Told of each reservation (conversation, stage, worker): the prefix may be fetched there."""


class Reservations:
    """One fleet's.

    Attributes:
        held: slots that are kept, by worker; those without are left out.
        warm: see `Warm`; None: nobody wants to know.
    """

    __slots__ = ("_latest", "_slots", "held", "warm")

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.warm: Warm | None = None
        self._slots: OrderedDict[tuple[str, str], tuple[Worker, float]] = OrderedDict()
        self._latest: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Whether a conversation's request of a stage has one."""
        return key in self._slots

    def reserve(
        self,
        stage: "Stage",
        session: str,
        workers: "Sequence[Worker]",
        free: "Callable[[Worker], float]",
        now: float,
    ) -> "Worker | None":
        """Keep a slot for `stage.hold` seconds at the worker that had the conversation's last one of that stage, else at the emptiest.

        Args:
            stage: of the request to come.
            session: its conversation.
            workers: with a free slot.
            free: how many one has.
            now: seconds.

        Returns:
            The worker; None: there is none, or one is reserved already.
        """
        key = (session, stage.name)
        if key in self._slots or not workers:
            return None
        last = self._latest.get(key)
        chosen = next((worker for worker in workers if worker.id == last), None) or min(
            workers, key=lambda worker: (-free(worker), worker.backlog)
        )
        self.held[chosen.id] = self.held.get(chosen.id, 0) + 1
        self._slots[key] = (chosen, now + stage.hold)
        if self.warm is not None:
            self.warm(session, stage, chosen)
        return chosen

    def went(self, stage: "Stage", session: str, worker: str) -> None:
        """A conversation's request of a stage went to `worker`: the next one may want to go there, too."""
        self._latest[session, stage.name] = worker
        if len(self._latest) > SESSIONS:
            self._latest.popitem(last=False)

    def claim(self, session: str, stage: str) -> bool:
        """A request of that conversation and stage has come: its slot is kept no more. Whether there was one."""
        found = self._slots.pop((session, stage), None)
        if found is None:
            return False
        self._let_go(found[0])
        return True

    def expire(self, now: float) -> None:
        """Let go of those whose time is over."""
        over = [key for key, (_, until) in self._slots.items() if until <= now]
        for key in over:
            self._let_go(self._slots.pop(key)[0])

    def _let_go(self, worker: "Worker") -> None:
        self.held[worker.id] -= 1
        if not self.held[worker.id]:
            del self.held[worker.id]
