"""Bringing blocks nearer ahead of requests: between a worker's memories, and from another worker's."""

from collections.abc import Sequence

from backends.profiles.profile import Profile
from simulator.engine.memory import KvMemory
from simulator.engine.outputs import BlockKey, TierName
from simulator.engine.transfers import Transfers


class Prefetcher:
    """One worker's.

    Attributes:
        transfers: what is under way.
    """

    __slots__ = ("_memory", "_peers", "_profile", "transfers")

    def __init__(self, profile: Profile, memory: KvMemory) -> None:
        self._profile = profile
        self._memory = memory
        self._peers: dict[str, KvMemory] = {}
        self.transfers = Transfers()

    def prefetch(
        self,
        keys: Sequence[BlockKey],
        start: int,
        stop: int,
        source: TierName,
        target: TierName,
        now: float,
        peer: "tuple[str, KvMemory] | None" = None,
    ) -> float | None:
        """Begin to bring ``keys[start:stop]`` from `source`, or from the memory of another worker, nearer: see `Engine.prefetch`."""
        if target == "device":
            # What is on the device is the beginning of a chain: what comes must join on, wherever that ends by now.
            first = self._memory.device.held(keys, min(stop, len(keys)))
        elif target == "l1" and self._memory.l1.capacity:
            first = start
        else:
            return None
        held = self._memory.device if target == "device" else self._memory.l1
        stop = min(stop, len(keys))
        while first < stop and (keys[first] in held or self.transfers.coming(target, keys[first])):
            first += 1
        last = first
        name = source if peer is None else peer[0]
        if peer is not None:
            self._peers[peer[0]] = peer[1]
        while last < stop and self._at(name, keys[last]):
            last += 1
        if first >= last:
            return None
        profile = self._profile
        near = source == "l1" and peer is None
        return self.transfers.begin(
            keys,
            first,
            last,
            name,
            target,
            latency=profile.l1_latency if near else profile.l2_latency,
            block_seconds=profile.kv_bytes_per_block / (profile.l1_bandwidth if near else profile.l2_bandwidth),
            now=now,
        )

    def land(self, now: float) -> None:
        """Take in what has arrived by `now`, which must be when it did."""
        while (arrived := self.transfers.arrived(now)) is not None:
            transfer, first, last = arrived
            keys = transfer.keys
            stop = first
            while stop < last and self._at(transfer.source, keys[stop]):
                stop += 1
            if transfer.target == "device":
                stop = self._memory.arrive_on_device(keys, first, stop, now)
            else:
                self._memory.arrive_in_l1(keys, first, stop, now)
            if stop < last:
                self.transfers.drop(transfer)

    def demanded(self, l1_tokens: int, l2_tokens: int) -> None:
        """A request loads so many tokens: that goes first."""
        if len(self.transfers):
            self.transfers.delay("l1", self._profile.load_seconds(l1_tokens, 0))
            self.transfers.delay("l2", self._profile.load_seconds(0, l2_tokens))

    def _at(self, source: str, key: BlockKey) -> bool:
        """Whether a block can be sent from there."""
        if source == "l1":
            return key in self._memory.l1
        if source == "l2":
            return key in self._memory.l2
        peer = self._peers[source]
        return key in peer.device or key in peer.l1
