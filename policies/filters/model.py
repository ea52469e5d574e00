"""Keep the workers that serve the request's model."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


class Model:
    """Drops workers that serve another model than the request's.

    The gateway gives a policy the workers of one fleet, where this filter has nothing to drop; it is for callers that mix
    the candidates of several fleets. A worker that calls the fleet's model by a name of its own (`workers[].model` in the
    configuration) stays if that name is in `also`.
    """

    __slots__ = ("_also",)

    def __init__(self, *, also: Sequence[str] = ()) -> None:
        """`also`: further names under which workers serve the models that requests ask for."""
        self._also = frozenset(also)

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates whose worker serves `request.model`."""
        names = self._also | {request.model}
        for candidate in candidates:
            if candidate.worker.model not in names:
                return [other for other in candidates if other.worker.model in names]
        return candidates
