"""Who was served how long ago: for policies in which waiting counts."""

from typing import Final

from policies.base import Decision

REMEMBERED: Final = 1024
"""Workers remembered beside twice the candidates of the last decision; the least recently served are forgotten first."""


class Turns(dict[str, int]):
    """Worker id to the number of the decision that served it last, least recently served first. Others count as 0: before all."""

    __slots__ = ("_tick",)

    def __init__(self) -> None:
        super().__init__()
        self._tick = 0

    def serve(self, decision: Decision) -> None:
        """Send the chosen worker to the end of the line."""
        self._tick += 1
        worker_id = decision.chosen.worker.id
        self.pop(worker_id, None)
        self[worker_id] = self._tick
        while len(self) > 2 * len(decision.candidates) + REMEMBERED:
            del self[next(iter(self))]
