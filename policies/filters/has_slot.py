"""Prefer the workers that have a free slot."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


class HasSlot:
    """Drops workers with as many requests in flight as slots, unless all are full; one that does not tell its slots has room.

    A request beyond the slots waits at the worker until another one ends.
    """

    __slots__ = ()

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:  # noqa: ARG002
        """The candidates with a free slot; all of them when none has one."""
        for candidate in candidates:
            if not _free(candidate):
                return [other for other in candidates if _free(other)] or candidates
        return candidates


def _free(candidate: Candidate) -> bool:
    slots = candidate.worker.capabilities.slots
    return slots is None or candidate.worker.in_flight < slots
