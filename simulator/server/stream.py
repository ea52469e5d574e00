"""Answers as server-sent events, and the faults that break them off in the middle."""

from collections.abc import Mapping

from aiohttp import web

from simulator.server.faults import Faults

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
MALFORMED = b"zz\r\nthis is no chunk\r\n"


class StreamBrokenError(Exception):
    """A fault has ended the stream; there is nothing more to write."""


class EventStream:
    """An answer that is written event by event."""

    def __init__(self, request: web.Request, faults: Faults, headers: Mapping[str, str]) -> None:
        """Nothing is written before `start`."""
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM, **headers})
        self._faults = faults if faults.times != 0 else Faults()
        self._left = min(
            (
                limit
                for limit in (faults.stop_after_tokens, faults.cut_after_tokens, faults.malformed_after_tokens)
                if limit is not None and faults.times != 0
            ),
            default=None,
        )

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    async def start(self) -> None:
        """Send the head."""
        if self._request.version >= (1, 1):
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)

    async def send(self, *events: bytes) -> None:
        """Send events that carry no tokens, in one write."""
        await self._response.write(b"".join(events))

    async def send_tokens(self, events: list[bytes]) -> None:
        """Send events that each carry a chunk of the answer, in one write.

        Raises:
            StreamBrokenError: a fault struck.
        """
        if self._left is None:
            await self._response.write(b"".join(events))
            return
        allowed, self._left = events[: self._left], self._left - len(events)
        if allowed:
            await self._response.write(b"".join(allowed))
        if self._left <= 0:
            await self._break()

    async def end(self, *events: bytes) -> None:
        """Send the last events and the end of the body."""
        await self._response.write_eof(b"".join(events))

    async def _break(self) -> None:
        """Let the fault act.

        Raises:
            StreamBrokenError: always.
        """
        faults, transport = self._faults, self._request.transport
        if faults.stop_after_tokens is not None:
            await self._response.write_eof()
        elif transport is not None:
            if faults.malformed_after_tokens is not None:
                transport.write(MALFORMED)
            transport.close()
        raise StreamBrokenError
