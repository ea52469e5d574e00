"""The life of a worker as a table of transitions: events and the time go in, a new state comes out. No I/O, no clock.

`Life` is one worker; `gateway.fleet.membership.Membership` is its fleet: it knows how many may be ejected at once and
which ejected ones must be used when nothing else is left. Both write `state`, `routable`, `weight` and `probe` of the `Worker`; the
only other writer is `Fleets.updated`, which marks those that it leaves out `GONE`.

The rules follow Envoy's outlier detection where it has one: ejection for base x n seconds with a cap, a maximum share
with one always allowed, and forgiveness of one step per quiet period.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from types import MappingProxyType
from typing import TYPE_CHECKING

from gateway.config.schema import Health
from gateway.fleet.worker import Worker, WorkerState

if TYPE_CHECKING:
    from gateway.fleet.membership import Membership

PROBE_PATIENCE = 10.0
"""Seconds that a half-open worker's probe request may run before a passing active check is proof enough."""

FORGIVE_AFTER = 6.0
"""One strike is forgiven for each `ejection.base` times this in `READY` (30 s at the default; Envoy: 10 s)."""

DOUBT_STEP = 0.2
"""Weight of each new request in a worker's share of failures (an EWMA)."""

DOUBT_SECONDS = 10.0
"""Time constant with which that share fades when there are no requests: it takes e times less after so long."""

DOUBT_NONE = 0.02
"""A share below this is none."""

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
    OUTLIER = "outlier"


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
        good, bad: requests that succeeded and failed in the present interval of `gateway.fleet.outliers`.
        doubt: share of failed requests of late, as of `doubt_at`: an EWMA, see `gateway.fleet.membership.weight_of`.
        refused: the last thing heard of it was that it cannot be connected to.
        rest_until: it has asked for nothing new until then (`Retry-After`).
        rest_status: with which status.
        suspect_until: others of its host were ejected: until then it has to prove itself; 0: it has not.
        suspect_for: why those were ejected.
        cleared: suspect because of others' requests, it has passed a check and may be tried with one request.
        last_error: the latest failure in words; None once the worker is `READY` and passed a check.
    """

    __slots__ = (
        "bad",
        "cause",
        "cleared",
        "doubt",
        "doubt_at",
        "ejections",
        "failures",
        "good",
        "last_error",
        "membership",
        "misses",
        "passes",
        "refused",
        "rest_status",
        "rest_until",
        "rules",
        "since",
        "start_up",
        "strikes",
        "suspect_for",
        "suspect_until",
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
        self.good = 0
        self.bad = 0
        self.doubt = 0.0
        self.doubt_at = now
        self.refused = False
        self.rest_until = 0.0
        self.rest_status = 0
        self.suspect_until = 0.0
        self.suspect_for: Cause | None = None
        self.cleared = False
        self.last_error: str | None = None

    def check_ok(self, now: float) -> None:
        """An active check passed."""
        self.passes += 1
        self.misses = 0
        self.worked = False
        self.refused = False
        self._happen(Event.CHECK_OK, now)
        if self.suspect_until:
            self._prove(now, by_request=False)
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
        self.good += 1
        self.doubt *= 1 - DOUBT_STEP
        if self.worker.state is WorkerState.EJECTED:
            self.refused = False
            self._happen(Event.REQUEST_OK, now)
        elif self.suspect_until:
            self._prove(now, by_request=True)

    def request_failed(self, now: float, kind: FailureKind) -> None:
        """A request failed. Does nothing for kinds that are not the worker's fault."""
        if kind not in COUNTED or self.worker.state not in _JUDGED_BY_REQUESTS:
            return
        self.failures += 1
        self.bad += 1
        self.refused = kind is FailureKind.CONNECT
        self.last_error = _REASONS[kind]
        self.doubted(now)
        self._happen(Event.REQUEST_FAILED, now)

    def doubted(self, now: float) -> None:
        """A request there was no good, whether it is the worker's fault or not: failed, turned away, or waited for in vain."""
        doubt = self.doubt_now(now)
        self.doubt = doubt + (1 - doubt) * DOUBT_STEP
        self.doubt_at = now
        self.membership.weigh(self, now)

    def doubt_now(self, now: float) -> float:
        """`doubt` as it is by now."""
        doubt = self.doubt
        if doubt:
            doubt *= exp(-max(0.0, now - self.doubt_at) / DOUBT_SECONDS)
            if doubt < DOUBT_NONE:
                doubt = self.doubt = 0.0
        return doubt

    def outlier(self, now: float, reason: str) -> None:
        """It fails far more often than its peers."""
        if self.worker.state is WorkerState.READY:
            self.last_error = reason
            self._happen(Event.OUTLIER, now)

    def rests(self, now: float, until: float, status: int) -> None:
        """It has answered `status` and asked for nothing new before `until`."""
        self.rest_until = max(self.rest_until, until)
        self.rest_status = status
        self.membership.changed(now)

    def suspected(self, now: float, until: float, cause: Cause) -> None:
        """Others of its host were ejected for `cause`: it is avoided where there are others, until it has proved itself or for so long."""
        if self.worker.state is WorkerState.READY:
            self.suspect_until = until
            self.suspect_for = cause
            self.cleared = False
            self.membership.changed(now)

    def _prove(self, now: float, *, by_request: bool) -> None:
        """Something went well while it was suspect.

        A check that passes is proof enough where the others failed theirs. Where those failed requests it lets one request in, and that is the proof.
        """
        if by_request:
            proved = self.cleared and self.worker.probe is not True
        else:
            proved = self.suspect_for is Cause.CHECKS
            self.cleared = True
        if proved:
            self.suspect_until = 0.0
        self.membership.changed(now)

    def drain(self, now: float) -> None:
        """Take nothing new."""
        self._happen(Event.DRAIN, now)

    def undrain(self, now: float) -> None:
        """Take requests again, at once if the active checks pass."""
        self._happen(Event.UNDRAIN, now)

    def removed(self, now: float) -> None:
        """It is in no configuration any more. It never comes back."""
        self._happen(Event.REMOVED, now)

    def made_room(self, now: float) -> None:
        """Too large a share of its fleet is ejected since the fleet shrank: it comes back."""
        self._happen(Event.MADE_ROOM, now)

    @property
    def tryable(self) -> bool:
        """Whether it is ejected but may take requests in a panic (a reload may have made it `GONE` meanwhile)."""
        return self.cause is Cause.REQUESTS and self.worker.state is WorkerState.EJECTED

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
        if row.after is WorkerState.READY and (before is WorkerState.WARMING or self.cause is Cause.CHECKS):
            self.worker.restarted()  # it did not answer its checks: it may well be another process now
        self.cause = row.cause
        self.since = now
        self.failures = 0
        self.suspect_until = 0.0
        if row.after is WorkerState.READY:
            self.doubt = 0.0
            self.refused = False
        self.worker.probe = None
        self.worker.state = row.after
        self.membership.moved(self, before)
        self.membership.listener(
            Transition(self.worker, before, row.after, event, row.cause, self.last_error, seconds, now)
        )

    def _forgiven(self, ready_for: float) -> int:
        period = self.rules.ejection.base * FORGIVE_AFTER
        return int(ready_for / period) if period else self.strikes


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
    return life.misses >= (1 if life.suspect_until else life.rules.unhealthy_after)


def _start_up_is_over(life: Life) -> bool:
    return life.membership.now - life.since > life.start_up


def _requests_fail(life: Life) -> bool:
    enough = 1 if life.suspect_until else life.rules.ejection.consecutive_failures
    return life.failures >= enough and life.membership.may_eject


def _room_is_left(life: Life) -> bool:
    return life.membership.may_eject


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
        (WorkerState.READY, Event.OUTLIER): (Row(_room_is_left, WorkerState.EJECTED, Cause.REQUESTS, strike=True),),
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
