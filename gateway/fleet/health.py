"""The health monitor: asks every worker how it is, hears how requests ended, and keeps the workers' states.

The rules are in `gateway.fleet.states`; here are the clock, the tasks and the questions. The relay calls `succeeded` and
`failed` at the end of each attempt: both are synchronous and O(1) unless a worker changes its state.
"""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import aiohttp
import orjson
import structlog

from gateway.config.schema import Health
from gateway.fleet.asking import Answer, ask
from gateway.fleet.capabilities import learn
from gateway.fleet.fleet import Fleet, Fleets
from gateway.fleet.hosts import HostWatch
from gateway.fleet.membership import Membership
from gateway.fleet.models import ModelCards
from gateway.fleet.standing import compare, degraded, soonest
from gateway.fleet.states import COUNTED, DOUBT_STEP, FailureKind, Life, Transition
from gateway.fleet.worker import Worker, WorkerState
from gateway.tasks import TaskGroup

__all__ = ["FailureKind", "HealthMonitor"]

TICK = 0.25
"""Seconds between updates of slow start weights and ejection ends."""

LANE = 32
"""Checks at once of workers that passed their last one, and as many again of those that did not: a rack that hangs
cannot delay the checks of the others."""

SHORTEST_INTERVAL = 0.01
"""Seconds; the configuration refuses 0, and nothing may ask in a busy loop."""

REST_JITTER = 0.1
"""A worker that asked for a rest gets up to so much more of it: not all that wait come back at the same moment."""

CARDS_EVERY = 60.0
"""Seconds between two looks at a worker's model cards, and at what else it tells about itself."""

_log = structlog.get_logger(__name__)


class HealthMonitor:
    """Owns the state of every worker of a `Fleets`, from `start` to `stop`.

    Needs to be told of each reload by `update`.

    Attributes:
        outliers: how many were ejected because of their success rate, by fleet.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        fleets: Fleets,
        *,
        cards: ModelCards | None = None,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Take over `fleets`; nothing is asked before `start`. Must be built in a running loop.

        Args:
            session: for the questions; not closed here. See `gateway.fleet.asking.open_session`.
            fleets: whose workers to watch.
            cards: is given the workers' model cards, if anyone wants them.
            clock: monotonic seconds; default: the loop's time.
            rng: for the jitter of the intervals.
        """
        self._session = session
        self._fleets = fleets
        self._cards = cards
        self._clock = clock or asyncio.get_running_loop().time
        self._rng = rng or random.Random()
        self._lives: dict[Worker, Life] = {}
        self._memberships: dict[str, Membership] = {}
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._tasks = TaskGroup("health")
        self._steady = asyncio.Semaphore(LANE)
        self._doubtful = asyncio.Semaphore(LANE)
        self._strangers: set[Worker] = set()  # said that they do not list their model
        self._hosts = HostWatch()
        self._compared: dict[str, float] = {}  # when each fleet's success rates were last compared
        self.outliers: dict[str, int] = {}
        self._moved = asyncio.Event()
        self._running = False
        self._adopt(fleets)

    def start(self) -> None:
        """Begin: every worker is asked at once, then at its interval."""
        self._running = True
        self._tasks.spawn("tick", self._tick())
        for worker in self._lives:
            self._watch(worker)

    async def stop(self) -> None:
        """End every task. States stay as they are."""
        self._running = False
        await self._tasks.cancel()
        self._watches.clear()

    def update(self, fleets: Fleets) -> None:
        """Follow a reload: watch new workers, let go of those that are `GONE`, take over changed rules."""
        before = {worker: life.rules for worker, life in self._lives.items()}
        self._fleets = fleets
        self._adopt(fleets)
        if self._cards is not None:
            self._cards.update(fleets)
        for worker in self._watches.keys() - self._lives.keys():
            self._watches.pop(worker).cancel()
        if self._running:
            for worker, life in self._lives.items():
                if before.get(worker) != life.rules:
                    self._watch(worker)
        self._signal()

    async def wait_ready(self, timeout: float, *, everyone: bool = False) -> bool:  # noqa: ASYNC109 - a result, no error
        """Wait until every fleet has a `READY` worker (`everyone`: only such); False after `timeout` seconds."""

        def ready(fleet: Fleet) -> bool:
            return fleet.ready >= (len(fleet.workers) if everyone else 1)

        try:
            async with asyncio.timeout(timeout):
                while not all(ready(fleet) for fleet in self._fleets):
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    def succeeded(self, worker: Worker) -> None:
        """A request that `worker` took ended well: its last byte came. Call it before the lease is released."""
        life = self._lives.get(worker)
        if life is not None:
            # `Life.request_ok` written out, up to where it matters for others.
            if worker.state is WorkerState.EJECTED or life.suspect_until:
                life.request_ok(self._clock())
                return
            life.failures = 0
            life.worked = True
            life.good += 1
            if life.doubt:
                life.doubt *= 1 - DOUBT_STEP

    def failed(self, worker: Worker, kind: FailureKind) -> None:
        """A request that `worker` took failed. Kinds that are not its fault change nothing."""
        life = self._lives.get(worker)
        if life is None:
            return
        if kind in COUNTED:
            life.request_failed(self._clock(), kind)
        elif kind is FailureKind.RATE_LIMITED:  # no fault, but as quick: it must not look idle
            life.doubted(self._clock())

    def waited_in_vain(self, worker: Worker) -> None:
        """A request there was overtaken by a second attempt at another worker. No failure, but nothing to send the next one for."""
        life = self._lives.get(worker)
        if life is not None:
            life.doubted(self._clock())

    def rests(self, worker: Worker, seconds: float, status: int, most: float) -> None:
        """`worker` answered `status` and asked for nothing new for `seconds`; at most `most` are granted."""
        life = self._lives.get(worker)
        if life is None or seconds <= 0:
            return
        now = self._clock()
        seconds = min(seconds, most) * (1 + REST_JITTER * self._rng.random())
        if life.rest_until <= now:
            _log.info("worker rests", worker=worker.id, model=worker.model, status=status, seconds=round(seconds, 3))
        life.rests(now, now + seconds, status)

    def soonest(self, fleet: Fleet) -> tuple[float, int] | None:
        """See `gateway.fleet.standing.soonest`; of one fleet, now."""
        membership = self._memberships.get(fleet.name)
        return None if membership is None else soonest(membership.lives, self._clock())

    def degraded(self, fleet: str) -> list[str]:
        """What works less well than it should in a fleet, in words, for `/readyz`: a panic, rests, suspects."""
        membership = self._memberships.get(fleet)
        return [] if membership is None else degraded(membership, self._clock())

    def panics(self) -> dict[str, bool]:
        """By fleet, whether it is in a panic."""
        return {name: membership.panic for name, membership in self._memberships.items()}

    def apart(self) -> dict[str, tuple[int, int]]:
        """By fleet, how many workers rest, and how many are suspect."""
        now = self._clock()
        return {
            name: (
                sum(life.rest_until > now for life in membership.lives),
                sum(life.suspect_until > now for life in membership.lives),
            )
            for name, membership in self._memberships.items()
        }

    def drain(self, worker_id: str) -> bool:
        """Let the worker finish and give it nothing new; False when there is no such worker."""
        life = self._life(worker_id)
        if life is not None:
            life.drain(self._clock())
        return life is not None

    def undrain(self, worker_id: str) -> bool:
        """Give the worker requests again; False when there is no such worker."""
        life = self._life(worker_id)
        if life is not None:
            life.undrain(self._clock())
        return life is not None

    def ejections(self) -> dict[str, int]:
        """How often each worker was ejected, by its id."""
        return {worker.id: life.ejections for worker, life in self._lives.items()}

    def snapshot(self) -> list[dict[str, Any]]:
        """Every worker as a dict for telemetry and the admin API, `GONE` ones as long as they have requests.

        Keys: id, url, driver, fleet, model, state, routable, since (seconds in this state), in_flight,
        in_flight_tokens, weight, ejections, ejected_for (seconds until it may be tried, else None), last_error,
        consecutive_failures.
        """
        now = self._clock()
        rows = [
            self._row(fleet.name, worker, self._lives[worker], now)
            for fleet in self._fleets
            for worker in fleet.workers
        ]
        return rows + [self._row(None, worker, None, now) for worker in self._fleets.departed if worker.in_flight]

    @staticmethod
    def _row(fleet: str | None, worker: Worker, life: Life | None, now: float) -> dict[str, Any]:
        waits = life is not None and life.cause is not None and not life.half_open
        return {
            "id": worker.id,
            "url": worker.url,
            "driver": worker.driver.name,
            "fleet": fleet,
            "model": worker.model,
            "state": worker.state.value,
            "routable": worker.routable,
            "since": round(now - life.since, 3) if life else None,
            "in_flight": worker.in_flight,
            "in_flight_tokens": worker.in_flight_tokens,
            "weight": worker.weight,
            "ejections": life.ejections if life else 0,
            "ejected_for": round(max(0.0, life.until - now), 3) if life and waits else None,
            "last_error": life.last_error if life else None,
            "consecutive_failures": life.failures if life else 0,
        }

    def _life(self, worker_id: str) -> Life | None:
        return next((life for worker, life in self._lives.items() if worker.id == worker_id), None)

    def _adopt(self, fleets: Fleets) -> None:
        """Give each worker of `fleets` a life and each fleet its membership; drop all others."""
        now = self._clock()
        lives: dict[Worker, Life] = {}
        memberships: dict[str, Membership] = {}
        for fleet in fleets:
            share = fleet.health.ejection.max_share
            membership = self._memberships.get(fleet.name) or Membership(
                share, self._changed, on_panic=partial(self._panicked, fleet.name)
            )
            membership.max_share = share
            membership.panic_share = fleet.health.ejection.panic_share
            memberships[fleet.name] = membership
            for worker in fleet.workers:
                life = self._lives.get(worker)
                if life is None:
                    life = Life(worker, membership, fleet.health, start_up=worker.driver.start_up, now=now)
                life.rules = fleet.health
                lives[worker] = life
            membership.replace([lives[worker] for worker in fleet.workers], now)
        for worker, life in self._lives.items():
            if worker not in lives:
                life.removed(now)
                _log.info("worker removed", worker=worker.id, in_flight=worker.in_flight)
        self._lives = lives
        self._memberships = memberships
        self._strangers &= lives.keys()

    def _watch(self, worker: Worker) -> None:
        """Start the checks of one worker anew."""
        if (old := self._watches.get(worker)) is not None:
            old.cancel()
        self._watches[worker] = self._tasks.spawn(f"check {worker.id}", self._check_forever(self._lives[worker]))

    async def _check_forever(self, life: Life) -> None:
        """Ask at once, then at the interval with a tenth of jitter; the first pause is random, to spread a fleet."""
        interval = max(life.rules.interval, SHORTEST_INTERVAL)
        cards_at = facts_at = 0.0
        passed = False
        pause = interval * self._rng.uniform(0.1, 1.0)
        while True:
            before, passed = passed, await self._check(life)
            if passed:
                if not before:  # it may be another process than before
                    cards_at = facts_at = 0.0
                if self._clock() >= cards_at:
                    await self._fetch_cards(life.worker, life.rules)
                    cards_at = self._clock() + CARDS_EVERY * self._rng.uniform(0.9, 1.1)
                # Not at once: whoever follows its events asks the same as soon as it is ready.
                if before and self._clock() >= facts_at:
                    await self._fetch_facts(life)
                    facts_at = self._clock() + CARDS_EVERY * self._rng.uniform(0.9, 1.1)
            await asyncio.sleep(pause)
            pause = interval * self._rng.uniform(0.9, 1.1)

    async def _check(self, life: Life) -> bool:
        """One active check, counted; whether it passed."""
        worker, rules = life.worker, life.rules
        async with self._doubtful if life.misses else self._steady:
            answer = await self._ask(worker, rules.path or worker.driver.health_path, rules)
        now = self._clock()
        if answer.our_fault:
            return False
        if answer.error is None and worker.driver.is_healthy(answer.status, answer.body):
            life.check_ok(now)
            return True
        reason = answer.error or f"health check answered {answer.status}"
        known = life.last_error
        life.check_failed(now, reason, timed_out=answer.timed_out)
        if worker.state is WorkerState.WARMING and known is None:
            _log.info("worker not ready yet", worker=worker.id, model=worker.model, reason=reason)
        return False

    async def _fetch_cards(self, worker: Worker, rules: Health) -> None:
        """Ask for the model cards; on any failure the old ones stay."""
        path = worker.driver.models_path
        async with self._steady:
            answer = await self._ask(worker, path, rules)
        if answer.status == 200:
            learn(worker, path, answer.body, self._clock())
        if self._cards is None:
            return
        try:
            payload = orjson.loads(answer.body) if answer.status == 200 else None
        except orjson.JSONDecodeError:
            payload = None
        cards = worker.driver.parse_model_cards(payload)
        if cards and not self._cards.record(worker, cards) and worker not in self._strangers:
            self._strangers.add(worker)
            served = [str(card["id"]) for card in cards[:5]]
            _log.warning("worker does not list its model", worker=worker.id, model=worker.model, lists=served)

    async def _fetch_facts(self, life: Life) -> None:
        """Ask what else it tells about what it can do, unless somebody did since it is ready; on any failure the old stays."""
        worker, path = life.worker, life.worker.driver.facts_path
        if path is None:
            return
        at = worker.capabilities.heard_at(path)
        if at is not None and at > max(life.since, self._clock() - CARDS_EVERY / 2):
            return
        async with self._steady:
            answer = await self._ask(worker, path, life.rules)
        if answer.status == 200:
            learn(worker, path, answer.body, self._clock())

    async def _ask(self, worker: Worker, path: str, rules: Health) -> Answer:
        return await ask(self._session, worker, path, rules.timeout)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = self._clock()
            for fleet in self._fleets:
                membership = self._memberships[fleet.name]
                membership.tick(now)
                if now >= self._compared.get(fleet.name, -inf) + fleet.health.ejection.outliers.interval:
                    self._compared[fleet.name] = now
                    self._compare(fleet, membership, now)

    def _compare(self, fleet: Fleet, membership: Membership, now: float) -> None:
        """Eject those whose success rate of the interval that has ended is far below the others'."""
        ejected = compare(membership.lives, fleet.health.ejection.outliers, now)
        if ejected:
            self.outliers[fleet.name] = self.outliers.get(fleet.name, 0) + ejected

    def _doubt_host(self, transition: Transition) -> None:
        """A worker was ejected: if others of its host were as well, the rest of that host has to prove itself."""
        worker, cause, now = transition.worker, transition.cause, transition.at
        life = self._lives.get(worker)
        if life is None or cause is None:
            return
        rules = life.rules.ejection.hosts
        address = f"{worker.host}:{worker.port}"
        if not rules.workers or not self._hosts.ejected(
            worker.machine, address, now, workers=rules.workers, within=rules.within
        ):
            return
        doubted = []
        for fleet in self._fleets:
            if all(other.machine == worker.machine for other in fleet.workers):
                continue  # there is nowhere else to go
            for other in fleet.workers:
                suspect = self._lives.get(other)
                if other.machine != worker.machine or other.state is not WorkerState.READY or suspect is None:
                    continue
                if not suspect.suspect_until:
                    doubted.append(other.id)
                suspect.suspected(now, now + rules.suspect, cause)
                if self._running:
                    self._watch(other)  # is asked at once
        if doubted:
            _log.warning("host in doubt", host=worker.machine, ejected=worker.id, suspect=doubted)

    def _panicked(self, fleet: str, panic: bool) -> None:
        if panic:
            _log.error("panic: too many workers are out, those that failed requests are used all the same", model=fleet)
        else:
            _log.info("panic is over", model=fleet)

    def _changed(self, transition: Transition) -> None:
        """Log a transition, once, and wake who waits for it."""
        worker = transition.worker
        facts: dict[str, Any] = {"worker": worker.id, "model": worker.model, "was": transition.before.value}
        match transition.after:
            case WorkerState.EJECTED:
                cause = transition.cause.value if transition.cause else None
                _log.warning(
                    "worker ejected", **facts, cause=cause, reason=transition.reason, seconds=transition.seconds
                )
                if transition.before is WorkerState.READY:
                    self._doubt_host(transition)
            case WorkerState.READY:
                if transition.before is WorkerState.WARMING:
                    worker.restarted()
                _log.info("worker ready", **facts)
            case WorkerState.DRAINING:
                _log.info("worker draining", **facts, in_flight=worker.in_flight)
            case WorkerState.WARMING:
                _log.info("worker warming", **facts)
            case WorkerState.GONE:
                pass  # told by _adopt
        self._signal()

    def _signal(self) -> None:
        """Wake everyone who waits in `wait_ready` now."""
        self._moved.set()
        self._moved = asyncio.Event()
