"""Drives the engine in real time: one timer for the whole worker, no task a request."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.engine import Cleared, Engine, EngineRequest, Finished, FirstToken, Removed, Stored, TierName, TokenOut
from simulator.server.clock import Clock
from simulator.server.hints import Wishes
from simulator.server.writing import Answer

TIMER = 0.001
"""Resolution of the timer in real seconds (uvloop's): waits are rounded up to it, so that the loop never spins."""

NO_WISHES = Wishes()

CacheChange = Stored | Removed | Cleared


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a request on its way through the engine.

    Attributes:
        id: the engine's id for it.
        index: its place among the request's choices, 0 and up.
        prompt_ids: what is prefilled.
        answer: what will come out; `ids`: prompt and answer.
        digests: hash of each full block of prompt and answer.
        submitted: when it was submitted, in the worker's seconds; `first` and `last`: when its first and latest token came.
        produced: tokens so far.
        finished: how it ended (``stop``, ``length``, ``error``), None while it goes on.
    """

    id: str
    index: int
    prompt_ids: Sequence[int]
    answer: Answer
    ids: Sequence[int]
    digests: Sequence[bytes]
    generation: "Generation"
    submitted: float = 0.0
    first: FirstToken | None = None
    last: float = 0.0
    produced: int = 0
    finished: str | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that came from a cache."""
        return 0 if self.first is None else self.first.cached_device + self.first.cached_l1 + self.first.cached_l2


@dataclass(slots=True, eq=False)
class Generation:
    """All choices of one HTTP request, and the handler that waits for them.

    Attributes:
        streaming: keep each token for the handler; else only the end of everything wakes it.
        salt: the cache salt; `lora`: id and name of the adapter.
        news: (choice, index of the first token, count) since the handler last took them.
        open: how many choices have not finished.
    """

    streaming: bool
    salt: str | None = None
    lora: tuple[int, str] | None = None
    choices: list[Choice] = field(default_factory=list)
    news: list[tuple[Choice, int, int]] = field(default_factory=list)
    open: int = 0
    _waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return when there is news, or when all choices have finished."""
        while not self.news and self.open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def wake(self) -> None:
        """Let the handler look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[tuple[Choice, int, int]]:
        """The news, once."""
        news, self.news = self.news, []
        return news


class Observer:
    """What the pump tells the worker; all hooks do nothing here."""

    def first_token(self, choice: Choice, output: FirstToken) -> None:
        """A prefill has ended."""

    def tokens(self, choice: Choice, time: float, count: int) -> None:
        """`count` tokens came out at `time`, in the worker's seconds."""

    def finished(self, choice: Choice, time: float) -> None:
        """A choice has ended by itself."""

    def cache_changed(self, changes: Sequence[tuple[CacheChange, Choice | None]]) -> None:
        """Blocks came or went, in this order; what was stored comes with the choice whose blocks they are, if it still runs."""


class Pump:
    """Submits to the engine, lets it catch up with the clock when there is something to hear, and passes its outputs on."""

    def __init__(self, engine: Engine, clock: Clock, observer: Observer, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._clock = clock
        self._observer = observer
        self._loop = loop
        self._choices: dict[str, Choice] = {}
        self._delayed: dict[str, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    def __len__(self) -> int:
        """How many choices are in the engine."""
        return len(self._choices)

    def submit(self, choice: Choice, priority: int, wishes: Wishes = NO_WISHES, wait: float = 0.0) -> None:
        """Start one choice now, or, with what it `wait`s for, in so many of the worker's seconds.

        Raises:
            ValueError: the engine could never run it.
        """
        now = self._clock.now()
        choice.submitted = now
        lora = choice.generation.lora
        request = EngineRequest(
            id=choice.id,
            prompt_tokens=len(choice.prompt_ids),
            output_tokens=len(choice.answer.ids),
            blocks=choice.digests,
            priority=priority,
            lora=lora[1] if lora else None,
            finish_reason=choice.answer.finish_reason,
            retention=[part._replace(until=now + part.until) for part in wishes.retention],
            offload_tokens=wishes.offload_tokens,
            load_tiers=wishes.load_tiers,
        )
        if wait:
            self._engine.check(request)
            self._choices[choice.id] = choice
            delay = self._clock.real_delay(now + wait)
            self._delayed[choice.id] = self._loop.call_later(delay, self._begin, request)
            return
        self._choices[choice.id] = choice
        self._engine.submit(request, now)
        self.schedule()

    def _begin(self, request: EngineRequest) -> None:
        """What a choice waited for is there."""
        del self._delayed[request.id]
        self._engine.submit(request, self._clock.now())
        self.schedule()

    def abort(self, generation: Generation) -> int:
        """End what has not finished of a request; returns how many choices that were."""
        now = self._clock.now()
        aborted = 0
        for choice in generation.choices:
            if self._choices.pop(choice.id, None) is not None:
                if (delayed := self._delayed.pop(choice.id, None)) is not None:
                    delayed.cancel()
                self._engine.abort(choice.id, now)
                aborted += 1
        if aborted:
            self.schedule()
        return aborted

    def prefetch(
        self,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        source: TierName,
        target: TierName,
        *,
        peer: tuple[str, Engine] | None = None,
    ) -> float | None:
        """As `Engine.prefetch`, now."""
        seconds = self._engine.prefetch(keys, start, stop, source, target, self._clock.now(), peer=peer)
        self.advance()
        return seconds

    def drop(self, keys: Sequence[bytes], tier: TierName) -> int:
        """Let go of blocks in a tier below the device; those that are pinned stay. Returns how many went."""
        dropped = self._engine.drop(keys, tier, self._clock.now())
        self.advance()
        return dropped

    def reset_prefix_cache(self) -> bool:
        """Forget every block that no running request uses; tells whether that worked."""
        worked = self._engine.reset_prefix_cache(self._clock.now())
        self.advance()
        return worked

    def schedule(self) -> None:
        """Set the timer for when the engine has something to say next."""
        time = self._engine.next_time()
        if time is None:
            self._cancel()
            return
        if self._timer is not None:
            if self._due == time:
                return
            self._cancel()
        delay = self._clock.real_delay(time)
        self._due = time
        self._timer = self._loop.call_later(math.ceil(max(delay, TIMER) / TIMER) * TIMER, self.advance)

    def repace(self) -> None:
        """Set the timer anew after the clock's pace has changed."""
        self._cancel()
        self.schedule()

    def stop(self) -> None:
        """End the timers; whoever still waits must be cancelled by the caller."""
        self._cancel()
        for delayed in self._delayed.values():
            delayed.cancel()
        self._delayed.clear()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._due = math.inf

    def advance(self) -> None:
        """Hear everything that happened up to now."""
        self._cancel()
        changes: list[tuple[CacheChange, Choice | None]] = []
        finished: list[Finished] = []
        for output in self._engine.advance(self._clock.now()):
            if isinstance(output, TokenOut):
                self._token(output)
            elif isinstance(output, FirstToken):
                choice = self._choices.get(output.request_id)
                if choice is not None:
                    choice.first = output
                    self._observer.first_token(choice, output)
            elif isinstance(output, Finished):
                finished.append(output)
            elif isinstance(output, Stored):
                changes.append((output, self._choices.get(output.request_id or "")))
            else:
                changes.append((output, None))
        if changes:
            self._observer.cache_changed(changes)
        for end in finished:
            self._finish(end)
        self.schedule()

    def _token(self, output: TokenOut) -> None:
        choice = self._choices.get(output.request_id)
        if choice is None:
            return
        self._observer.tokens(choice, output.time, output.count)
        choice.produced = output.index + output.count
        choice.last = output.time
        generation = choice.generation
        if generation.streaming:
            generation.news.append((choice, output.index, output.count))
            generation.wake()

    def _finish(self, output: Finished) -> None:
        choice = self._choices.pop(output.request_id, None)
        if choice is None:
            return
        choice.finished = output.reason
        self._observer.finished(choice, output.time)
        generation = choice.generation
        generation.open -= 1
        if generation.open == 0 or generation.streaming:
            generation.wake()
