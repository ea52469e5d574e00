"""The life of a worker as a table of transitions: events and the time go in, a new state comes out. No I/O, no clock.

`Life` is one worker, `Membership` the workers of one fleet: it knows how many may be ejected at once and which ejected
ones must be used when nothing else is left. Both write `state`, `routable`, `weight` and `probe` of the `Worker`; the
only other writer is `Fleets.updated`, which marks those that it leaves out `GONE`.

The rules follow Envoy's outlier detection where it has one: ejection for base x n seconds with a cap, a maximum share
with one always allowed, and forgiveness of one step per quiet period.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gateway.config.schema import Health
from gateway.fleet.worker import Worker, WorkerState

FIRST_WEIGHT = 0.1
"""Where the slow start ramp begins, as a share of full load."""

PROBE_PATIENCE = 10.0
"""Seconds that a half-open worker's probe request may run before a passing active check is proof enough."""

FORGIVE_AFTER = 6.0
"""One strike is forgiven for each `ejection.base` times this in `READY` (30 s at the default; Envoy: 10 s)."""

MAX_PASSES = 10
"""A worker whose health check flaps needs more passes each time to come back, but not more than this many."""


class FailureKind(enum.Enum):
    """How a request failed. Only what proves a fault of the worker counts against it, see `COUNTED`."""

    CONNECT = "connect"
    """No connection: refused, unreachable, TLS, connect timeout."""
    TIMEOUT = "timeout"
    """No first byte, or a silence inside the answer, for longer than allowed."""
    SERVER_ERROR = "server_error"
    """Answered 5xx."""
    BROKE_OFF = "broke_off"
    """The answer, or the connection before it, ended early or was no HTTP."""
    CLIENT_ERROR = "client_error"
    """Answered 4xx: the request's fault."""
    RATE_LIMITED = "rate_limited"
    """Answered 429: busy, not broken."""
    CLIENT_GONE = "client_gone"
    """The client left before the end."""


COUNTED = frozenset({FailureKind.CONNECT, FailureKind.TIMEOUT, FailureKind.SERVER_ERROR, FailureKind.BROKE_OFF})


class Event(enum.Enum):
    """What may happen to a worker."""

    CHECK_OK = "check_ok"
    CHECK_FAILED = "check_failed"
    REQUEST_OK = "request_ok"
    REQUEST_FAILED = "request_failed"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    REMOVED = "removed"
    MADE_ROOM = "made_room"
    """The fleet shrank and too large a share of it is ejected: this one comes back."""


class Cause(enum.Enum):
    """Why a worker is ejected."""

    CHECKS = "checks"
    """It fails its active checks: nothing is ever sent there."""
    REQUESTS = "requests"
    """Its requests failed while its checks may well pass: it may try again, and is used when nobody else is left."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of state, for logs and metrics. `seconds` is the ejection's length, 0 for others."""

    worker: Worker
    before: WorkerState
    after: WorkerState
    event: Event
    cause: Cause | None
    reason: str | None
    seconds: float
    at: float


Listener = Callable[[Transition], None]


class Life:
    """One worker's health.

    Attributes:
        worker: whose life it is.
        rules: thresholds and times; may be replaced at any time.
        start_up: seconds that it may stay `WARMING` before it counts as ejected.
        membership: the fleet that it belongs to.
        since: when it entered its state.
        cause: why it is ejected, None in other states.
        until: when an ejection because of `REQUESTS` is over and the worker half-open.
        ejections: how often it was ejected, for telemetry.
        strikes: the same, but forgiven in time: what makes the next ejection longer.
        passes, misses: active checks that passed, failed in a row.
        failures: requests that failed in a row.
        worked: a request succeeded since the last active check.
        last_error: the latest failure in words; None once the worker is `READY` and passed a check.
    """

    __slots__ = (
        "cause",
        "ejections",
        "failures",
        "last_error",
        "membership",
        "misses",
        "passes",
        "rules",
        "since",
        "start_up",
        "strikes",
        "until",
        "worked",
        "worker",
    )

    def __init__(self, worker: Worker, membership: "Membership", rules: Health, *, start_up: float, now: float) -> None:
        self.worker = worker
        self.membership = membership
        self.rules = rules
        self.start_up = start_up
        self.since = now
        self.cause: Cause | None = None
        self.until = now
        self.ejections = 0
        self.strikes = 0
        self.passes = 0
        self.misses = 0
        self.failures = 0
        self.worked = False
        self.last_error: str | None = None

    def check_ok(self, now: float) -> None:
        """An active check passed."""
        self.passes += 1
        self.misses = 0
        self.worked = False
        self._happen(Event.CHECK_OK, now)
        if self.worker.state is WorkerState.READY and not self.failures:
            self.last_error = None

    def check_failed(self, now: float, reason: str, *, timed_out: bool = False) -> None:
        """An active check failed.

        A check that only ran out of time says nothing when requests succeeded meanwhile: the worker is busy, and
        leaving it out would load the others until they time out as well.
        """
        busy = timed_out and self.worked and self.worker.state is WorkerState.READY
        self.worked = False
        if busy:
            return
        self.misses += 1
        self.passes = 0
        self.last_error = reason
        self._happen(Event.CHECK_FAILED, now)

    def request_ok(self, now: float) -> None:
        """A request ended well."""
        self.failures = 0
        self.worked = True
        if self.worker.state is WorkerState.EJECTED:
            self._happen(Event.REQUEST_OK, now)

    def request_failed(self, now: float, kind: FailureKind) -> None:
        """A request failed. Does nothing for kinds that are not the worker's fault."""
        if kind not in COUNTED or self.worker.state not in _JUDGED_BY_REQUESTS:
            return
        self.failures += 1
        self.last_error = _REASONS[kind]
        self._happen(Event.REQUEST_FAILED, now)

    def drain(self, now: float) -> None:
        """Take nothing new."""
        self._happen(Event.DRAIN, now)

    def undrain(self, now: float) -> None:
        """Take requests again, at once if the active checks pass."""
        self._happen(Event.UNDRAIN, now)

    def removed(self, now: float) -> None:
        """It is in no configuration any more. It never comes back."""
        self._happen(Event.REMOVED, now)

    @property
    def half_open(self) -> bool:
        """Whether it is ejected for its requests and may be tried (once `Membership.tick` saw the time)."""
        return self.cause is Cause.REQUESTS and self.membership.now >= self.until

    def _happen(self, event: Event, now: float) -> None:
        """Follow the first row of the table whose guard holds; stay where we are if none does."""
        self.membership.now = now
        before = self.worker.state
        for row in TRANSITIONS.get((before, event), ()):
            if row.guard(self):
                self._enter(row, before, event, now)
                return

    def _enter(self, row: "Row", before: WorkerState, event: Event, now: float) -> None:
        ready_for = now - self.since if before is WorkerState.READY else 0.0
        seconds = 0.0
        if row.after is WorkerState.EJECTED:
            if row.strike:
                self.ejections += 1
                self.strikes = max(0, self.strikes - self._forgiven(ready_for)) + 1
            if row.cause is Cause.REQUESTS:
                seconds = min(self.rules.ejection.base * self.strikes, self.rules.ejection.max)
                self.until = now + seconds
        self.cause = row.cause
        self.since = now
        self.failures = 0
        self.worker.probe = None
        self.worker.state = row.after
        self.membership.moved(self, before)
        self.membership.listener(
            Transition(self.worker, before, row.after, event, row.cause, self.last_error, seconds, now)
        )

    def _forgiven(self, ready_for: float) -> int:
        period = self.rules.ejection.base * FORGIVE_AFTER
        return int(ready_for / period) if period else self.strikes


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
            life._happen(Event.MADE_ROOM, now)  # noqa: SLF001 - the two classes are one machine
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
        self.panic = not ready and any(life.cause is Cause.REQUESTS for life in self._lives)
        self._ramping = False
        for life in self._lives:
            worker = life.worker
            if worker.state is WorkerState.READY:
                worker.weight = _ramp(self.now - life.since, life.rules.slow_start)
                worker.routable = True
                self._ramping |= worker.weight < 1
            elif life.cause is not Cause.REQUESTS:
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


Guard = Callable[[Life], bool]


@dataclass(frozen=True, slots=True)
class Row:
    """One allowed transition: taken when `guard` holds. `strike`: it counts as a new ejection."""

    guard: Guard
    after: WorkerState
    cause: Cause | None = None
    strike: bool = False


def _always(_: Life) -> bool:
    return True


def _checks_pass(life: Life) -> bool:
    return life.passes >= life.rules.healthy_after


def _checks_fail(life: Life) -> bool:
    return life.misses >= life.rules.unhealthy_after


def _start_up_is_over(life: Life) -> bool:
    return life.membership.now - life.since > life.start_up


def _requests_fail(life: Life) -> bool:
    return life.failures >= life.rules.ejection.consecutive_failures and life.membership.may_eject


def _no_more_answers(life: Life) -> bool:
    return life.cause is Cause.REQUESTS and _checks_fail(life)


def _may_return(life: Life) -> bool:
    """Passed checks end an ejection because of checks, and that because of requests once its time is over.

    While a probe request is out it has the first word, for `PROBE_PATIENCE` at most: it may be a long stream.
    """
    healthy_after = life.rules.healthy_after
    if life.cause is Cause.CHECKS:
        return life.passes >= max(healthy_after, min(healthy_after * life.strikes, MAX_PASSES))
    probe_is_out = life.worker.probe is not None and life.worker.probe is not True
    wait = PROBE_PATIENCE if probe_is_out else 0.0
    return life.passes >= healthy_after and life.membership.now >= life.until + wait


def _tried_well(life: Life) -> bool:
    """A success counts when we meant the worker to be tried, not when a stream from before the ejection ends."""
    return life.half_open or (life.membership.panic and life.cause is Cause.REQUESTS)


def _tried_badly(life: Life) -> bool:
    return life.half_open


TRANSITIONS: Mapping[tuple[WorkerState, Event], tuple[Row, ...]] = MappingProxyType(
    {
        (WorkerState.WARMING, Event.CHECK_OK): (Row(_checks_pass, WorkerState.READY),),
        (WorkerState.WARMING, Event.CHECK_FAILED): (
            Row(_start_up_is_over, WorkerState.EJECTED, Cause.CHECKS, strike=True),
        ),
        (WorkerState.WARMING, Event.DRAIN): (Row(_always, WorkerState.DRAINING),),
        (WorkerState.WARMING, Event.REMOVED): (Row(_always, WorkerState.GONE),),
        (WorkerState.READY, Event.CHECK_FAILED): (Row(_checks_fail, WorkerState.EJECTED, Cause.CHECKS, strike=True),),
        (WorkerState.READY, Event.REQUEST_FAILED): (
            Row(_requests_fail, WorkerState.EJECTED, Cause.REQUESTS, strike=True),
        ),
        (WorkerState.READY, Event.DRAIN): (Row(_always, WorkerState.DRAINING),),
        (WorkerState.READY, Event.REMOVED): (Row(_always, WorkerState.GONE),),
        (WorkerState.EJECTED, Event.CHECK_OK): (Row(_may_return, WorkerState.READY),),
        (WorkerState.EJECTED, Event.CHECK_FAILED): (Row(_no_more_answers, WorkerState.EJECTED, Cause.CHECKS),),
        (WorkerState.EJECTED, Event.REQUEST_OK): (Row(_tried_well, WorkerState.READY),),
        (WorkerState.EJECTED, Event.REQUEST_FAILED): (
            Row(_tried_badly, WorkerState.EJECTED, Cause.REQUESTS, strike=True),
        ),
        (WorkerState.EJECTED, Event.MADE_ROOM): (Row(_always, WorkerState.READY),),
        (WorkerState.EJECTED, Event.DRAIN): (Row(_always, WorkerState.DRAINING),),
        (WorkerState.EJECTED, Event.REMOVED): (Row(_always, WorkerState.GONE),),
        (WorkerState.DRAINING, Event.UNDRAIN): (
            Row(_checks_pass, WorkerState.READY),
            Row(_always, WorkerState.WARMING),
        ),
        (WorkerState.DRAINING, Event.REMOVED): (Row(_always, WorkerState.GONE),),
    }
)
"""Every arrow there is; what is not here does not happen. `GONE` has none."""

_JUDGED_BY_REQUESTS = frozenset({WorkerState.READY, WorkerState.EJECTED})

_REASONS: Mapping[FailureKind, str] = MappingProxyType(
    {
        FailureKind.CONNECT: "requests could not connect",
        FailureKind.TIMEOUT: "requests timed out",
        FailureKind.SERVER_ERROR: "requests were answered 5xx",
        FailureKind.BROKE_OFF: "answers broke off",
    }
)
