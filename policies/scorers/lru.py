"""New prompts to the worker that got one least recently."""

from collections.abc import Sequence
from typing import ClassVar, Final

from policies.base import Candidate, Decision, RouteRequest
from policies.scorers.running_requests import shares

REMEMBERED: Final = 1024
"""Workers remembered beside twice the candidates of the last decision; those without a new prompt for longest are forgotten first."""


class Lru:
    """Cost: place among the workers by when they last got a prompt that nobody held, as a share in [0, 1]; 0 for the longest ago.

    Only for prompts that no candidate holds a part of: others cost the same everywhere. So new conversations spread, each to the
    worker whose cache has changed least. After llm-d's `no-hit-lru-scorer`.
    """

    __slots__ = ("_last", "_tick")
    needs_match: ClassVar[bool] = True

    def __init__(self) -> None:
        self._tick = 0
        self._last: dict[str, int] = {}  # worker id -> tick, least recent first

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """The share for each."""
        if _held(candidates):
            return [0.0] * len(candidates)
        ticks = sorted({self._last.get(candidate.worker.id, 0) for candidate in candidates})
        place = {tick: index for index, tick in enumerate(ticks)}
        return shares([place[self._last.get(candidate.worker.id, 0)] for candidate in candidates])

    def observe(self, request: RouteRequest, decision: Decision) -> None:  # noqa: ARG002
        """Remember who got a new prompt."""
        if _held(decision.candidates):
            return
        last = self._last
        self._tick += 1
        worker_id = decision.chosen.worker.id
        last.pop(worker_id, None)
        last[worker_id] = self._tick
        while len(last) > 2 * len(decision.candidates) + REMEMBERED:
            del last[next(iter(last))]


def _held(candidates: Sequence[Candidate]) -> bool:
    return any(candidate.match.tokens for candidate in candidates)
