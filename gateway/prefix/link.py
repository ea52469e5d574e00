"""The ZMQ sockets to one publisher: what it says (SUB), what it said before (DEALER), and whether it is there (monitor).

Plain sockets, read without blocking when the event loop says that one of them has something. On uvloop a message costs 4 us of
CPU in a burst and 32 us alone, with `zmq.asyncio` 15 and 55 us; and what is read when is in the caller's hand.

A connection that broke is not repaired by ZMQ but by a new socket. So every message is known to come from before the break or
from after it, and thus from which process.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from backends.kv_events import EventSource

MAX_MESSAGE = 16 * 1024 * 1024
"""Bytes of a frame; longer ones make ZMQ close the connection. (A step of a million new tokens sends 5 MB.)"""
RECEIVE_HIGH_WATER = 100_000
"""Messages that ZMQ keeps for us. Its default of 1,000 is less than a burst; what is dropped has to be replayed."""
CONNECT_SECONDS = 3.0
"""For the TCP connection and for ZMQ's handshake, each."""

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CLOSE_FAILED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_KEEP_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""A host that vanished without a word is noticed after 11 s. ZMQ's own heartbeats would need every publisher to know them."""


class Link:
    """One connection to one publisher. Not reused: after a break, close it and make another."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        loop: asyncio.AbstractEventLoop,
        source: EventSource,
        readable: Callable[[], None],
        *,
        ipv6: bool = False,
    ) -> None:
        """Begin to connect.

        Args:
            context: owner of the sockets.
            loop: tells when there is something to read.
            source: where to.
            readable: called when there is something to read; then read until all of it is read.
            ipv6: what a host's name is resolved to. ZMQ tries one address only, so whoever has a name tries both in turn.

        Raises:
            zmq.ZMQError: the address is malformed, or there are no more sockets.
        """
        self._context = context
        self._loop = loop
        self._source = source
        self._readable = readable
        self._ipv6 = ipv6
        self._replay: zmq.Socket[bytes] | None = None
        self._watched: list[int] = []
        self._subscriber: zmq.Socket[bytes] = self._socket(zmq.SUB)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._monitor = self._subscriber.get_monitor_socket(_UP | _DOWN)
            self._watch(self._monitor)
            self._watch(self._subscriber)
            self._subscriber.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            self._subscriber.connect(source.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Close every socket; messages that were not read are lost. May be called twice."""
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        self._watched.clear()
        if self._monitor is not None:
            self._subscriber.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._subscriber.close(linger=0)
        self._close_replay(watched=False)

    def changed(self) -> bool | None:
        """The next change of the connection: True when it stands, False when it broke or failed; None for no change."""
        while self._monitor is not None:
            frames = _receive(self._monitor)
            if frames is None:
                break
            event = int.from_bytes(frames[0][:2], sys.byteorder)
            if event & _DOWN:
                return False
            if event & _UP:
                return True
        return None

    def receive(self) -> Sequence[bytes] | None:
        """The frames of the next live message, or None."""
        return _receive(self._subscriber)

    def ask(self, start: int) -> None:
        """Ask for what was published from number `start` on. Answers to an earlier question can no longer come.

        Raises:
            zmq.ZMQError: as above.
        """
        assert self._source.replay_endpoint is not None
        self._close_replay()
        self._replay = self._socket(zmq.DEALER)
        self._watch(self._replay)
        self._replay.connect(self._source.replay_endpoint)
        self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)

    def replayed(self) -> Sequence[bytes] | None:
        """The frames of the next answer, or None."""
        return None if self._replay is None else _receive(self._replay)

    def settled(self) -> None:
        """The answer is complete, or nobody waits for it any more."""
        self._close_replay()

    def pacify(self) -> None:
        """Let the loop call again only when something new comes: for when what there is can't be read yet."""
        for each in (self._subscriber, self._monitor, self._replay):
            if each is not None and not each.closed:
                each.getsockopt(zmq.EVENTS)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IPV6, int(self._ipv6 or "[" in self._source.endpoint))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_SECONDS * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(CONNECT_SECONDS * 1000))
        for option, value in _KEEP_ALIVE.items():
            socket.setsockopt(option, value)
        return socket

    def _watch(self, socket: Any) -> None:
        descriptor: int = socket.getsockopt(zmq.FD)
        self._loop.add_reader(descriptor, self._readable)
        self._watched.append(descriptor)

    def _close_replay(self, *, watched: bool = True) -> None:
        if self._replay is None:
            return
        if watched:
            descriptor = self._replay.getsockopt(zmq.FD)
            assert isinstance(descriptor, int)
            self._loop.remove_reader(descriptor)
            self._watched.remove(descriptor)
        self._replay.close(linger=0)
        self._replay = None


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
