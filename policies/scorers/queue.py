"""Shortest queue first."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest
from policies.scorers.running_requests import shares


class Queue:
    """Cost: ``(pending_i - least) / (most - least)``, pending = requests whose answer has not begun. Unit: a share in [0, 1].

    llm-d's `queue-scorer` (``(max - x) / (max - min)``) turned round, of what the gateway counts itself instead of a scraped gauge.
    """

    __slots__ = ()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """The share for each."""
        return shares([candidate.worker.pending for candidate in candidates])
