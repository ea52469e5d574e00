"""Hints on their way to workers and hint servers, beside all requests: bounded queues, few at once, patience that runs out.

Nothing here is ever awaited by a request. A worker that hangs costs its own queue and nothing else; one that fails is left alone for
a while, longer each time; what does not fit, or comes too late, is dropped and said to be.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from backends.hints.model import Fate, Hint
from gateway.residency.calls import Said, make
from gateway.tasks import TaskGroup
from gateway.telemetry.histogram import GATEWAY_BOUNDS, Histogram

if TYPE_CHECKING:
    import aiohttp

    from backends.hints.base import Answer, HintCall
    from gateway.fleet.worker import Worker
    from gateway.residency.speakers import Speaker

QUEUE: Final = 64
"""Hints that wait for one worker."""
LANES: Final = 2
"""Calls at once to one worker."""
TIMEOUT: Final = 2.0
"""Seconds for one call of a hint server."""
PREFILL_TIMEOUT: Final = 60.0
"""Seconds for a warm request: a long prompt takes as long as it takes."""
STALE: Final = 5.0
"""Seconds in the queue after which a hint is not sent any more: what it was about has happened."""
PATIENCE: Final = 10.0
"""Seconds for which an operation that a server has taken on is asked about."""
FIRST_POLL: Final = 0.05
SLOWEST_POLL: Final = 1.0
BACK_OFF: Final = 0.5
"""Seconds that a worker is left alone after one failure, doubled by each further one ..."""
LONGEST_BACK_OFF: Final = 60.0
"""... up to this."""
BUSY_WAIT: Final = 1.0
"""Seconds for which a warm request waits for its worker to have nothing better to do."""
BUSY_LOOK: Final = 0.05


class Tell(Protocol):
    """Who keeps the books: `gateway.residency.ledger`."""

    def __call__(self, hint: Hint, fate: Fate, detail: str, now: float, /) -> None:
        """What became of a hint."""


class Allow(Protocol):
    """Who keeps the budget."""

    def __call__(self, hint: Hint, moved: int, now: float, /) -> bool:
        """Whether so many bytes may be moved for it now."""


class _Lane:
    """What is on its way to one worker."""

    __slots__ = ("active", "blocked_until", "failures", "queue")

    def __init__(self) -> None:
        self.queue: deque[tuple[Hint, Speaker, Worker, float]] = deque()
        self.active = 0
        self.failures = 0
        self.blocked_until = 0.0


class Delivery:
    """Takes hints and delivers them.

    Attributes:
        latency: seconds from the first byte sent to the end of the last answer about a hint, by driver.
        moved: what it costs to move a hint's tokens, in bytes; for the budget.
    """

    def __init__(
        self,
        session: "aiohttp.ClientSession",
        *,
        tell: Tell,
        allow: Allow,
        clock: Callable[[], float],
        moved: Callable[[Hint, "HintCall"], int] = lambda _hint, call: call.bytes_moved,
        warmed: Callable[[Hint], None] | None = None,
        spurned: "Callable[[Worker, Speaker], None] | None" = None,
    ) -> None:
        """Nothing is sent before the first `offer`.

        Args:
            session: as of `gateway.fleet.asking.open_session`; not closed here.
            tell: told of each hint's fate.
            allow: asked right before a hint is sent.
            clock: monotonic seconds.
            moved: see the class.
            warmed: told of warm requests that were answered: the worker holds the prompt now.
            spurned: told of a server that says that it knows no such path: it does not speak that protocol.
        """
        self._session = session
        self._tell = tell
        self._allow = allow
        self._clock = clock
        self._moved = moved
        self._warmed = warmed
        self._spurned = spurned
        self._lanes: dict[str, _Lane] = {}
        self._tasks = TaskGroup("hints")
        self.latency: dict[str, Histogram] = {}

    async def stop(self) -> None:
        """Give up on everything; what waited is skipped."""
        now = self._clock()
        for lane in self._lanes.values():
            while lane.queue:
                self._tell(lane.queue.popleft()[0], Fate.SKIPPED, "the gateway is stopping", now)
        await self._tasks.cancel()

    def keep(self, workers: "set[str]") -> None:
        """Forget all others."""
        for gone in self._lanes.keys() - workers:
            lane = self._lanes[gone]
            while lane.queue:
                self._tell(lane.queue.popleft()[0], Fate.SKIPPED, "its worker is gone", self._clock())
            if not lane.active:
                del self._lanes[gone]

    def offer(self, hint: Hint, speaker: "Speaker", worker: "Worker") -> None:
        """Take a hint. Synchronous, and never waits: it is sent in a task of its own, or its fate is told at once."""
        lane = self._lanes.get(worker.id)
        if lane is None:
            lane = self._lanes[worker.id] = _Lane()
        now = self._clock()
        if lane.blocked_until > now:
            self._tell(hint, Fate.SKIPPED, "left alone after failures", now)
        elif len(lane.queue) >= QUEUE:
            self._tell(hint, Fate.SKIPPED, "too many wait for this worker", now)
        else:
            lane.queue.append((hint, speaker, worker, now))
            if lane.active < LANES:
                lane.active += 1
                self._tasks.spawn(worker.id, self._work(lane))

    @property
    def waiting(self) -> int:
        """Hints that wait or are on their way."""
        return sum(len(lane.queue) + lane.active for lane in self._lanes.values())

    def blocked(self) -> list[str]:
        """Workers that are left alone at the moment."""
        now = self._clock()
        return [worker for worker, lane in self._lanes.items() if lane.blocked_until > now]

    async def _work(self, lane: _Lane) -> None:
        """Deliver what is in `lane`, one after the other, until nothing is."""
        try:
            while lane.queue:
                hint, speaker, worker, at = lane.queue.popleft()
                now = self._clock()
                if now - at > STALE:
                    self._tell(hint, Fate.SKIPPED, "waited too long to be sent", now)
                elif lane.blocked_until > now:
                    self._tell(hint, Fate.SKIPPED, "left alone after failures", now)
                else:
                    await self._guarded(lane, hint, speaker, worker)
        finally:
            lane.active -= 1

    async def _guarded(self, lane: _Lane, hint: Hint, speaker: "Speaker", worker: "Worker") -> None:
        """Deliver one; whatever happens, its fate is told."""
        try:
            await self._deliver(lane, hint, speaker, worker)
        except asyncio.CancelledError:
            self._tell(hint, Fate.FAILED, "the gateway is stopping", self._clock())
            raise
        except Exception as error:  # noqa: BLE001 - a driver's mistake must not end the lane
            self._tell(hint, Fate.FAILED, type(error).__name__, self._clock())

    async def _deliver(self, lane: _Lane, hint: Hint, speaker: "Speaker", worker: "Worker") -> None:
        call = speaker.driver.call(hint)
        if call is None:
            self._tell(hint, Fate.SKIPPED, f"{speaker.name} can't say it", self._clock())
            return
        if call.prefills and not await self._idle(worker):
            self._tell(hint, Fate.SKIPPED, "its worker has better things to do", self._clock())
            return
        started = self._clock()
        if not self._allow(hint, self._moved(hint, call), started):
            self._tell(hint, Fate.SKIPPED, "over budget", started)
            return
        self._tell(hint, Fate.SENT, speaker.name, started)
        answer = await self._converse(hint, speaker, worker, call)
        now = self._clock()
        if answer is None or answer.verdict == "pending":
            lane.failures += 1
            lane.blocked_until = now + min(LONGEST_BACK_OFF, BACK_OFF * 2 ** (lane.failures - 1))
            self._tell(hint, Fate.FAILED, answer.detail if answer is not None else "no answer", now)
            return
        lane.failures = 0
        self._seen(speaker.name, now - started)
        if answer.verdict == "accepted":
            if call.prefills and self._warmed is not None:
                self._warmed(hint)
            self._tell(hint, Fate.ACCEPTED, answer.detail, now)
        else:
            self._tell(hint, Fate.REFUSED, answer.detail, now)

    async def _converse(self, hint: Hint, speaker: "Speaker", worker: "Worker", call: "HintCall") -> "Answer | None":
        """Make `call`, and ask again for as long as the answer is to be waited for; None: nobody answered."""
        until = self._clock() + PATIENCE
        pause = FIRST_POLL
        answer: Answer | None = None
        while True:
            said = await self._call(worker, speaker, call)
            if said.error:
                return answer  # what is pending stays so: its end is not known
            answer = speaker.driver.read(hint, said.status, said.body)
            if said.status in _UNKNOWN and answer.verdict == "refused" and self._spurned is not None:
                self._spurned(worker, speaker)
            if answer.then is None or (answer.verdict == "pending" and self._clock() + pause > until):
                return answer
            if answer.verdict == "pending":
                await asyncio.sleep(pause)
                pause = min(SLOWEST_POLL, pause * 2)
            call = answer.then

    async def _call(self, worker: "Worker", speaker: "Speaker", call: "HintCall") -> Said:
        url, headers = speaker.place(call, worker)
        if not call.prefills:
            return await make(self._session, call, url, headers, TIMEOUT)
        # It is work for the worker like any other; of its speed nothing is learned from it.
        lease = worker.acquire(call.prefills, streamed=False)
        try:
            return await make(self._session, call, url, headers, PREFILL_TIMEOUT)
        finally:
            lease.release()

    async def _idle(self, worker: "Worker") -> bool:
        """Wait a little for `worker` to have nothing to prefill and half of its slots free."""
        until = self._clock() + BUSY_WAIT
        while True:
            slots = worker.capabilities.slots
            if worker.routable and not worker.pending and (slots is None or 2 * worker.in_flight <= slots):
                return True
            if self._clock() >= until:
                return False
            await asyncio.sleep(BUSY_LOOK)

    def _seen(self, driver: str, seconds: float) -> None:
        histogram = self.latency.get(driver)
        if histogram is None:
            histogram = self.latency[driver] = Histogram(GATEWAY_BOUNDS)
        histogram.observe(seconds)


_UNKNOWN: Final = frozenset({404, 405, 501})
