"""Samples of a fleet's load over time, in bounded memory."""

from array import array
from collections.abc import Sequence
from typing import Final

from gateway.fleet.worker import Worker

SAMPLES: Final = 480
"""Most samples kept. When there are more, every other one is dropped and the interval doubles."""


class Series:
    """Load per worker at equal intervals.

    Attributes:
        interval: seconds between two samples.
        times: seconds from the start.
        in_flight: per sample, requests at each worker.
        pending: per sample, those of them whose prefill has not ended.
        refused: per sample, requests refused so far.
    """

    __slots__ = ("_next", "in_flight", "interval", "pending", "refused", "times")

    def __init__(self, start: float = 0.0, interval: float = 1.0) -> None:
        """The first sample is due at `start`."""
        self.interval = interval
        self.times: array[float] = array("d")
        self.in_flight: list[array[int]] = []
        self.pending: list[array[int]] = []
        self.refused: array[int] = array("l")
        self._next = start

    @property
    def due(self) -> float:
        """When the next sample is to be taken."""
        return self._next

    def sample(self, until: float, workers: Sequence[Worker], refused: int) -> None:
        """Take the samples that are due before `until`; nothing has changed since the last call."""
        in_flight = array("l", [worker.in_flight for worker in workers])
        pending = array("l", [worker.pending for worker in workers])
        while self._next < until:
            self.times.append(self._next)
            self.in_flight.append(in_flight)
            self.pending.append(pending)
            self.refused.append(refused)
            if len(self.times) >= SAMPLES:
                self.times = self.times[::2]
                self.in_flight = self.in_flight[::2]
                self.pending = self.pending[::2]
                self.refused = self.refused[::2]
                self.interval *= 2
            self._next = self.times[-1] + self.interval
