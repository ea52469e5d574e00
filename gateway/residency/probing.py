"""Which hints each worker understands: asked when it is ready, again when it may be another process, and never in a request's way."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from backends.hints.registry import AT_SERVER, AT_WORKER, HintTarget, hint_driver
from gateway.fleet.worker import Worker, WorkerState
from gateway.residency.calls import make
from gateway.residency.speakers import NOBODY, Speaker, Speakers
from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    import aiohttp

LOOK: Final = 0.5
"""Seconds between two looks at which workers want asking."""
AGAIN: Final = 300.0
"""Seconds after which a worker is asked again though nothing has happened; the first time after a tenth of it if nobody spoke."""
TIMEOUT: Final = 3.0
MOST: Final = 4 * 1024 * 1024
"""Bytes read of an answer: vLLM's OpenAPI description has 320 KB."""
LANE: Final = 8
"""Workers that are asked at once."""
AUTO: Final = "auto"
NONE: Final = "none"
PROBED: Final = "probed"

_log = structlog.get_logger(__name__)


class DriverStatus(msgspec.Struct, gc=False):
    """What is known of one driver at one worker.

    Attributes:
        driver: its name.
        speaks: whether it is used.
        how: why: ``configured``, ``probed``, or what the probe met with.
        url: whom it speaks to; empty: the worker.
    """

    driver: str
    speaks: bool
    how: str
    url: str = ""


class Probed:
    """One worker, and what it understands.

    Attributes:
        worker: who.
        target: what drivers must know of it.
        wanted: names of drivers as configured.
        configured: those that are configured by name, whatever they answer.
        speakers: those that may be used now.
        asked: what was found out, for the inspector.
        refused: drivers that it has refused since it was asked last.
    """

    __slots__ = (
        "_due",
        "_generation",
        "asked",
        "configured",
        "probing",
        "refused",
        "speakers",
        "target",
        "wanted",
        "worker",
    )

    def __init__(self, worker: Worker, target: HintTarget, wanted: Sequence[str]) -> None:
        self.worker = worker
        self.target = target
        self.wanted = tuple(wanted)
        self.configured = {
            name: Speaker(hint_driver(name, target), target.url, target.option("api_key", ""))
            for name in self.wanted
            if name not in {AUTO, NONE}
        }
        self.speakers: Speakers = NOBODY
        self.asked: list[DriverStatus] = []
        self.refused: set[str] = set()
        self.probing = False
        self._due = 0.0
        self._generation: object = None
        self._settle([])

    @property
    def auto(self) -> bool:
        """Whether it has to be asked at all."""
        return AUTO in self.wanted

    def due(self, now: float) -> bool:
        """Whether it is to be asked now: it takes requests, and is new, was restarted, or was asked long ago."""
        worker = self.worker
        if worker.state is not WorkerState.READY:
            # Whatever comes back may be another process, of another version.
            self._due = 0.0
            return False
        if (generation := worker.calibration) is not self._generation:
            self._generation = generation
            self._due = 0.0
        return not self.probing and now >= self._due

    def learned(self, answers: "Sequence[tuple[Speaker, bool, str]]", now: float) -> None:
        """It was asked: each driver that was, whether it is spoken there, and why. Drivers learn from answers to their own questions."""
        self.refused.clear()
        self._settle(answers)
        self._due = now + (AGAIN if self.speakers.all or not self.auto else AGAIN / 10)

    def refuse(self, speaker: Speaker, now: float) -> None:
        """It took offence at what `speaker` said: that one is silent until the worker is asked again, which is soon."""
        self._due = now + AGAIN / 10
        self.refused.add(speaker.name)
        self.speakers = self.speakers.without(speaker)
        for each in self.asked:
            if each.driver == speaker.name:
                each.speaks, each.how = False, "refused"

    def document(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "worker": self.worker.id,
            "configured": list(self.wanted),
            "drivers": [msgspec.structs.asdict(each) for each in self.asked],
        }

    def _settle(self, answers: "Sequence[tuple[Speaker, bool, str]]") -> None:
        speakers: list[Speaker] = []
        said = {id(speaker): how for speaker, _, how in answers}
        self.asked = []
        for name in self.wanted:
            if name == AUTO:
                for speaker, speaks, how in answers:
                    self.asked.append(DriverStatus(speaker.name, speaks, how, speaker.url))
                    if speaks:
                        speakers.append(speaker)
            elif name in self.configured:
                own = self.configured[name]
                how = said.get(id(own), PROBED)
                how = "configured" if how == PROBED else f"configured; {how}"
                self.asked.append(DriverStatus(name, True, how, own.url))
                speakers.append(own)
        self.speakers = Speakers(speakers)


class Prober:
    """Asks workers.

    Attributes:
        workers: all that are known, by id.
    """

    __slots__ = ("_changed", "_clock", "_lane", "_session", "_tasks", "workers")

    def __init__(
        self,
        session: "aiohttp.ClientSession",
        clock: Callable[[], float],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`session` as of `gateway.fleet.asking.open_session`; not closed here. `changed`: told when what a worker understands has changed."""
        self._changed = changed
        self._session = session
        self._clock = clock
        self._tasks = TaskGroup("hint-probes")
        self._lane = asyncio.Semaphore(LANE)
        self.workers: dict[str, Probed] = {}

    def update(self, wanted: "Sequence[tuple[Worker, HintTarget, Sequence[str]]]") -> None:
        """Follow a (re)load; what is known of a worker stays as long as it and its settings do."""
        before, self.workers = self.workers, {}
        for worker, target, names in wanted:
            known = before.get(worker.id)
            if known is None or known.worker is not worker or known.target != target or known.wanted != tuple(names):
                known = Probed(worker, target, names)
            self.workers[worker.id] = known

    def speakers(self, worker_id: str) -> Speakers:
        """What a worker understands."""
        known = self.workers.get(worker_id)
        return NOBODY if known is None else known.speakers

    def refuse(self, worker_id: str, speaker: Speaker) -> bool:
        """A worker took offence at what `speaker` said (`Probed.refuse`). Whether that is news."""
        probed = self.workers.get(worker_id)
        if probed is None or speaker.name in probed.refused:
            return False
        probed.refuse(speaker, self._clock())
        self._changed()
        return True

    def start(self) -> None:
        """Begin to ask."""
        self._tasks.spawn("look", self._look())

    async def stop(self) -> None:
        """End every question."""
        await self._tasks.cancel()

    async def _look(self) -> None:
        while True:
            now = self._clock()
            for probed in self.workers.values():
                if probed.due(now):
                    probed.probing = True
                    self._tasks.spawn(probed.worker.id, self._ask(probed))
            await asyncio.sleep(LOOK)

    async def _ask(self, probed: Probed) -> None:
        try:
            async with self._lane:
                target = probed.target
                url, key = target.url, target.option("api_key", "")
                asked = [Speaker(hint_driver(name, target)) for name in AT_WORKER if probed.auto]
                asked += [Speaker(hint_driver(name, target), url, key) for name in AT_SERVER if probed.auto and url]
                # Servers tell their drivers what they can do; what is said to workers themselves needs no question.
                asked += [speaker for speaker in probed.configured.values() if speaker.url]
                answers = [await self._probe(probed, speaker) for speaker in asked]
            before = {speaker.name for speaker in probed.speakers.all}
            probed.learned(answers, self._clock())
            after = {speaker.name for speaker in probed.speakers.all}
            if after != before:
                self._changed()
                _log.info("hints that a worker understands", worker=probed.worker.id, drivers=sorted(after))
        finally:
            probed.probing = False

    async def _probe(self, probed: Probed, speaker: Speaker) -> tuple[Speaker, bool, str]:
        call = speaker.driver.probe()
        if call is None:
            return speaker, False, "can't be asked: name it in the configuration"
        said = await make(self._session, call, *speaker.place(call, probed.worker), TIMEOUT, most=MOST)
        if said.error:
            return speaker, False, f"{call.path}: {said.error}"
        speaks = speaker.driver.speaks(said.status, said.body)
        return speaker, speaks, PROBED if speaks else f"{call.path}: status {said.status}, does not speak it"
