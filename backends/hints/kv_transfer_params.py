"""`kv_transfer_params`: what vLLM's OffloadingConnector reads of a request about its slower memories.

``max_offload_tokens`` (0 or more): so many leading tokens of the prompt are stored there, and no more.
``kv_load_tiers``: the memories from which anything is loaded, ``[]`` for none; without it, all.

Both are marked experimental by vLLM. A worker without that connector ignores them. They say nothing about the device's own memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from backends.hints.base import HintCall
from backends.hints.model import Action, Hint, TierName
from backends.hints.one_way import InsideOnly
from backends.hints.openapi import OPENAPI, names_member

FIELD: Final = "kv_transfer_params"
OFFLOAD: Final = "max_offload_tokens"
LOAD: Final = "kv_load_tiers"

_MEDIA: Final[Mapping[str, str]] = {"l1": "CPU", "l2": "STORAGE"}


class KvTransferParamsDriver(InsideOnly):
    """See the module.

    - DEMOTE from l1 or l2: from `Hint.start` on, nothing is stored there.
    - PREFETCH from l1 or l2 to the device: those are the memories that are worth loading from.

    A client's own values stay as they are.
    """

    name = "kv-transfer-params"
    field = FIELD

    def probe(self) -> HintCall | None:
        """Its OpenAPI description. Whether its connector reads the parameters does not show there: see `speaks`."""
        return OPENAPI

    def speaks(self, status: int, body: bytes) -> bool:
        """Whether requests have the field; with another connector than OffloadingConnector it then does nothing."""
        return status == 200 and names_member(body, FIELD)

    def inside(self, action: Action, source: TierName | None, target: TierName) -> bool:
        """See the class."""
        if action is Action.DEMOTE:
            return target in _MEDIA
        return action is Action.PREFETCH and source in _MEDIA and target == "device"

    def fields(self, hints: Sequence[Hint], body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters, together with the client's; nothing where those are no object."""
        theirs = body.get(FIELD)
        if theirs is None:
            theirs = {}
        if not isinstance(theirs, dict):
            return {}
        ours: dict[str, Any] = {}
        stored = [hint.start for hint in hints if hint.action is Action.DEMOTE]
        if stored:
            ours[OFFLOAD] = min(stored)
        sources = {hint.source for hint in hints if hint.action is Action.PREFETCH}
        media = [{"medium": medium} for tier, medium in _MEDIA.items() if tier in sources]
        if media:
            ours[LOAD] = media
        new = {name: value for name, value in ours.items() if name not in theirs}
        return {FIELD: {**theirs, **new}} if new else {}
