"""Failures on demand, acting on the real socket."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterable
from typing import Any

import msgspec

FLUSH = 0.005
"""Seconds that the event loop gets to hand the last bytes to the kernel before a reset drops what it still holds."""


class Faults(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What goes wrong now. All off by default.

    Attributes:
        refuse: the listening socket is closed: new connections are refused, open ones stay.
        hang: requests are read and never answered.
        reset_after_bytes: the connection is reset (RST) once so many bytes of an answer, head included, are sent.
        error_rate: share of API requests, 0 to 1, that get `error_status` instead of an answer.
        error_status: 400 to 599.
        slow_factor: time passes so many times slower in the engine.
        stop_after_tokens: a stream ends after so many chunks: cleanly for HTTP, but without a finish reason and ``[DONE]``.
        cut_after_tokens: after so many chunks the connection closes without the end of the chunked body.
        malformed_after_tokens: after so many chunks, bytes come that are no chunk, and the connection closes.
        drop_events: so many of the next batches of KV events are numbered but not sent.
        drop_events_share: share of the batches, 0 to 1, that are not sent.
        times: how many requests the faults of connections and answers still hit, -1 for all.
    """

    refuse: bool = False
    hang: bool = False
    reset_after_bytes: int | None = None
    error_rate: float = 0.0
    error_status: int = 500
    slow_factor: float = 1.0
    stop_after_tokens: int | None = None
    cut_after_tokens: int | None = None
    malformed_after_tokens: int | None = None
    drop_events: int = 0
    drop_events_share: float = 0.0
    times: int = -1

    def __post_init__(self) -> None:
        """Refuse what can't be meant.

        Raises:
            ValueError: a number is out of its range.
        """
        if not (0 <= self.error_rate <= 1 and 0 <= self.drop_events_share <= 1):
            raise ValueError("error_rate and drop_events_share are shares between 0 and 1")
        if not 400 <= self.error_status <= 599:
            raise ValueError("error_status is between 400 and 599")
        if self.slow_factor <= 0:
            raise ValueError("slow_factor is greater than 0")
        for name in ("reset_after_bytes", "stop_after_tokens", "cut_after_tokens", "malformed_after_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is at least 0")
        if self.drop_events < 0:
            raise ValueError("drop_events is at least 0")

    def changed(self, fields: Any) -> "Faults":
        """These faults with some fields set anew.

        Args:
            fields: an object from JSON: names and values.

        Raises:
            msgspec.ValidationError: an unknown name, or a value of the wrong type or range.
        """
        if not isinstance(fields, dict):
            raise msgspec.ValidationError("Expected `object`")
        return msgspec.convert(msgspec.to_builtins(self) | fields, Faults)

    def hits_answers(self) -> bool:
        """Whether a request that comes now could be harmed."""
        return self.times != 0 and (
            self.hang
            or self.error_rate > 0
            or any(
                value is not None
                for value in (
                    self.reset_after_bytes,
                    self.stop_after_tokens,
                    self.cut_after_tokens,
                    self.malformed_after_tokens,
                )
            )
        )


class ResettingTransport:
    """Stands before a connection's transport and resets the connection after a number of bytes."""

    def __init__(self, transport: asyncio.Transport, limit: int) -> None:
        """Let `limit` bytes through."""
        self._transport = transport
        self._left = limit
        self._spent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send what is allowed; reset when that was the last of it."""
        if self._spent:
            return
        allowed = bytes(data[: self._left])
        self._left -= len(allowed)
        if allowed:
            self._transport.write(allowed)
        if self._left <= 0:
            self._spent = True
            asyncio.get_running_loop().call_later(FLUSH, reset, self._transport)

    def writelines(self, chunks: Iterable[bytes]) -> None:
        """Like `write`, for all `chunks` together."""
        self.write(b"".join(chunks))

    def close(self) -> None:
        """Close in peace, unless a reset is on its way."""
        if not self._spent:
            self._transport.close()


def reset(transport: asyncio.Transport) -> None:
    """Close a connection with RST; what the kernel has not sent by then is lost."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
