"""LMCache's older controller, of workers that run LMCache in their own process: lookup, pin, and copies between memories and workers.

===================  =====================================================================================================
prefetch             ``POST /lookup`` for who has it, then ``POST /move`` with ``should_copy`` into the worker's own CPU memory
demote of l1         ``POST /move`` from its CPU memory to its disk
pin                  ``POST /pin``; there is no unpin: it ends when LMCache evicts it by itself, so its ttl can't be kept
``clear``            empties one memory of one worker; for operators, no hint is said by it
===================  =====================================================================================================

Chunks are of 256 tokens and a shorter tail counts as one. Keys come from Python's ``hash``: workers and controller need the same
``PYTHONHASHSEED``, and know nothing of salts and adapters: such prompts are not spoken of.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backends.hints.base import Answer, HintCall
from backends.hints.lmcache_common import DESCRIPTION, Place, number, parsed, refused, serves, tokens
from backends.hints.model import Action, Hint, TierName
from backends.hints.one_way import BesideOnly

CHUNK: Final = 256
CPU: Final = "LocalCPUBackend"
DISK: Final = "LocalDiskBackend"
REMOTE: Final = "RemoteBackend"


class LMCacheControllerDriver(BesideOnly):
    """See the module."""

    name = "lmcache-controller"

    def __init__(self, place: Place, *, slow: str = DISK, tails: bool = False) -> None:
        """A worker's driver.

        Args:
            place: how LMCache knows the worker; without an instance nothing can be said.
            slow: its memory below the CPU's.
            tails: whether what is shorter than a chunk is stored as well (``save_unfull_chunk``).
        """
        self._place = place if tails or place.chunk else msgspec.structs.replace(place, chunk=CHUNK)
        self._instance = place.instance
        self._slow = slow

    def probe(self) -> HintCall | None:
        """Which routes are there?"""
        return DESCRIPTION

    def speaks(self, status: int, body: bytes) -> bool:
        """Whether it can look up, pin and move."""
        return serves(status, body, "/lookup", "/pin", "/move")

    def beside(self, action: Action, source: TierName | None, target: TierName) -> bool:  # noqa: ARG002 - the Protocol's signature
        """See the module; all of it needs the worker's instance."""
        if not self._instance:
            return False
        if action is Action.PREFETCH:
            # From another worker's memory as well: its source then is that worker's.
            return target != "l2"
        return (action is Action.PIN and target != "device") or (action is Action.DEMOTE and target == "l1")

    def call(self, hint: Hint) -> HintCall | None:
        """The call."""
        ids = self._ids(hint)
        if ids is None or not self._instance:
            return None
        if hint.action is Action.PREFETCH:
            return HintCall("POST", "/lookup", {"tokens": ids}, server="hints")
        if hint.action is Action.PIN:
            location = CPU if hint.target == "l1" else self._slow
            return _post("/pin", instance_id=self._instance, location=location, tokens=ids)
        return self._move(self._instance, CPU, self._slow, ids, copy=False)

    def read(self, hint: Hint, status: int, body: bytes) -> Answer:
        """What an answer says; after a lookup, the copy follows."""
        said = parsed(body)
        if status != 200:
            return refused(status, said)
        layout = said.get("layout_info")
        if isinstance(layout, dict):
            return self._found(hint, layout)
        moved = number(said.get("num_tokens"))
        return Answer("accepted" if moved else "refused", moved_tokens=moved, detail=f"{moved} tokens")

    def clear(self, location: str = CPU) -> HintCall:
        """The call that empties one of the worker's memories."""
        return _post("/clear", instance_id=self._instance, location=location)

    def _ids(self, hint: Hint) -> list[int] | None:
        return tokens(hint, self._place) if hint.subject.salt is None else None

    def _found(self, hint: Hint, layout: Mapping[str, Any]) -> Answer:
        """Copy from who has most of it. A lookup names one holder for each chunk, the first that it finds."""
        holders = [
            (tokens_, instance, location)
            for instance, found in layout.items()
            if isinstance(found, list) and len(found) == 2 and isinstance(location := found[0], str)
            if (tokens_ := number(found[1]))
        ]
        if not holders:
            return Answer("refused", moved_tokens=0, detail="nobody has it")
        length, instance, location = max(holders)
        if instance == self._instance and location == CPU:
            return Answer("accepted", moved_tokens=0, detail="it has it already")
        ids = self._ids(hint) or []
        return Answer("pending", self._move(instance, location, CPU, ids[:length], copy=True))

    def _move(self, instance: str, location: str, target: str, ids: list[int], *, copy: bool) -> HintCall:
        old, new = [instance, location], [self._instance, target]
        return _post("/move", old_position=old, new_position=new, tokens=ids, **({"should_copy": True} if copy else {}))


def _post(path: str, **body: Any) -> HintCall:
    return HintCall("POST", path, body, server="hints")
