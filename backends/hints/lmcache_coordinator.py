"""LMCache's coordinator: prefetches handed to any worker's server, pins of what is in storage, and the directory of who holds what.

============  ===========================================================================================================
prefetch      ``POST /cache/prefetches`` with the server's instance id, then asked until it has ended
pin, unpin    ``/cache/pins``: counted, so each pin is taken back once; against the quota's eviction from storage only
demote of l1  ``POST /cache/delete`` in l1 of that server; what is pinned or in use stays
directory     ``POST /directory/lookup``, see `lookup` and `placements`
============  ===========================================================================================================

Where a worker's instance is not configured, it is taken from ``GET /instances``: the only one on the worker's host.
"""

from typing import Final
from urllib.parse import quote

import msgspec

from backends.hints.base import Answer, HintCall
from backends.hints.chunks import ObjectKey
from backends.hints.lmcache import PINS, PREFETCHES, read_pins
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
)
from backends.hints.model import Action, Hint, Subject, TierName
from backends.hints.one_way import BesideOnly

LOOKUP: Final = "/directory/lookup"
INSTANCES: Final = "/instances"
DELETE: Final = "/cache/delete"


class Instance(msgspec.Struct, frozen=True, gc=False):
    """A server that has registered."""

    instance_id: str
    ip: str
    http_port: int


class Placement(msgspec.Struct, frozen=True, gc=False):
    """One copy of an object.

    Attributes:
        instance_id: the server that told of it.
        tier: ``l1`` or ``l2``.
        backend: e.g. ``dram``, ``fs``.
        shared: whether all servers reach it. Not set by 0.5.6 for files in a common folder.
    """

    instance_id: str
    tier: str
    backend: str = ""
    shared: bool = False


class Held(msgspec.Struct, frozen=True, gc=False):
    """An object, and where it is."""

    key: ObjectKey
    placements: list[Placement] = []


class _Lookup(msgspec.Struct):
    chunks: int
    results: list[Held]


class _Instances(msgspec.Struct):
    instances: list[Instance]


_LOOKUP = msgspec.json.Decoder(_Lookup)
_INSTANCES = msgspec.json.Decoder(_Instances)


def lookup(subject: Subject, stop: int, place: Place) -> HintCall | None:
    """The call that asks where the first `stop` tokens of a prompt are; None where they can't be named."""
    hint = Hint(id=0, action=Action.PREFETCH, rule="", worker=place.worker, subject=subject, stop=stop)
    body = named(hint, place)
    return None if body is None else HintCall("POST", LOOKUP, body, server="hints")


def placements(body: bytes) -> list[Held] | None:
    """What a lookup found: one entry for each chunk and rank, in their order, those that nobody has included; None: no such answer."""
    try:
        return _LOOKUP.decode(body).results
    except msgspec.MsgspecError:
        return None


def instances(body: bytes) -> list[Instance] | None:
    """Who has registered; None: no such answer."""
    try:
        return _INSTANCES.decode(body).instances
    except msgspec.MsgspecError:
        return None


class LMCacheCoordinatorDriver(BesideOnly):
    """See the module."""

    name = "lmcache-coordinator"

    def __init__(self, place: Place) -> None:
        """`place`: how LMCache knows the worker."""
        self._place = place
        self._instance = place.instance
        self._quotas = Quotas(place.salt_quota)

    def probe(self) -> HintCall | None:
        """Which routes are there?"""
        return DESCRIPTION

    def speaks(self, status: int, body: bytes) -> bool:
        """Whether it has a directory, prefetches and pins."""
        return serves(status, body, LOOKUP, PREFETCHES, PINS)

    def beside(self, action: Action, source: TierName | None, target: TierName) -> bool:
        """Prefetches from storage, also those that want it on the device (from L1 on the worker loads it by itself); pins in storage."""
        if action is Action.PREFETCH:
            return source == "l2" and target != "l2"
        if action in (Action.PIN, Action.UNPIN):
            return target == "l2"
        return action is Action.DEMOTE and target == "l1"

    def call(self, hint: Hint) -> HintCall | None:
        """The call, or what must be asked or set before it: the worker's instance, the salt's quota."""
        own = self._own(hint)
        if own is None:
            return None
        return self._quotas.before(hint.subject.salt) or own

    def read(self, hint: Hint, status: int, body: bytes) -> Answer:
        """What an answer says."""
        said = parsed(body)
        if is_quota(said) and (own := self._own(hint)) is not None:
            return Answer("pending", own)
        if status == 200 and "instances" in said:
            return self._found(hint, body)
        if hint.action is Action.PREFETCH:
            return Prefetching.read(hint, status, said, f"{PREFETCHES}/{quote(self._instance, safe='')}/")
        if status != 200:
            return refused(status, said)
        if hint.action is Action.DEMOTE:
            gone, skipped = number(said.get("affected")), number(said.get("skipped"))
            return Answer("accepted" if gone else "refused", detail=f"{gone} objects, {skipped} pinned or in use")
        return read_pins(said)

    def _own(self, hint: Hint) -> HintCall | None:
        body = named(hint, self._place)
        if body is None:
            return None
        if hint.action in (Action.PIN, Action.UNPIN):
            return HintCall("POST" if hint.action is Action.PIN else "DELETE", PINS, body, server="hints")
        if not self._instance:
            return HintCall("GET", INSTANCES, server="hints")
        body = {"instance_id": self._instance, **body}
        if hint.action is Action.DEMOTE:
            # By token ids all chunks from the first on are meant: parts of a prompt can't be said, and its beginning is of use to others.
            return HintCall("POST", DELETE, {**body, "tier": "l1"}, server="hints") if hint.start == 0 else None
        return HintCall("POST", PREFETCHES, body, server="hints")

    def _found(self, hint: Hint, body: bytes) -> Answer:
        host = self._place.worker.rpartition(":")[0].strip("[]")
        here = [each for each in instances(body) or () if each.ip == host]
        if len(here) != 1:
            return Answer(
                "refused", detail=f"{len(here)} instances on {host or 'its host'}: configure `instance`"[:200]
            )
        self._instance = here[0].instance_id
        own = self._own(hint)
        return Answer("refused", detail="nothing to say") if own is None else Answer("pending", own)
