"""New prompts to the worker that got one least recently."""

from collections.abc import Sequence
from typing import ClassVar

from policies.base import Candidate, Decision, RouteRequest
from policies.scorers.running_requests import shares
from policies.turns import Turns


class Lru:
    """Cost: place among the workers by when they last got a prompt that nobody held, as a share in [0, 1]; 0 for the longest ago.

    Only for prompts that no candidate holds a part of: others cost the same everywhere. So new conversations spread, each to the
    worker whose cache has changed least. After llm-d's `no-hit-lru-scorer`.
    """

    __slots__ = ("_last",)
    needs_match: ClassVar[bool] = True

    def __init__(self) -> None:
        self._last = Turns()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """The share for each."""
        if _held(candidates):
            return [0.0] * len(candidates)
        ticks = sorted({self._last.get(candidate.worker.id, 0) for candidate in candidates})
        place = {tick: index for index, tick in enumerate(ticks)}
        return shares([place[self._last.get(candidate.worker.id, 0)] for candidate in candidates])

    def observe(self, request: RouteRequest, decision: Decision) -> None:  # noqa: ARG002
        """Remember who got a new prompt."""
        if not _held(decision.candidates):
            self._last.serve(decision)


def _held(candidates: Sequence[Candidate]) -> bool:
    return any(candidate.match.tokens for candidate in candidates)
