"""Keep the workers that play a part in disaggregated serving."""

from collections.abc import Sequence
from typing import Literal

from policies.base import Candidate, RouteRequest


class Role:
    """Drops workers whose role is neither `role` nor ``both``, unless no other is left.

    By default those that only decode are dropped: they cannot compute a prompt that comes from a client.
    """

    __slots__ = ("_role", "_roles")

    def __init__(self, *, role: Literal["both", "prefill", "decode"] = "prefill") -> None:
        """`role`: what is asked for; ``both``: only workers that do everything."""
        self._role = role
        self._roles = frozenset({role, "both"})

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:  # noqa: ARG002
        """The candidates of the role; all of them when none has it."""
        wanted, roles = self._role, self._roles
        for candidate in candidates:
            role = candidate.worker.capabilities.role
            if role != "both" and role != wanted:  # noqa: PLR1714 - a set costs twice as much
                return [other for other in candidates if other.worker.capabilities.role in roles] or candidates
        return candidates
