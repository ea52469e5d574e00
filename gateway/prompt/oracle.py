"""Prompts from the workers themselves, for models whose tokens cannot be made here.

Some models have no tokenizer that could be loaded, and some renderers are not Jinja (mistral, gpt-oss, deepseek v3.2,
kimi). Their workers can be asked what they make of a request. A question costs a worker what the request itself will cost
it before its prefill, templating and tokenizing (round trips to vLLM 0.32 on an idle core: 2 ms for 100 tokens, 6 ms for
3,000), and the client the time of a round trip. So by default only prompts are asked for that are long enough for a
cached prefix to be worth more than that, and only where there is a choice between workers. Each turn of a conversation is
a new question: nothing of an old answer can be reused, because templates print old messages differently once new ones
follow. What is reused are whole answers: the same prompt again, or many times at once.

Whatever goes wrong, the request goes on with its bytes as pseudo-tokens and a reason.
"""

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from gateway.prompt.approximate import pseudo_tokens
from gateway.prompt.asked_bodies import only_text, relevant, resolved
from gateway.prompt.chat import UnrenderableError
from gateway.prompt.given import given_ids, together
from gateway.prompt.lru import ByteLru
from gateway.prompt.prompt import How, Prompt, approximate
from gateway.prompt.rendering import COMPLETIONS, PATHS
from gateway.prompt.segments import Segment
from gateway.prompt.worker_tokens import Outcome, WorkerTokens
from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    import aiohttp

    from gateway.fleet.worker import Worker

Mode = Literal["auto", "on", "off"]

_BYTES_PER_TOKEN: Final = 4 + 7
"""See `gateway.prompt.segments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleLimits:
    """What asking may cost.

    Attributes:
        least: bytes of a body from which on `auto` asks; about a thousand tokens, whose prefill takes longer than a question.
        body: a longer body is never asked for: its answer would take the event loop 20 ms to read.
        deadline: seconds that a request waits for an answer.
        in_flight: questions at once, to all workers of the model.
        cache: bytes of all cached answers.
        failures: so many questions in a row that failed switch a worker's questions off,
        pause: for so many seconds; then one may try.
        approximate: bytes of a request that count when it is matched by its bytes.
    """

    least: int = 4 * 1024
    body: int = 512 * 1024
    deadline: float = 0.15
    in_flight: int = 8
    cache: int = 32 * 1024 * 1024
    failures: int = 3
    pause: float = 10.0
    approximate: int = 4 * 1024 * 1024


@dataclass(slots=True)
class _Circuit:
    """How questions to one worker went: `failures` in a row, closed to further ones until `until`."""

    asked: int = 0
    failures: int = 0
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A prompt that has to be asked for: its key in the cache, and what to ask."""

    key: str
    path: str
    body: Mapping[str, Any]


Answered = Sequence[Segment] | str
"""The prompts' segments, or why there are none."""


class OraclePrompter:
    """Bodies to prompts by asking, for one model. Has the methods of `gateway.prompt.prompter.Prompter`.

    Attributes:
        counts: prompts so far by how they are known and why not better.
    """

    def __init__(
        self,
        workers: "Callable[[], Sequence[Worker]]",
        session: "aiohttp.ClientSession",
        *,
        mode: Mode = "auto",
        limits: OracleLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Nothing is asked before the first prompt is wanted.

        Args:
            workers: the fleet's, now.
            session: of `gateway.fleet.asking.open_session`; not closed here.
            mode: ``auto`` asks where it pays, ``on`` whenever it is possible, ``off`` never.
            limits: what it may cost.
            clock: monotonic seconds.
            rng: for ties between workers.
        """
        self._workers = workers
        self._mode = mode
        self._limits = limits or OracleLimits()
        self._clock = clock
        self._rng = rng or random.Random()
        self._ask = WorkerTokens(session, clock)
        self._cache: ByteLru[Sequence[Segment]] = ByteLru(self._limits.cache)
        self._circuits: dict[str, _Circuit] = {}
        self._flying: dict[str, asyncio.Future[Answered]] = {}
        self._questions: set[asyncio.Task[None]] = set()
        self._tasks = TaskGroup("oracle")
        self._closed = False
        self._outcomes: Counter[str] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()

    def now(self, path: str, body: Any, size: int = 0) -> Prompt | None:
        """The prompt, if it is known or not to be asked for; None if `prompt` must be awaited. See `Prompter.now`."""
        start = self._clock()
        found = self._consider(path, body, size, start)
        if isinstance(found, _Wanted):
            return None
        return self._counted(found)

    async def prompt(self, path: str, body: Any, size: int = 0) -> Prompt:
        """The prompt, waiting for a worker's answer if need be. The arguments are those of `now`."""
        start = self._clock()
        found = self._consider(path, body, size, start)
        if isinstance(found, Prompt):
            return self._counted(found)
        flying = self._flying.get(found.key) or self._launch(found)
        # Shielded: others wait for the same answer. It comes in any case: a question ends at its deadline.
        answered = flying if isinstance(flying, str) else await asyncio.shield(flying)
        if isinstance(answered, str):
            return self._counted(self._worse(body, answered, start))
        new = sum(map(len, answered))
        return self._counted(together(answered, self._clock() - start, new))

    @property
    def stats(self) -> dict[str, int]:
        """The cache's counters, questions in flight and by their outcome, and workers that are not asked at present."""
        cache, now = self._cache, self._clock()
        return {
            "entries": len(cache),
            "bytes": cache.bytes,
            "hits": cache.hits,
            "misses": cache.misses,
            "evictions": cache.evictions,
            "pending": len(self._flying),
            "off": sum(circuit.until > now for circuit in self._circuits.values()),
            **{outcome.value: self._outcomes[outcome.value] for outcome in Outcome},
        }

    def close(self) -> None:
        """End all questions; requests that wait become approximate."""
        self._closed = True
        for task in self._questions:
            task.cancel()

    def _consider(self, path: str, body: Any, size: int, start: float) -> Prompt | _Wanted:
        """The prompt as far as it can be had without waiting, or what has to be asked. Raises nothing."""
        if path not in PATHS or not isinstance(body, dict):
            return Prompt(How.NONE, reason="no prompt")
        try:
            path = resolved(path, body)
            if path == COMPLETIONS and (given := given_ids(body)) is not None:
                return given
            return self._wanted(path, body, size, start)
        except UnrenderableError as error:
            return self._worse(body, error.reason, start)

    def _wanted(self, path: str, body: Mapping[str, Any], size: int, start: float) -> Prompt | _Wanted:
        """The cached prompt, or what has to be asked.

        Raises:
            UnrenderableError: it is not to be asked for.
        """
        limits = self._limits
        if self._mode == "off":
            raise UnrenderableError("oracle: off")
        if size > limits.body:
            raise UnrenderableError("too big")
        if self._mode == "auto" and 0 < size < limits.least:
            raise UnrenderableError("oracle: too short to ask")
        if not only_text(body):
            raise UnrenderableError("content part: other than text")
        asked = relevant(body)
        try:
            raw = orjson.dumps(asked)
        except TypeError as error:
            raise UnrenderableError("not JSON") from error
        if len(raw) > limits.body:
            raise UnrenderableError("too big")
        if self._mode == "auto" and len(raw) < limits.least:
            raise UnrenderableError("oracle: too short to ask")
        # A digest, since the text itself may be half a megabyte; 128 bits that no client can collide on purpose.
        key = hashlib.blake2b(raw, digest_size=16, person=_person(path)).hexdigest()
        known = self._cache.get(key)
        if known is not None:
            return together(known, self._clock() - start)
        wanted = _Wanted(key, path, asked)
        if key not in self._flying:
            self._may_ask(wanted)
        return wanted

    def _may_ask(self, wanted: _Wanted) -> None:
        """Whether a question may be put now.

        Raises:
            UnrenderableError: it may not, and why.
        """
        if self._closed:
            raise UnrenderableError("closed")
        if len(self._flying) >= self._limits.in_flight:
            raise UnrenderableError("busy")
        workers = self._workers()
        if self._mode == "auto" and sum(worker.routable for worker in workers) < 2:
            raise UnrenderableError("oracle: no choice between workers")
        if self._pick(wanted) is None:
            raise UnrenderableError("oracle: no worker to ask")

    def _pick(self, wanted: _Wanted) -> "Worker | None":
        """The worker that has least to do, of those that can answer and are not switched off."""
        now = self._clock()
        able = [
            worker
            for worker in self._workers()
            if worker.routable
            and ((circuit := self._circuits.get(worker.id)) is None or circuit.until <= now)
            and self._ask.questions(worker, wanted.path, wanted.body)
        ]
        if not able:
            return None

        def load(worker: "Worker") -> tuple[int, int, float]:
            circuit = self._circuits.get(worker.id)
            return (circuit.asked if circuit else 0, worker.pending, self._rng.random())

        return min(able, key=load)

    def _launch(self, wanted: _Wanted) -> "asyncio.Future[Answered] | str":
        """Put a question; the future gets its answer, whatever happens. A string: why it can't be put."""
        worker = self._pick(wanted)
        if worker is None or self._closed:
            return "closed" if self._closed else "oracle: no worker to ask"
        answered: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._flying[wanted.key] = answered
        task = self._tasks.spawn(f"ask {worker.id}", self._question(worker, wanted, answered))
        self._questions.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._questions.discard(task)
            del self._flying[wanted.key]
            if not answered.done():  # cancelled, perhaps before it began
                answered.set_result("closed" if task.cancelled() else "failed")

        task.add_done_callback(ended)
        return answered

    async def _question(self, worker: "Worker", wanted: _Wanted, answered: "asyncio.Future[Answered]") -> None:
        circuit = self._circuit(worker)
        circuit.asked += 1
        try:
            told = await self._ask.told(worker, wanted.path, wanted.body, self._limits.deadline)
        finally:
            circuit.asked -= 1
        self._outcomes[told.outcome.value] += 1
        if told.outcome is Outcome.FAILED:
            circuit.failures += 1
            if circuit.failures >= self._limits.failures:
                circuit.until = self._clock() + self._limits.pause
        elif told.outcome is not Outcome.LATE_HERE:
            circuit.failures = 0
        if told.outcome is not Outcome.TOLD:
            answered.set_result(f"oracle: {told.outcome.value}")
            return
        segments = [Segment(ids) for ids in told.ids]
        self._cache.put(wanted.key, segments, _BYTES_PER_TOKEN * told.count)
        answered.set_result(segments)

    def _circuit(self, worker: "Worker") -> _Circuit:
        """The worker's circuit; those of workers that are gone are dropped on the way."""
        known = self._circuits.get(worker.id)
        if known is None:
            ids = {each.id for each in self._workers()}
            self._circuits = {each: circuit for each, circuit in self._circuits.items() if each in ids}
            known = self._circuits[worker.id] = _Circuit()
        return known

    def _worse(self, body: Mapping[str, Any], reason: str, start: float) -> Prompt:
        """What is left when the tokens cannot be had."""
        return approximate(pseudo_tokens(body, self._limits.approximate), reason, self._clock() - start)

    def _counted(self, prompt: Prompt) -> Prompt:
        self.counts[prompt.how.value, prompt.reason] += 1
        return prompt


def _person(path: str) -> bytes:
    """The path as blake2b's personalization: at most 16 bytes, and the ends of our paths differ."""
    return path.encode()[-16:]
