"""LMCache's multiprocess server beside one worker: storage (L2) to its CPU memory (L1), L1 emptied, quotas by salt.

============  ==========================================================================================================
prefetch      ``POST /cache/prefetches``, then asked until it has ended; a result is given once
demote of l1  ``DELETE /cache/objects`` of the chunks' keys in l1; what storage has stays
pin, unpin    ``/cache/pins``, in versions that have it (0.5.6 has it in its coordinator only); shows in the OpenAPI description
quota         ``PUT /quota/SALT`` before the first hint about a salt, where one is configured
============  ==========================================================================================================

It warms only for models whose worker has registered with it (else 503).
"""

from collections.abc import Mapping
from typing import Any, Final

from backends.hints import chunks
from backends.hints.base import Answer, HintCall
from backends.hints.lmcache_common import (
    DESCRIPTION,
    Place,
    Prefetching,
    Quotas,
    is_quota,
    named,
    number,
    parsed,
    refused,
    serves,
    tokens,
)
from backends.hints.model import Action, Hint, TierName
from backends.hints.one_way import BesideOnly

PREFETCHES: Final = "/cache/prefetches"
PINS: Final = "/cache/pins"
OBJECTS: Final = "/cache/objects"
MOST_KEYS: Final = 10_000
"""Of one call that deletes."""


class LMCacheDriver(BesideOnly):
    """See the module."""

    name = "lmcache"

    def __init__(self, place: Place) -> None:
        """`place`: how the server knows the worker. Demoting needs its chunk."""
        self._place = place
        self._quotas = Quotas(place.salt_quota)
        self._pins = False

    def probe(self) -> HintCall | None:
        """Which routes are there?"""
        return DESCRIPTION

    def speaks(self, status: int, body: bytes) -> bool:
        """Whether it can prefetch for one worker; a coordinator does that for many, and has a directory."""
        if not serves(status, body, PREFETCHES, "/status") or serves(status, body, "/directory/lookup"):
            return False
        self._pins = serves(status, body, PINS)
        return True

    def beside(self, action: Action, source: TierName | None, target: TierName) -> bool:
        """Prefetches from storage, also those that want it on the device: from L1 on the worker loads it by itself."""
        if action is Action.PREFETCH:
            return source == "l2" and target != "l2"
        if action is Action.DEMOTE:
            return target == "l1" and self._place.chunk is not None
        return self._pins and action in (Action.PIN, Action.UNPIN) and target != "device"

    def call(self, hint: Hint) -> HintCall | None:
        """The call, or the one that sets the salt's quota first."""
        own = self._own(hint)
        if own is None:
            return None
        return self._quotas.before(hint.subject.salt) or own

    def read(self, hint: Hint, status: int, body: bytes) -> Answer:
        """What an answer says."""
        said = parsed(body)
        if is_quota(said) and (own := self._own(hint)) is not None:
            return Answer("pending", own)
        if hint.action is Action.PREFETCH:
            return Prefetching.read(hint, status, said, PREFETCHES + "/")
        if status != 200:
            return refused(status, said)
        if hint.action is Action.DEMOTE:
            gone, skipped = number(said.get("deleted")), number(said.get("skipped"))
            return Answer("accepted" if said.get("ok") else "refused", detail=f"{gone} objects, {skipped} in use")
        return read_pins(said)

    def _own(self, hint: Hint) -> HintCall | None:
        place = self._place
        if hint.action is Action.DEMOTE:
            return self._demote(hint)
        body = named(hint, place)
        if body is None:
            return None
        if hint.action is Action.PREFETCH:
            return HintCall("POST", PREFETCHES, {**body, "source_tier": "l2", "target_tier": "l1"}, server="hints")
        method: Any = "POST" if hint.action is Action.PIN else "DELETE"
        return HintCall(method, PINS, {**body, "tier": hint.target}, server="hints")

    def _demote(self, hint: Hint) -> HintCall | None:
        place = self._place
        ids = tokens(hint, place)
        if ids is None or place.chunk is None:
            return None
        # Only what lies within the range: a chunk that begins before it is of use to others.
        first = -(-hint.start // place.chunk)
        there = chunks.names(ids, place.chunk)[first : first + MOST_KEYS // place.world_size]
        if not there:
            return None
        keys = chunks.keys(there, place.model, place.world_size, hint.subject.salt)
        return HintCall("DELETE", OBJECTS, {"keys": keys, "tier": "l1"}, server="hints")


def read_pins(said: Mapping[str, Any]) -> Answer:
    """Pins and unpins: `affected`, or in newer servers `pinned` or `unpinned`, is how many objects they were about."""
    affected = max(number(said.get(name)) for name in ("affected", "pinned", "unpinned"))
    asked = number(said.get("requested"))
    if not affected:
        return Answer("refused", detail=f"none of {asked} chunks")
    return Answer("accepted", detail=f"{affected} of {asked} chunks")
