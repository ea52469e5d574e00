"""Residency for all fleets of a gateway: built from the configuration, started, reloaded, stopped.

Without `residency` in the configuration there are no fleets here, no task and no connection.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from backends.hints.model import Fate, Hint
from backends.hints.registry import HintTarget
from gateway.prompt.blocks import Chain
from gateway.residency.delivery import Delivery
from gateway.residency.live import FleetResidency, holds_of, moved_bytes
from gateway.residency.probing import NONE, Prober
from gateway.residency.residency import Residency
from gateway.tasks import TaskGroup
from gateway.telemetry.residency import ResidencyReading

if TYPE_CHECKING:
    import aiohttp

    from backends.hints.base import HintCall
    from gateway.config.residency import ResidencyConfig, WorkerHints
    from gateway.config.schema import Config
    from gateway.fleet.fleet import Fleet, Fleets
    from gateway.fleet.worker import Worker
    from gateway.prefix.feed import Feeds
    from gateway.residency.speakers import Speaker

TICK: Final = 1.0
"""Seconds between two looks at what time alone brings, at most."""
TIERS: Final = ("device", "l1", "l2")
"""The fastest first: what has come nearer than was wished has come."""
SOONEST: Final = 0.25
"""And at least; as often as this while events are looked for that confirm hints."""
CONFIRMED: Final = 256
"""Hints that are looked for at a time."""

_log = structlog.get_logger(__name__)


class Residencies:
    """See the module.

    Attributes:
        fleets: by name; those that have none cost nothing.
        delivery: what says hints beside requests.
        prober: who knows what each worker understands.
    """

    def __init__(
        self, session: "aiohttp.ClientSession", *, clock: Callable[[], float], feeds: "Callable[[], Feeds | None]"
    ) -> None:
        """Nothing is asked before `start`.

        Args:
            session: as of `gateway.fleet.asking.open_session`; not closed here.
            clock: monotonic seconds, the data plane's.
            feeds: what is known of the workers' caches; None: nothing.
        """
        self._clock = clock
        self._feeds = feeds
        self._config: ResidencyConfig | None = None
        self._running = False
        self._tasks = TaskGroup("residency")
        self._workers: dict[str, Worker] = {}
        self._blind: frozenset[str] = frozenset()
        self.prober = Prober(session, clock, self._listen)
        self.delivery = Delivery(
            session,
            tell=self._tell,
            allow=self._allow,
            clock=clock,
            moved=self._moved,
            warmed=self._warmed,
            spurned=self._spurned,
        )
        self.fleets: Mapping[str, FleetResidency] = {}

    def use(self, config: "Config", fleets: "Fleets") -> None:
        """Take over a configuration. What was learned stays as long as the section stays as it is."""
        section = config.residency if config.residency is not None and config.residency.enabled else None
        before = self.fleets if section == self._config else {}
        self._config = section
        self._blind = frozenset(fleet.name for fleet in fleets if section is not None and fleet.knowledge == "none")
        made: dict[str, FleetResidency] = {}
        wanted: list[tuple[Worker, HintTarget, Sequence[str]]] = []
        for fleet, model in zip(fleets, config.models, strict=True) if section is not None else ():
            if fleet.name in self._blind:
                continue
            assert section is not None
            live = before.get(fleet.name) or self._built(fleet, section)
            live.workers = {worker.id: worker for worker in fleet.workers}
            made[fleet.name] = live
            for worker, own in zip(fleet.workers, model.workers, strict=True):
                wanted.append((worker, _target(fleet, worker, own.hints), _names(own.hints)))
        self._workers = {worker.id: worker for worker, _, _ in wanted}
        self.prober.update(wanted)
        self.delivery.keep(set(self._workers))
        self.fleets = made
        self._listen()
        if self._running:
            self._start_tasks()

    def leaving(self, fleets: "Fleets") -> None:
        """Workers that are in no fleet of `fleets` will be gone: what they hold moves on. To be called while it is known what they hold."""
        for fleet in fleets:
            live = self.fleets.get(fleet.name)
            if live is None:
                continue
            stays = {worker for worker in fleet.workers if worker.routable}
            for worker in [each for each in live.workers.values() if each not in fleet.workers]:
                live.draining(worker, among=stays)

    def start(self) -> None:
        """Begin to ask workers, and to look at the clock."""
        self._running = True
        self._start_tasks()

    async def stop(self) -> None:
        """End everything; what waits is skipped."""
        self._running = False
        await self._tasks.cancel()
        await self.prober.stop()
        await self.delivery.stop()

    def drained(self, worker_id: str) -> int:
        """A worker is being drained: what it holds that is worth it moves on. How many hints that gave."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return 0
        return sum(live.draining(worker) for live in self.fleets.values() if worker_id in live.workers)

    def session_ended(self, session: str) -> int:
        """A conversation is over, of whichever fleet. How many hints that gave."""
        return sum(live.ended(session) for live in self.fleets.values())

    def degraded(self, fleet: str) -> list[str]:
        """What works less well than it should, in sentences."""
        if fleet in self._blind:
            return ["residency is on, but by its policy nobody looks at prompts: nothing is wished"]
        live = self.fleets.get(fleet)
        if live is None:
            return []
        asked = [self.prober.workers[worker].asked for worker in live.workers if worker in self.prober.workers]
        if live.silent and all(asked):
            return ["residency is on, but none of its workers understands hints: nothing is wished"]
        failed = [f"residency has failed {live.faults} times; the log says how"] if live.faults else []
        return [*live.core.ledger.throttled(), *failed]

    def readings(self) -> Iterator[ResidencyReading]:
        """For the metrics."""
        for name, live in self.fleets.items():
            ledger, budget = live.core.ledger, live.core.budget
            rules = ledger.by_rule()
            yield ResidencyReading(
                name,
                list(ledger.counts()),
                len(ledger.open),
                {rule: bool(row["throttled"]) for rule, row in rules.items()},
                [
                    (worker.id, tier, budget.pinned(worker.id, tier), worker.capabilities.kv_capacity_tokens or 0)
                    for worker in live.workers.values()
                    for tier in ("device", "l1")
                ],
            )

    def document(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "enabled": bool(self.fleets),
            "waiting": self.delivery.waiting,
            "left_alone": self.delivery.blocked(),
            "latency": {
                driver: {"calls": seen.count, "seconds": round(seen.sum, 6)}
                for driver, seen in self.delivery.latency.items()
            },
            "fleets": [live.document() for live in self.fleets.values()],
        }

    def _listen(self) -> None:
        for live in self.fleets.values():
            live.listen()

    def _start_tasks(self) -> None:
        if self.fleets and not len(self._tasks):
            self.prober.start()
            self._tasks.spawn("tick", self._tick())

    async def _tick(self) -> None:
        while True:
            now = self._clock()
            soonest = now + TICK
            for live in self.fleets.values():
                try:
                    self._look_at(live, now)
                except Exception:  # noqa: BLE001 - the others' time goes on
                    live.failed()
                soonest = min(soonest, now if live.core.wants_events else live.core.next_tick)
            await asyncio.sleep(max(SOONEST, soonest - self._clock()))

    def _look_at(self, live: FleetResidency, now: float) -> None:
        """What time alone has brought."""
        core = live.core
        if core.wants_events:
            self._confirm(live, now)
        live.say(core.tick(now))
        for text in core.ledger.news:
            _log.warning("residency", model=live.name, detail=text)
        core.ledger.news.clear()

    def _confirm(self, live: FleetResidency, now: float) -> None:
        """Look in the map for what was to be fetched: what a worker's events have put there was done."""
        feeds = self._feeds()
        maps = feeds.index.maps if feeds is not None else {}
        for (worker_id, mark), entry in list(live.core.ledger.watched.items())[:CONFIRMED]:
            if not entry.said:
                continue
            tiers = TIERS[: TIERS.index(entry.target) + 1]
            for known in maps.values():
                match = known.match([mark], 1).held().get(worker_id)
                if match is not None and match.source == "event" and any(getattr(match, tier) for tier in tiers):
                    live.core.event(worker_id, entry.target, [mark], stored=True, now=now)

    def _built(self, fleet: "Fleet", section: "ResidencyConfig") -> FleetResidency:
        # A reload replaces the fleet; its residency goes on with the workers that there are then.
        live: FleetResidency
        core = Residency(section, workers=lambda: list(live.workers.values()), holds=holds_of(self._feeds))
        live = FleetResidency(fleet.name, core, self.prober, self.delivery, self._clock)
        return live

    def _of(self, hint: Hint) -> FleetResidency | None:
        return self.fleets.get(hint.subject.fleet)

    def _tell(self, hint: Hint, fate: Fate, detail: str, now: float) -> None:
        if (live := self._of(hint)) is not None:
            live.core.ledger.fate(hint, fate, detail, now)

    def _allow(self, hint: Hint, moved: int, now: float) -> bool:
        live = self._of(hint)
        return live is not None and live.core.budget.allow(hint, moved, now)

    def _moved(self, hint: Hint, call: "HintCall") -> int:
        return moved_bytes(self._workers, hint, call)

    def _warmed(self, hint: Hint) -> None:
        """A worker that sends no events holds what it was warmed with, too."""
        feeds = self._feeds()
        if feeds is None:
            return
        chains = {
            size: Chain(size, list(hashes[: hint.stop // size]), hint.stop)
            for size, hashes in hint.subject.chains.items()
        }
        expectation = feeds.sent(hint.worker, chains)
        if expectation is not None:
            expectation.settle(self._clock())

    def _spurned(self, worker: "Worker", speaker: "Speaker") -> None:
        self.prober.refuse(worker.id, speaker)


def _names(section: "WorkerHints") -> tuple[str, ...]:
    driver = section.driver
    names = (driver,) if isinstance(driver, str) else driver
    return tuple(name for name in names if name != NONE)


def _target(fleet: "Fleet", worker: "Worker", section: "WorkerHints") -> HintTarget:
    return HintTarget(
        worker=worker.id,
        engine=worker.driver.name,
        model=worker.model,
        fleet=fleet.name,
        url=(section.url or "").rstrip("/"),
        options={
            name: value for name, value in msgspec.structs.asdict(section).items() if name not in {"driver", "url"}
        },
    )
