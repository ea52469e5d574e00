"""A TCP proxy that spoils what passes through it, as Toxiproxy does, in the test's own loop. What it does can be changed while it runs."""

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass

from gateway.tasks import TaskGroup

_READ = 65_536
_PIECE = 4096


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is done to every connection that begins while this is set. The default does nothing.

    Attributes:
        latency, jitter: seconds before each read of the worker's goes on, and so much more at random.
        bandwidth: bytes a second of the worker's answers; 0: no limit.
        slices: bytes of a write to the gateway; 0: as they came.
        reset_after: so many bytes of the answer, then RST on both sides; -1: never.
        close_after: so many bytes of the answer, then FIN to the gateway while its own bytes are still read; -1: never.
        black_hole: take everything, answer nothing.
        hang_after: so many bytes of the answer, then silence; -1: never.
        garbage: random bytes in place of the answer's first ones.
        refuse: RST as soon as a connection is there.
        spare_checks: connections that begin with a GET (health, model cards) are left alone.
    """

    latency: float = 0.0
    jitter: float = 0.0
    bandwidth: int = 0
    slices: int = 0
    reset_after: int = -1
    close_after: int = -1
    black_hole: bool = False
    hang_after: int = -1
    garbage: int = 0
    refuse: bool = False
    spare_checks: bool = True

    @property
    def cut(self) -> int:
        """Bytes of the answer that pass before something ends it; -1: all."""
        return max(self.reset_after, self.close_after, self.hang_after)


NO_FAULTS = Faults()


class FaultProxy:
    """Stands in front of one worker.

    Attributes:
        faults: what is done to connections that begin from now on.
        url: what the gateway is told instead of the worker's.
        connections: how many are open.
        hurt: requests' connections that a fault was applied to, so far.
    """

    def __init__(self, port: int, seed: int = 0) -> None:
        """`port`: the worker's, on loopback."""
        self.faults = NO_FAULTS
        self.connections = 0
        self.hurt = 0
        self.url = ""
        self._port = port
        self._rng = random.Random(seed)
        self._tasks = TaskGroup("fault-proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening and cut what is open."""
        if self._server is not None:
            self._server.close()
        self.cut_all()
        await self._tasks.cancel()

    def cut_all(self) -> None:
        """RST on every open connection, as when the worker's host dies."""
        for writer in list(self._writers):
            _reset(writer)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn("connection", self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        faults = self.faults
        self.connections += 1
        self._writers.add(writer)
        try:
            first = await reader.read(_READ)
            if faults.spare_checks and first.startswith(b"GET "):
                faults = NO_FAULTS
            self.hurt += faults is not NO_FAULTS
            if faults.refuse:
                _reset(writer)
            elif faults.black_hole:
                while await reader.read(_READ):
                    pass
            elif first:
                await self._forward(first, reader, writer, faults)
        except OSError:
            pass
        finally:
            self.connections -= 1
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forward(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults
    ) -> None:
        from_worker, to_worker = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.add(to_worker)
        to_worker.write(first)
        asking = self._tasks.spawn("requests", _pump(reader, to_worker))
        try:
            await self._answers(from_worker, writer, faults)
        finally:
            asking.cancel()
            self._writers.discard(to_worker)
            to_worker.transport.abort()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults) -> None:
        """The worker's bytes, as the faults let them through."""
        passed = 0
        while data := await reader.read(_PIECE):
            if faults.latency or faults.jitter:
                await asyncio.sleep(faults.latency + faults.jitter * self._rng.random())
            if passed < faults.garbage:
                data = self._rng.randbytes(min(len(data), faults.garbage - passed)) + data[faults.garbage - passed :]
            ends = 0 <= faults.cut <= passed + len(data)
            if ends:
                data = data[: faults.cut - passed]
            passed += len(data)
            for piece in _sliced(data, faults.slices):
                if faults.bandwidth:
                    await asyncio.sleep(len(piece) / faults.bandwidth)
                writer.write(piece)
                await writer.drain()
                if faults.slices:
                    await asyncio.sleep(0)  # a segment of its own
            if ends:
                await self._end(writer, faults)
                return

    async def _end(self, writer: asyncio.StreamWriter, faults: Faults) -> None:
        if faults.reset_after >= 0:
            _reset(writer)
            return
        if faults.close_after >= 0:
            writer.write_eof()
        while writer in self._writers and not writer.is_closing():  # noqa: ASYNC110 - the gateway ends it, or `stop`; no event tells
            await asyncio.sleep(0.01)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The gateway's bytes, as they come; its end ends the worker's connection."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


def _sliced(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)] if size else [data]


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
