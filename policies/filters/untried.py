"""Send a retry elsewhere."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


class Untried:
    """Drops workers that earlier attempts of this request used, unless no other is left."""

    __slots__ = ()

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates that no earlier attempt used; all of them when every one was used."""
        tried = request.tried
        if not tried:
            return candidates
        return [candidate for candidate in candidates if candidate.worker.id not in tried] or candidates
