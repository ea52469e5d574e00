"""Who can say which hint to a worker: its drivers in the order of the configuration. No clock, no I/O."""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.hints.base import HintCall, HintDriver
    from backends.hints.model import Action, Hint, TierName
    from gateway.fleet.worker import Worker


class Speaker(msgspec.Struct, frozen=True, gc=False):
    """One driver for one worker.

    Attributes:
        driver: the protocol.
        url: of its hint server, without a trailing slash; empty: the worker itself.
        key: sent to that server as a bearer token; empty: none.
    """

    driver: "HintDriver"
    url: str = ""
    key: str = ""

    @property
    def name(self) -> str:
        """The driver's."""
        return self.driver.name

    def place(self, call: "HintCall", worker: "Worker") -> "tuple[str, Mapping[str, str]]":
        """Where to make `call`: the base URL, and header fields of ours. Each key goes to its own server only."""
        if call.server == "hints" and self.url:
            return self.url, {"authorization": f"Bearer {self.key}"} if self.key else {}
        return worker.url, worker.request_headers()


class Way(msgspec.Struct, frozen=True, gc=False):
    """How a hint is said: by whom, and whether inside the request that it is about."""

    speaker: Speaker
    inside: bool


class Speakers:
    """All that one worker understands.

    Attributes:
        all: those that speak, the preferred one first.
    """

    __slots__ = ("_ways", "all")

    def __init__(self, speakers: "Sequence[Speaker]" = ()) -> None:
        self.all = tuple(speakers)
        self._ways: dict[tuple[Action, TierName | None, TierName, bool], Way | None] = {}

    def way(self, hint: "Hint", *, own: bool) -> Way | None:
        """How to say `hint`: the first driver that can. None: nobody can.

        Args:
            hint: what to say.
            own: it is about the prompt of the request that is sent to that worker right now, so that request may carry it.
        """
        key = (hint.action, hint.source, hint.target, own)
        try:
            return self._ways[key]
        except KeyError:
            found = self._ways[key] = self._find(*key)
            return found

    def without(self, speaker: Speaker) -> "Speakers":
        """The same but for one."""
        return Speakers([each for each in self.all if each is not speaker])

    def _find(self, action: "Action", source: "TierName | None", target: "TierName", own: bool) -> Way | None:
        for speaker in self.all:
            if own and speaker.driver.inside(action, source, target):
                return Way(speaker, inside=True)
            if speaker.driver.beside(action, source, target):
                return Way(speaker, inside=False)
        return None


NOBODY = Speakers()
