"""The workers of one fleet, as far as one's health depends on the others': shares, panic, probes, suspects, slow start."""

from collections.abc import Callable, Sequence

from gateway.fleet.states import Cause, Life, Listener
from gateway.fleet.worker import WorkerState

FIRST_WEIGHT = 0.1
"""Where the slow start ramp begins, as a share of full load."""


def _nobody(_panic: bool) -> None:
    """Who listens to panics where nobody does."""


class Membership:
    """The workers of one fleet, as far as their health depends on each other.

    Attributes:
        max_share: at most this share of them is ejected because of `Cause.REQUESTS`, but one always may be. Suspects that are avoided count.
        panic_share: when more than this share of those that are ready or ejected are ejected, there is a panic.
        on_panic: told when one begins (True) and ends.
        now: the latest time that an event or `tick` brought.
        panic: so many are out that requests go to those ejected for their requests too.
    """

    __slots__ = ("_ejected", "_lives", "_moving", "listener", "max_share", "now", "on_panic", "panic", "panic_share")

    def __init__(
        self,
        max_share: float,
        listener: Listener,
        *,
        panic_share: float = 1.0,
        on_panic: Callable[[bool], None] = _nobody,
    ) -> None:
        self.max_share = max_share
        self.panic_share = panic_share
        self.listener = listener
        self.on_panic = on_panic
        self.now = 0.0
        self.panic = False
        self._lives: list[Life] = []
        self._ejected = 0
        self._moving = False

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

    @property
    def lives(self) -> Sequence[Life]:
        """Its members."""
        return self._lives

    def tick(self, now: float) -> None:
        """Move what only time moves: weights and the ends of ejections, rests and suspicions. Cheap when there is none."""
        self.now = now
        if self._moving or self._ejected:
            self._derive()

    def moved(self, life: Life, before: WorkerState) -> None:
        """A member changed its state from `before`."""
        ejected = WorkerState.EJECTED
        self._ejected += (life.worker.state is ejected) - (before is ejected)
        self._derive()

    def changed(self, now: float) -> None:
        """Something else about a member changed."""
        self.now = now
        self._derive()

    def weigh(self, life: Life, now: float) -> None:
        """A member's share of failures has grown. O(1): an outage of many requests must not cost the fleet's size for each."""
        self.now = now
        if life.worker.state in _WEIGHED:
            life.worker.weight = weight_of(life, now)
            self._moving = True

    def _derive(self) -> None:
        """Compute `routable`, `weight` and `probe` of every member from the states and the time. O(workers)."""
        now, lives = self.now, self._lives
        ready = [life for life in lives if life.worker.state is WorkerState.READY]
        tryable = [life for life in lives if life.tryable]
        panic = bool(tryable) and (not ready or self._ejected > self.panic_share * (len(ready) + self._ejected))
        if panic is not self.panic:
            self.panic = panic
            self.on_panic(panic)
        self._moving = False
        self._derive_ready(ready, now)
        # A connection that was refused is no verdict but a fact: nobody is there, so others come first in a panic too.
        answering = bool(ready) or any(not life.refused for life in tryable)
        for life in lives:
            worker = life.worker
            if worker.state is WorkerState.READY:
                continue
            if not life.tryable:
                worker.routable = False
                continue
            worker.weight = weight_of(life, now)
            if life.rest_until > now:
                worker.probe = None  # a probe that is out has had its answer
                worker.routable = False
            elif panic and not (life.refused and answering):
                worker.probe = None
                worker.routable = True
            else:
                if worker.probe is None and life.half_open:
                    worker.probe = True
                worker.routable = worker.probe is True

    def _derive_ready(self, ready: Sequence[Life], now: float) -> None:
        """Those that are ready take requests, but who has asked for a rest, and who is suspect while there are others."""
        suspects = 0
        for life in ready:
            worker = life.worker
            worker.weight = weight_of(life, now)
            rests = life.rest_until > now
            if life.suspect_until and now >= life.suspect_until:
                life.suspect_until = 0.0
            suspects += bool(life.suspect_until)
            if not life.suspect_until:
                worker.probe = None
                worker.routable = not rests
            self._moving |= worker.weight < 1 or rests
        if not suspects:
            return
        self._moving = True
        trusted = any(life.worker.routable for life in ready if not life.suspect_until)
        room = self.limit - self._ejected if trusted else 0
        for life in ready:
            if not life.suspect_until:
                continue
            worker = life.worker
            if life.rest_until > now or room <= 0:
                worker.probe = None
                worker.routable = life.rest_until <= now
                continue
            room -= 1
            if life.cleared and worker.probe is None:
                worker.probe = True
            worker.routable = worker.probe is True


_WEIGHED = frozenset({WorkerState.READY, WorkerState.EJECTED})


def weight_of(life: Life, now: float) -> float:
    """The share of a full load that a worker should take, in (0, 1].

    In slow start it goes from `FIRST_WEIGHT` straight to 1 in `slow_start` seconds. And failures count as slow requests: a worker that fails at
    once has the fewest in flight, and would get every request (linkerd's load biaser has the same purpose). If a share f of its requests fails, and
    each of those counts as p ordinary ones (`failure_penalty`), a request there takes ``1 + f (p - 1)`` times as long as one of a good worker.
    """
    weight = 1.0
    doubt = life.doubt_now(now)
    if doubt:
        weight = 1 / (1 + doubt * (life.rules.ejection.failure_penalty - 1))
    if life.worker.state is WorkerState.READY:
        elapsed, slow_start = now - life.since, life.rules.slow_start
        if elapsed < slow_start:
            weight *= FIRST_WEIGHT + (1 - FIRST_WEIGHT) * max(0.0, elapsed) / slow_start
    return weight
