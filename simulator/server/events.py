"""KV events as vLLM publishes them: what a batch holds, the PUB socket, and the replay of what a subscriber missed."""

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from gateway.tasks import TaskGroup

BUFFERED_BATCHES = 10_000
HIGH_WATER_MARK = 100_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUMS = {"device": "GPU", "l1": "CPU", "l2": "STORAGE"}
"""The engine's tiers by vLLM's names."""

Event = dict[str, Any]


def stored_event(
    hashes: list[int],
    parent: int | None,
    token_ids: list[int],
    block_size: int,
    tier: str,
    keys: list[list[str] | None],
    lora: tuple[int, str] | None,
) -> Event:
    """Consecutive blocks entered a tier.

    Args:
        hashes: 64-bit hash of each block.
        parent: hash of the block before the first one, None at the start of a prompt.
        token_ids: the tokens of all blocks.
        block_size: tokens in a block.
        tier: ``device``, ``l1`` or ``l2``.
        keys: per block what beside the tokens is in its hash.
        lora: id and name of the adapter.
    """
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": lora[0] if lora else None,
        "medium": MEDIUMS[tier],
        "lora_name": lora[1] if lora else None,
        "extra_keys": keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed_event(block_hash: int, tier: str) -> Event:
    """One block left a tier; vLLM announces each on its own."""
    return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": MEDIUMS[tier], "group_idx": 0}


def cleared_event() -> Event:
    """The whole cache was reset."""
    return {"type": "AllBlocksCleared"}


def encode_batch(events: Sequence[Event], *, as_arrays: bool, timestamp: float) -> bytes:
    """The msgpack payload of one batch for data-parallel rank 0.

    Args:
        events: in the order in which they happened.
        as_arrays: each event as an array, its type first (vLLM before 0.24), instead of a map.
        timestamp: seconds since the epoch.
    """
    encoded: list[Any] = [list(event.values()) for event in events] if as_arrays else list(events)
    return msgspec.msgpack.encode([timestamp, encoded, 0])


class EventPublisher:
    """Publishes batches on a PUB socket and replays the last ones on a ROUTER socket.

    The sockets belong to the running event loop from `start` to `stop`; sequence numbers begin at 0.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: str = "",
        as_arrays: bool = False,
        topic_in_replay: bool = True,
        seed: int = 0,
    ) -> None:
        """Publish on `endpoint`.

        Args:
            endpoint: a ZMQ address; bound when it holds ``*`` or ``::`` or is ipc or inproc, else connected, as vLLM does.
            replay_endpoint: address for replays, always bound; None for no replay.
            topic: first frame of each message.
            as_arrays: see `encode_batch`.
            topic_in_replay: replies carry the topic frame (vLLM since July 2026).
            seed: for the share of batches that get lost on demand.
        """
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.topic = topic
        self.as_arrays = as_arrays
        self.drop_next = 0
        """How many of the next batches are not sent; they keep their numbers and can be replayed."""
        self.drop_share = 0.0
        """Share of batches, 0 to 1, that are not sent."""
        self.dropped = 0
        self.sequence = 0
        """The number of the next batch."""
        self._topic_in_replay = topic_in_replay
        self._random = random.Random(seed)
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED_BATCHES)
        self._tasks = TaskGroup("kv-events")
        self._context: zmq.asyncio.Context | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._sockets: list[zmq.Socket[Any]] = []

    async def start(self) -> None:
        """Open the sockets; a wildcard port in an address becomes the real one.

        Raises:
            zmq.ZMQError: an address is malformed or in use.
        """
        self._context = zmq.asyncio.Context()
        try:
            publisher: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUB)
            self._publisher = publisher
            self._sockets.append(publisher)
            publisher.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            if "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc://", "inproc://")):
                publisher.bind(self.endpoint)
                self.endpoint = _bound(self.endpoint, publisher)
            else:
                publisher.connect(self.endpoint)
            if self.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                self._sockets.append(router)
                router.setsockopt(zmq.SNDHWM, 0)  # a whole replay must fit: a ROUTER drops what does not
                router.bind(self.replay_endpoint)
                self.replay_endpoint = _bound(self.replay_endpoint, router)
                self._tasks.spawn("replay", self._replay(router))
        except zmq.ZMQError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close the sockets; what was not delivered is lost. May be called twice."""
        await self._tasks.cancel()
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()
        self._publisher = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch, or only number and keep it when loss was asked for. Never blocks."""
        payload = encode_batch(events, as_arrays=self.as_arrays, timestamp=time.time())
        sequence = self.sequence.to_bytes(8, "big")
        self.sequence += 1
        self._buffer.append((sequence, payload))
        if self.drop_next > 0:
            self.drop_next -= 1
            self.dropped += 1
        elif self.drop_share > 0 and self._random.random() < self.drop_share:
            self.dropped += 1
        elif self._publisher is not None:
            self._publisher.send_multipart([self.topic.encode(), sequence, payload], copy=True)

    def forget(self) -> None:
        """Lose everything that could be replayed, as a buffer does that was too short."""
        self._buffer.clear()

    async def _replay(self, router: "zmq.asyncio.Socket") -> None:
        """Answer each request for the batches since a number, until cancelled."""
        topic = [self.topic.encode()] if self._topic_in_replay else []
        end_topic = [b""] if self._topic_in_replay else []
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # vLLM logs and ignores what is no request
            client, start = frames[0], frames[2]
            for sequence, payload in list(self._buffer):
                if sequence >= start:
                    await router.send_multipart([client, b"", *topic, sequence, payload])
            await router.send_multipart([client, b"", *end_topic, END_OF_REPLAY, b""])


def _bound(endpoint: str, socket: "zmq.Socket[Any]") -> str:
    """`endpoint` with its wildcard port replaced by the one that the socket got."""
    if not endpoint.startswith("tcp://") or not endpoint.endswith((":*", ":0")):
        return endpoint
    actual = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(actual, bytes)
    return endpoint[:-1] + actual.rstrip(b"\0").decode().rpartition(":")[2]
