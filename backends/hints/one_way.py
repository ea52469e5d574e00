"""What drivers have in common that say hints in one of the two ways only (`backends.hints.base`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from backends.hints.base import Answer, HintCall
from backends.hints.model import Action, Hint, TierName


class BesideOnly:
    """Hints are said in calls of their own."""

    def inside(self, action: Action, source: TierName | None, target: TierName) -> bool:  # noqa: ARG002 - the Protocol's signature
        """Never."""
        return False

    def fields(self, hints: Sequence[Hint], body: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002 - as above
        """Nothing."""
        return {}


class InsideOnly:
    """Hints are said in a field of the request that they are about.

    Attributes:
        field: its name.
    """

    field: str

    def beside(self, action: Action, source: TierName | None, target: TierName) -> bool:  # noqa: ARG002 - the Protocol's signature
        """Never."""
        return False

    def call(self, hint: Hint) -> HintCall | None:  # noqa: ARG002 - as above
        """None."""
        return None

    def read(self, hint: Hint, status: int, body: bytes) -> Answer:  # noqa: ARG002 - as above
        """There is no such call."""
        return Answer("refused", detail=f"{self.field} are not said beside requests")
