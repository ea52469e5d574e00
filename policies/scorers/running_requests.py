"""Fewest streams first."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


class RunningRequests:
    """Cost: ``(running_i - least) / (most - least)``, running = requests whose answer has begun. Unit: a share in [0, 1].

    llm-d's `running-requests-size-scorer` turned round, of what the gateway counts itself instead of a scraped gauge; all 0 when equal.
    """

    __slots__ = ()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:  # noqa: ARG002
        """The share for each."""
        return shares([candidate.worker.in_flight - candidate.worker.pending for candidate in candidates])


def shares(values: Sequence[float]) -> list[float]:
    """Where each value lies between the least (0) and the most (1); all 0 when they are equal."""
    least = min(values)
    span = max(values) - least
    return [(value - least) / span for value in values] if span else [0.0] * len(values)
