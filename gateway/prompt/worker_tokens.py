"""Asks workers for token ids: one question after the other until one is answered, and which of them a worker does not know."""

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from gateway.fleet.asking import Answer, ask

if TYPE_CHECKING:
    from array import array

    import aiohttp

    from backends.token_ids import TokenQuestion
    from gateway.fleet.worker import Worker

MOST: Final = 8 * 1024 * 1024
"""Bytes read of an answer: an id takes seven or so with its comma, and a text has at most as many as it has bytes."""
ASK_AGAIN: Final = 300.0
"""Seconds after which a worker that did not know a path is asked there again: it may have been started with other flags."""

_UNKNOWN_PATH: Final = frozenset({404, 405, 501})
_REFUSED: Final = frozenset({400, 413, 422})


class Outcome(enum.Enum):
    """What became of a question."""

    TOLD = "told"
    REFUSED = "refused"
    """The worker does not take such a request."""
    UNABLE = "unable"
    """It has no way to tell, or not of such a request."""
    FAILED = "failed"
    """It did not answer, too late, or what makes no sense."""
    LATE_HERE = "late_here"
    """Too late, but because this process stood still: says nothing of the worker."""


class Told(msgspec.Struct, frozen=True):
    """What a worker told.

    Attributes:
        outcome: whether it did.
        ids: of each prompt, uint32; empty unless `TOLD`, and where only a count was told.
        count: tokens of all prompts together, -1 when not known.
        detail: the question's path, or in words why there was no answer.
    """

    outcome: Outcome
    ids: "Sequence[array[int]]" = ()
    count: int = -1
    detail: str = ""


class WorkerTokens:
    """Asks workers, and remembers which paths they do not have.

    Args:
        session: of `gateway.fleet.asking.open_session`; not closed here.
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_missing", "_session")

    def __init__(self, session: "aiohttp.ClientSession", clock: Callable[[], float]) -> None:
        self._session = session
        self._clock = clock
        self._missing: dict[tuple[str, str], float] = {}  # worker id and path -> when to try again

    def questions(self, worker: "Worker", path: str, body: Mapping[str, Any]) -> "list[TokenQuestion]":
        """What this worker can be asked for the prompt of a request, the most faithful first."""
        asked = worker.driver.token_questions(path, {**body, "model": worker.model})
        if not self._missing:
            return list(asked)
        now = self._clock()
        return [question for question in asked if self._missing.get((worker.id, question.path), 0.0) <= now]

    def forget(self, worker_id: str) -> None:
        """The worker was started anew, or is gone: what it did not know does not count any more."""
        for key in [key for key in self._missing if key[0] == worker_id]:
            del self._missing[key]

    async def told(
        self, worker: "Worker", path: str, body: Mapping[str, Any], seconds: float, *, insist: bool = False
    ) -> Told:
        """The ids that `worker` makes of a request. Never raises but for cancellation.

        Args:
            worker: whom to ask.
            path: of the request.
            body: its JSON; the model's name is replaced by the worker's own.
            seconds: for all questions together.
            insist: ask the less faithful question, too, when the worker refused the faithful one.
        """
        loop_time = asyncio.get_running_loop().time
        deadline = loop_time() + seconds
        last = Told(Outcome.UNABLE, detail="it has no way to tell")
        for question in self.questions(worker, path, body):
            answer = await self._post(worker, question, max(0.001, deadline - loop_time()))
            if answer.error is None and answer.status in _UNKNOWN_PATH:
                self._lacks(worker, question)
                last = Told(Outcome.UNABLE, detail=f"POST {question.path} answered {answer.status}")
                continue
            last = self._read(worker, question, answer)
            if not (insist and last.outcome is Outcome.REFUSED):
                return last
        return last

    async def generated(self, worker: "Worker", path: str, body: Mapping[str, Any], seconds: float) -> Told:
        """The ids that a request was really made from: it is sent for one token. Where they are not named, their count."""
        question = worker.driver.generation_question(path, {**body, "model": worker.model})
        if question is None:
            return Told(Outcome.UNABLE, detail="it has no way to tell")
        answer = await self._post(worker, question, seconds)
        told = self._read(worker, question, answer)
        if told.outcome is Outcome.FAILED and answer.status == 200 and (count := _usage(answer.body)) > 0:
            return Told(Outcome.TOLD, (), count, question.path)
        return told

    def _lacks(self, worker: "Worker", question: "TokenQuestion") -> None:
        now = self._clock()
        self._missing = {key: until for key, until in self._missing.items() if until > now}
        self._missing[worker.id, question.path] = now + ASK_AGAIN

    async def _post(self, worker: "Worker", question: "TokenQuestion", seconds: float) -> Answer:
        try:
            raw = orjson.dumps(question.body)
        except TypeError:
            return Answer(status=400)  # not JSON that can be sent on: lone surrogates
        return await ask(self._session, worker, question.path, seconds, json=raw, most=MOST)

    @staticmethod
    def _read(worker: "Worker", question: "TokenQuestion", answer: Answer) -> Told:
        if answer.error is not None:
            return Told(Outcome.LATE_HERE if answer.our_fault else Outcome.FAILED, detail=answer.error)
        if answer.status != 200:
            outcome = Outcome.REFUSED if answer.status in _REFUSED else Outcome.FAILED
            return Told(outcome, detail=f"POST {question.path} answered {answer.status}")
        ids = worker.driver.parse_tokens(_json(answer.body))
        if ids is None:
            return Told(Outcome.FAILED, detail=f"POST {question.path} names no token ids")
        return Told(Outcome.TOLD, ids, sum(map(len, ids)), question.path)


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _usage(body: bytes) -> int:
    """`usage.prompt_tokens` of an answer; -1 without."""
    payload = _json(body)
    usage = payload.get("usage") if isinstance(payload, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else -1
