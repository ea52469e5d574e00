"""Whether our tokens are the workers' tokens: compared when a worker becomes ready, and with every answer's token count.

One `Parity` per model. Each worker that becomes ready is sent a round of small probes; what it makes of them must be what
we make of them. One of them is sent as a real request of one token, which is the only proof of what happens to requests:
`/tokenize` may do less than that. No request of a client is changed for it. From then on the number of prompt tokens
in each answer is compared with ours.

As soon as one worker disagrees, `trusted` is False, and with it the model's prompts are approximate
(`gateway.prompt.guard`) until a further round finds all equal. Wrong tokens would only cost hits, but silently, and passed
along as ids they would be a wrong prompt.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from gateway.fleet.worker import Worker, WorkerState
from gateway.prompt.parity_status import ParityStatus, Standing, sentences
from gateway.prompt.probes import GENERATED, Probe, probes
from gateway.prompt.prompt import How
from gateway.prompt.rendering import CHAT
from gateway.prompt.worker_tokens import Outcome, Told, WorkerTokens
from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    from array import array

    import aiohttp

    from gateway.prompt.guard import PromptMaker

_log = structlog.get_logger(__name__)

WINDOW: Final = 64
"""Answers of a worker that count for its share of wrong ones."""
_MASK: Final = (1 << WINDOW) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRules:
    """How strictly and how often tokens are compared. Times in seconds.

    Attributes:
        question: what one probe may take.
        generation: what the probe that generates may take: it waits behind real requests, and Neuron pads its prefill.
        look: between two looks at who became ready.
        wrong: this many wrong counts in the window at least,
        share: and this share of it, are a mismatch.
        agreed: this many right counts stand for the probe that generates where a worker names no ids.
        retry: until the next round after one that found no equality, doubling
        retry_most: up to this.
        rounds: workers that are asked at the same time.
    """

    question: float = 5.0
    generation: float = 60.0
    look: float = 0.5
    wrong: int = 4
    share: float = 0.06
    agreed: int = 16
    retry: float = 30.0
    retry_most: float = 1800.0
    rounds: int = 4


@dataclass(slots=True)
class _Record:
    """What is known of one worker. `window`: a bit for each of the last answers, 1 where the count was wrong."""

    worker: Worker
    since: float
    standing: Standing = Standing.PENDING
    detail: str = ""
    compared: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    generated: bool = False
    observed: int = 0
    wrong: int = 0
    window: int = 0
    seen: int = 0  # answers in the window
    agreed: int = 0  # right ones in a row
    ready: bool = False
    round: asyncio.Task[None] | None = None
    next_round: float | None = 0.0
    fruitless: int = 0  # rounds in a row that did not end in equality, or did not last


class Parity:
    """Compares one model's tokens with its workers'. All methods are called on one event loop.

    Attributes:
        trusted: no worker is known to disagree. An attribute, because it is read for every request.
    """

    def __init__(
        self,
        model: str,
        prompter: "PromptMaker | None",
        session: "aiohttp.ClientSession",
        *,
        rules: ParityRules | None = None,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Nothing is asked before `start`. Must be built in a running loop.

        Args:
            model: the fleet's name, for logs.
            prompter: makes our tokens: the one that has the tokenizer, not one that is guarded by this. None where tokens
                come from the workers themselves: then the first worker that answers is what the others are compared with.
            session: of `gateway.fleet.asking.open_session`; not closed here.
            rules: how strictly.
            clock: monotonic seconds; default: the loop's time.
            rng: for jitter.
        """
        self.trusted = True
        self._model = model
        self._prompter = prompter
        self._rules = rules or ParityRules()
        self._clock = clock or asyncio.get_running_loop().time
        self._rng = rng or random.Random()
        self._ask = WorkerTokens(session, self._clock)
        self._probes = probes()
        self._reference: dict[str, array[int]] = {}
        self._referee = ""  # whose ids those are
        self._records: dict[str, _Record] = {}
        self._tasks = TaskGroup("parity")
        self._rounds = asyncio.Semaphore(self._rules.rounds)
        self._running = False

    def start(self, workers: Sequence[Worker]) -> None:
        """Begin to compare: every worker at once when it is ready."""
        self._running = True
        self.update(workers)
        self._tasks.spawn(f"look {self._model}", self._look_forever())

    async def stop(self) -> None:
        """End every question."""
        self._running = False
        await self._tasks.cancel()

    def update(self, workers: Sequence[Worker]) -> None:
        """Follow a reload: forget workers that are gone, take on new ones."""
        before, self._records = self._records, {}
        now = self._clock()
        for worker in workers:
            record = before.get(worker.id)
            if record is None or record.worker is not worker:
                record = _Record(worker, now)
            self._records[worker.id] = record
        for record in before.values():
            if self._records.get(record.worker.id) is not record:
                self._away(record)
                self._ask.forget(record.worker.id)
        self._judge()

    def proven(self, worker_id: str) -> bool:
        """Whether ids made here may stand for the text of requests to this worker.

        All probes were equal, and so were the ids of a request that it really answered; or, where it does not name those,
        the counts of enough answers. One wrong count within the window is enough to be proven no more.
        """
        record = self._records.get(worker_id)
        return record is not None and self._proven(record)

    def proven_since(self, worker_id: str) -> float | None:
        """When what is proven of a worker was found out, on the loop's clock: another time after each of its starts. None: nothing is."""
        record = self._records.get(worker_id)
        return record.since if record is not None and self._proven(record) else None

    def observed(self, worker_id: str, expected: int, actual: int) -> None:
        """An answer named its count of prompt tokens. Call it for prompts that are exact only.

        Args:
            worker_id: who answered.
            expected: `Prompt.token_count`, of all prompts of a completion together.
            actual: `usage.prompt_tokens`, cached ones included; 0 or less when it is not known.
        """
        record = self._records.get(worker_id)
        if record is None or actual <= 0:
            return
        record.observed += 1
        record.seen += 1
        if expected == actual:
            record.agreed += 1
            record.window = record.window << 1 & _MASK
            return
        record.wrong += 1
        record.agreed = 0
        record.window = (record.window << 1 | 1) & _MASK
        wrong, seen = record.window.bit_count(), min(record.seen, WINDOW)
        rules = self._rules
        if record.standing is not Standing.MISMATCH and wrong >= rules.wrong and wrong >= rules.share * seen:
            self._mismatch(
                record,
                f"{worker_id} counted other prompt tokens in {wrong} of its last {seen} answers"
                f" (lately {actual} instead of {expected})",
            )

    def snapshot(self) -> list[ParityStatus]:
        """Every worker, in the order of the configuration."""
        now = self._clock()
        return [
            ParityStatus(
                worker=record.worker.id,
                standing=record.standing,
                detail=record.detail,
                since=now - record.since,
                compared=tuple(record.compared),
                skipped=tuple(record.skipped),
                generated=record.generated,
                proven=self._proven(record),
                observed=record.observed,
                wrong=record.wrong,
            )
            for record in self._records.values()
        ]

    def degraded(self) -> list[str]:
        """What is wrong, in sentences for `/readyz`."""
        return [] if self.trusted else sentences(self.snapshot())

    def _proven(self, record: _Record) -> bool:
        return (
            record.standing is Standing.EXACT
            and not record.window
            and (record.generated or record.agreed >= self._rules.agreed)
        )

    async def _look_forever(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(self._rules.look)

    def _look(self) -> None:
        """Start the rounds that are due."""
        now = self._clock()
        for record in self._records.values():
            state = record.worker.state
            ready = state is WorkerState.READY
            if ready and not record.ready:
                record.next_round = now
                self._ask.forget(record.worker.id)
            elif record.ready and state in {WorkerState.WARMING, WorkerState.EJECTED, WorkerState.GONE}:
                self._away(record)
            record.ready = ready
            resting = record.round is None or record.round.done()
            if ready and resting and record.next_round is not None and record.next_round <= now:
                record.next_round = now + self._rules.retry_most  # in case this one fails
                record.round = self._tasks.spawn(f"round {record.worker.id}", self._round(record))

    def _away(self, record: _Record) -> None:
        """It stopped serving: what comes back may be another process with another model."""
        if record.round is not None:
            record.round.cancel()
        record.next_round = None
        record.fruitless = 0
        if record.worker.id == self._referee:
            self._reference.clear()
            self._referee = ""
        self._stand(record, Standing.PENDING, "")

    async def _round(self, record: _Record) -> None:
        """Compare all probes with one worker, and say what came of it."""
        async with self._rounds:
            await self._compare_all(record)

    async def _compare_all(self, record: _Record) -> None:
        worker = record.worker
        record.compared, record.skipped, record.generated = [], [], False
        chats = 0
        obstacle = ""
        away = False
        for probe in self._probes:
            told = await self._ask.told(worker, probe.path, probe.body, self._rules.question, insist=True)
            expected = await self._expected(probe, told, worker.id)
            if told.outcome is not Outcome.TOLD or expected is None:
                record.skipped.append(probe.name)
                obstacle = obstacle or (told.detail if told.outcome is not Outcome.TOLD else "")
                if told.outcome in {Outcome.FAILED, Outcome.LATE_HERE}:
                    away = True
                    break  # the others would fail as well, each as slowly
                continue
            if (place := _difference(expected, told.ids[0])) is not None:
                self._mismatch(record, f"tokenizer disagrees with {worker.id} at token {place} of probe '{probe.name}'")
                return
            record.compared.append(probe.name)
            chats += probe.path == CHAT
        if not away and not await self._generates_alike(record):
            return
        if (chats or record.generated) and not away:
            record.window = record.seen = 0
            self._stand(record, Standing.EXACT, "")
            return
        only_texts = "it tells the tokens of texts only, not of chats"
        detail = only_texts if record.compared and not away else obstacle or only_texts
        if record.standing is Standing.MISMATCH:  # only equality ends it
            self._stand(record, Standing.MISMATCH, record.detail)
        else:
            self._stand(record, Standing.UNVERIFIED, detail)

    async def _expected(self, probe: Probe, told: Told, worker_id: str) -> "array[int] | None":
        """Our ids of a probe; those of the first worker that told them when we have no tokenizer. None: not known."""
        if self._prompter is None:
            if told.outcome is Outcome.TOLD and probe.name not in self._reference and self._referee in ("", worker_id):
                self._referee = worker_id
                self._reference[probe.name] = told.ids[0]
            return self._reference.get(probe.name)
        prompt = await self._prompter.prompt(probe.path, probe.body)
        return prompt.ids if prompt.how is How.EXACT else None

    async def _generates_alike(self, record: _Record) -> bool:
        """Whether a request for one token is made from our ids; True when that cannot be known."""
        probe = next(probe for probe in self._probes if probe.name == GENERATED)
        expected = await self._expected(probe, Told(Outcome.UNABLE), record.worker.id)
        if expected is None:
            return True
        told = await self._ask.generated(record.worker, probe.path, probe.body, self._rules.generation)
        if told.outcome is not Outcome.TOLD:
            return True
        if not told.ids:
            if told.count != len(expected):
                self._mismatch(
                    record,
                    f"{record.worker.id} counts {told.count} prompt tokens, not {len(expected)},"
                    f" in a request like probe '{GENERATED}'",
                )
            return told.count == len(expected)
        place = _difference(expected, told.ids[0])
        if place is not None:
            self._mismatch(
                record,
                f"tokenizer disagrees with {record.worker.id} at token {place} of a request like probe '{GENERATED}'",
            )
            return False
        record.generated = True
        return True

    def _mismatch(self, record: _Record, detail: str) -> None:
        record.window = record.seen = 0
        self._stand(record, Standing.MISMATCH, detail)

    def _stand(self, record: _Record, standing: Standing, detail: str) -> None:
        """Take a worker's new standing, say it once, and set the time of the next round."""
        now = self._clock()
        rules = self._rules
        changed = (standing, detail) != (record.standing, record.detail)
        if record.standing is Standing.EXACT and now - record.since > rules.retry_most:
            record.fruitless = 0  # the last equality lasted
        if standing in {Standing.MISMATCH, Standing.UNVERIFIED}:
            pause = min(rules.retry_most, rules.retry * 2.0 ** min(record.fruitless, 16))
            record.next_round = now + pause * self._rng.uniform(0.9, 1.1)
            record.fruitless += 1
        elif standing is Standing.EXACT:
            record.next_round = None
        if standing is not record.standing:
            record.since = now
        record.standing, record.detail = standing, detail
        self._judge()
        if changed and standing is not Standing.PENDING:
            facts = {"model": self._model, "worker": record.worker.id, "detail": detail or None}
            if standing is Standing.MISMATCH:
                _log.warning("tokens differ from the worker's: prompts are matched by bytes", **facts)
            elif standing is Standing.EXACT:
                _log.info("tokens are the worker's", model=self._model, worker=record.worker.id)
            else:
                _log.info("tokens cannot be compared with the worker's", **facts)

    def _judge(self) -> None:
        self.trusted = all(record.standing is not Standing.MISMATCH for record in self._records.values())


def _difference(ours: "array[int]", theirs: "array[int]") -> int | None:
    """The place of the first token that differs, None if none does."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (our, their) in enumerate(pairs) if our != their), min(len(ours), len(theirs)))
