"""The workers of one fleet, as far as one's health depends on the others': shares, panic, probes, slow start."""

from collections.abc import Sequence

from gateway.fleet.states import Cause, Life, Listener
from gateway.fleet.worker import WorkerState

FIRST_WEIGHT = 0.1
"""Where the slow start ramp begins, as a share of full load."""


class Membership:
    """The workers of one fleet, as far as their health depends on each other.

    Attributes:
        max_share: at most this share of them is ejected because of `Cause.REQUESTS`, but one always may be.
        now: the latest time that an event or `tick` brought.
        panic: no worker is ready, so requests go to those that were ejected for their requests.
    """

    __slots__ = ("_ejected", "_lives", "_ramping", "listener", "max_share", "now", "panic")

    def __init__(self, max_share: float, listener: Listener) -> None:
        self.max_share = max_share
        self.listener = listener
        self.now = 0.0
        self.panic = False
        self._lives: list[Life] = []
        self._ejected = 0
        self._ramping = False

    def replace(self, lives: Sequence[Life], now: float) -> None:
        """Set who belongs to the fleet. Those ejected beyond the share that the new size allows come back."""
        self.now = now
        self._lives = list(lives)
        for life in self._lives:
            life.membership = self
        self._ejected = sum(life.worker.state is WorkerState.EJECTED for life in self._lives)
        by_requests = sorted(
            (life for life in self._lives if life.cause is Cause.REQUESTS), key=lambda life: life.until
        )
        for life in by_requests[: max(0, len(by_requests) - self.limit)]:
            life.made_room(now)
        self._derive()

    @property
    def limit(self) -> int:
        """How many workers may be ejected for their requests at once."""
        return max(1, int(self.max_share * len(self._lives)))

    @property
    def may_eject(self) -> bool:
        """Whether one more may be; those that fail their checks count, they are missing just as well."""
        return self._ejected < self.limit

    def tick(self, now: float) -> None:
        """Move what only time moves: slow start weights and the end of ejections. Cheap when there is neither."""
        self.now = now
        if self._ramping or self._ejected:
            self._derive()

    def moved(self, life: Life, before: WorkerState) -> None:
        """A member changed its state from `before`."""
        ejected = WorkerState.EJECTED
        self._ejected += (life.worker.state is ejected) - (before is ejected)
        self._derive()

    def _derive(self) -> None:
        """Compute `routable`, `weight` and `probe` of every member from the states and the time. O(workers)."""
        ready = any(life.worker.state is WorkerState.READY for life in self._lives)
        self.panic = not ready and any(life.tryable for life in self._lives)
        self._ramping = False
        for life in self._lives:
            worker = life.worker
            if worker.state is WorkerState.READY:
                worker.weight = _ramp(self.now - life.since, life.rules.slow_start)
                worker.routable = True
                self._ramping |= worker.weight < 1
            elif not life.tryable:
                worker.routable = False
            elif self.panic:
                worker.probe = None
                worker.routable = True
            else:
                if worker.probe is None and life.half_open:
                    worker.probe = True
                worker.routable = worker.probe is True


def _ramp(elapsed: float, slow_start: float) -> float:
    """The weight `elapsed` seconds after becoming ready: from `FIRST_WEIGHT` straight to 1 in `slow_start` seconds."""
    if elapsed >= slow_start:
        return 1.0
    return FIRST_WEIGHT + (1 - FIRST_WEIGHT) * max(0.0, elapsed) / slow_start
