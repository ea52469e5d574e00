"""Pins: parts of chains that must not be evicted, until a time or until further notice."""

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.engine.cache import Tier
from simulator.engine.memory import KvMemory
from simulator.engine.outputs import BlockKey, TierName


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """``keys[start:stop]`` stay in `tier` until a time."""

    keys: Sequence[BlockKey]
    start: int
    stop: int
    tier: TierName
    until: float


class Pins:
    """One worker's. On the device a pin is like a request that never computes: it uses the chain's beginning."""

    __slots__ = ("_memory", "_pins", "_share")

    def __init__(self, memory: KvMemory, share: float) -> None:
        """`share`: of each memory, how much may be pinned; below 1."""
        self._memory = memory
        self._share = share
        self._pins: list[Pin] = []

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, keys: Sequence[BlockKey], start: int, stop: int, tier: TierName, until: float) -> int:
        """Keep what a tier holds of ``keys[start:stop]``: see `Engine.pin`."""
        stop = min(stop, len(keys))
        if tier == "device":
            # Who uses a key uses all before it.
            start, stop = 0, self._memory.device.held(keys, stop)
            pinned, total = sum(pin.stop for pin in self._pins if pin.tier == tier), self._memory.device.total
        else:
            memory = self._tier(tier)
            stop = memory.held(keys, start, stop)
            pinned, total = len(memory.pinned), memory.capacity
        if start >= stop or pinned + stop - start > self._share * total:
            return 0
        if tier == "device":
            self._memory.device.take(keys, stop)
        else:
            self._tier(tier).pin(keys[start:stop])
        self._pins.append(Pin(keys, start, stop, tier, until))
        return stop - start

    def unpin(self, keys: Sequence[BlockKey], start: int, stop: int, tier: TierName) -> int:
        """Take back the pins in a tier that lie within ``keys[start:stop]``. Returns how many blocks that are."""
        over = [
            pin
            for pin in self._pins
            if pin.tier == tier
            and (tier == "device" or start <= pin.start)
            and pin.stop <= min(stop, len(keys))
            and keys[pin.stop - 1] == pin.keys[pin.stop - 1]
        ]
        for pin in over:
            self._end(pin)
        return sum(pin.stop - pin.start for pin in over)

    def clear(self, tier: TierName) -> None:
        """End all pins in a tier."""
        for pin in [pin for pin in self._pins if pin.tier == tier]:
            self._end(pin)

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        for pin in [pin for pin in self._pins if pin.until <= now]:
            self._end(pin)

    def give_way(self) -> bool:
        """End the oldest pin on the device, because a request needs the room. False when there is none."""
        pin = next((pin for pin in self._pins if pin.tier == "device"), None)
        if pin is not None:
            self._end(pin)
        return pin is not None

    def _end(self, pin: "Pin") -> None:
        self._pins.remove(pin)
        if pin.tier == "device":
            self._memory.device.release(pin.keys, pin.stop, 0)
        else:
            self._tier(pin.tier).unpin(pin.keys[pin.start : pin.stop])

    def _tier(self, name: TierName) -> Tier:
        return self._memory.l1 if name == "l1" else self._memory.l2
