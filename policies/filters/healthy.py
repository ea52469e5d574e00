"""Keep the workers that take new requests."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


class Healthy:
    """Drops workers that are not routable: warming up, draining, ejected or gone.

    Which ones those are is not decided here but by the gateway's health checks, its panic rule included.
    """

    __slots__ = ()

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:  # noqa: ARG002
        """The routable candidates."""
        for candidate in candidates:
            if not candidate.worker.routable:
                return [other for other in candidates if other.worker.routable]
        return candidates
