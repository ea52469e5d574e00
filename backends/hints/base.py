"""What a hint driver is: the code that says hints in one protocol. It opens nothing: it names calls and reads answers.

There are two ways to say a hint. *Beside* requests: an HTTP call of its own, which `gateway.residency.delivery` makes. *Inside*
the request that the hint is about: fields of its body. A driver may do one, the other, or both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from backends.hints.model import Action, Hint, TierName


class HintCall(msgspec.Struct, frozen=True, gc=False):
    """An HTTP request to be made.

    Attributes:
        method: GET, POST, PUT or DELETE.
        path: with a slash in front.
        body: JSON to send; None: no body.
        server: which one: the worker itself, or the hint server that was configured for it.
        bytes_moved: at most so many bytes of KV this makes the worker move; 0: none or not known.
        prefills: it is a request for so many prompt tokens: to be made only when the worker has nothing better to do, and counted
            as its load. 0: it is not.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    body: Any = None
    server: Literal["worker", "hints"] = "worker"
    bytes_moved: int = 0
    prefills: int = 0


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What an answer to a `HintCall` says.

    Attributes:
        verdict: ``accepted``, ``refused``, or ``pending``: ask again with `then`.
        then: the call to make next: to poll, or a further step.
        moved_tokens: tokens that it says were found or moved; None: it does not say.
        detail: for logs and the inspector, at most 200 characters.
    """

    verdict: Literal["accepted", "refused", "pending"]
    then: HintCall | None = None
    moved_tokens: int | None = None
    detail: str = ""


class HintDriver(Protocol):
    """One protocol."""

    @property
    def name(self) -> str:
        """As written in the configuration."""

    def probe(self) -> HintCall | None:
        """A call that shows whether the other side speaks it, without changing anything there; None: it can't be probed."""

    def speaks(self, status: int, body: bytes) -> bool:
        """Whether this answer to `probe` says that it does. Never raises."""

    def beside(self, action: Action, source: TierName | None, target: TierName) -> bool:
        """Whether such a hint can be said in a call of its own."""

    def inside(self, action: Action, source: TierName | None, target: TierName) -> bool:
        """Whether such a hint can be said in the request that it is about."""

    def call(self, hint: Hint) -> HintCall | None:
        """The call that says `hint`; None: it can't be said after all (no token ids, less than a chunk, ...)."""

    def read(self, hint: Hint, status: int, body: bytes) -> Answer:
        """What an answer to that call, or to a later `Answer.then`, says. Never raises."""

    def fields(self, hints: Sequence[Hint], body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Top-level fields to set in the body of the request that `hints` are about.

        Args:
            hints: for which `inside` is true, all about this request's own prompt.
            body: the client's, parsed. A field of the client's that a result names must be merged into the result, never lost.
        """
