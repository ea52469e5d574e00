"""What is watched in an answer on its way: its usage, read from the tail, and taken out again where only the gateway wanted it."""

from typing import TYPE_CHECKING

from gateway.http.tail import Tail
from gateway.http.usage import Usage, read_usage
from gateway.http.usage_event import UsageStripper

if TYPE_CHECKING:
    from gateway.http.routes import Dialect


class UsageWatch:
    """Sees every read of one answer; stands in its way only to take out the usage event that the client did not ask for.

    Attributes:
        asked: the request was changed to ask for usage.
    """

    __slots__ = ("_stripper", "_tail", "asked")

    def __init__(self, *, asked: bool) -> None:
        self.asked = asked
        self._tail = Tail()
        self._stripper: UsageStripper | None = None

    def begin(self, *, strip: bool) -> None:
        """The head is there; `strip`: the answer is a stream whose length may change."""
        if strip and self.asked:
            self._stripper = UsageStripper()

    def chunks(self, data: bytes) -> bytes:
        """Whole chunks, framed: what of them goes to the client."""
        self._tail.add_chunks(data)
        return data if self._stripper is None else self._stripper.chunks(data)

    def body(self, data: bytes) -> bytes:
        """A part of the body, unframed: what of it goes to the client."""
        self._tail.add_body(data)
        return data if self._stripper is None else self._stripper.body(data)

    def release(self) -> bytes:
        """What was held back, unframed; at the end."""
        return b"" if self._stripper is None else self._stripper.release()

    def usage(self, dialect: "Dialect", *, stream: bool) -> Usage | None:
        """What the answer says it cost, if it says so."""
        return read_usage(self._tail.last(), dialect, stream=stream, first=self._tail.first())
