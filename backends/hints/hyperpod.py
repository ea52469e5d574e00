"""SageMaker HyperPod's LMCache: the same servers as elsewhere, with HyperPod's settings.

An endpoint of kind ``InProcess`` has LMCache's older controller in its router; one of kind ``MultiProcess`` (operator 3.7, LMCache from
0.5.0) has a multiprocess server beside each worker. Chunks are of 256 tokens, in process shorter tails are stored too
(``save_unfull_chunk``), and the slow memory is tiered storage: the daemon on each node's port 9200, which LMCache reaches as its remote
backend (``sagemaker-hyperpod://NODE:9200``). That daemon itself takes no hints.
"""

from typing import TYPE_CHECKING

import msgspec

from backends.hints.chunks import DEFAULT_CHUNK
from backends.hints.lmcache import LMCacheDriver
from backends.hints.lmcache_common import DESCRIPTION, Place
from backends.hints.lmcache_controller import REMOTE, LMCacheControllerDriver
from backends.hints.one_way import BesideOnly

if TYPE_CHECKING:
    from backends.hints.base import Answer, HintCall
    from backends.hints.model import Action, Hint, TierName


class HyperPodDriver(BesideOnly):
    """See the module. Which of the two it is shows when it is probed; until then by whether an instance is configured: the controller needs one."""

    name = "hyperpod"

    def __init__(self, place: Place) -> None:
        """`place`: how LMCache knows the worker."""
        self._controller = LMCacheControllerDriver(place, slow=REMOTE, tails=True)
        self._server = LMCacheDriver(msgspec.structs.replace(place, chunk=place.chunk or DEFAULT_CHUNK))
        self._speaker: LMCacheDriver | LMCacheControllerDriver = self._controller if place.instance else self._server

    def probe(self) -> "HintCall | None":
        """Which routes are there?"""
        return DESCRIPTION

    def speaks(self, status: int, body: bytes) -> bool:
        """Whether it is one of the two."""
        for each in (self._server, self._controller):
            if each.speaks(status, body):
                self._speaker = each
                return True
        return False

    def beside(self, action: "Action", source: "TierName | None", target: "TierName") -> bool:
        """As the one that answered."""
        return self._speaker.beside(action, source, target)

    def call(self, hint: "Hint") -> "HintCall | None":
        """As the one that answered."""
        return self._speaker.call(hint)

    def read(self, hint: "Hint", status: int, body: bytes) -> "Answer":
        """As the one that answered."""
        return self._speaker.read(hint, status, body)
