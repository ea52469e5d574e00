"""Residency in a replay: the gateway's own `Residency`, with the engines in place of workers that are told by HTTP.

What a request carries takes effect with it. What is said beside requests takes effect as late as KV events are heard, within the
residency's own budget. Every hint's fate goes into the books, as in the gateway.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from backends.hints.model import Action, Fate, Hint, Subject
from backends.hints.ranges import directives
from gateway.config.residency import ResidencyConfig
from gateway.fleet.worker import Worker
from gateway.prompt.blocks import Chain
from gateway.residency.residency import Asked, Residency
from policies.base import Match
from simulator.engine import Engine, Output, Retention, Stored

FLEET: Final = "m"
MOST_DIRECTIVES: Final = 16
"""Ranges of different worth in one request."""
FOREVER: Final = float("inf")
ENDLESS: Final = 1 << 40
"""Blocks: the answer's as well."""

Later = Callable[[float, Hint], None]
"""To be called back, with the hint, at that time."""


class Hints:
    """One replay's.

    Attributes:
        core: what to wish.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        workers: Sequence[Worker],
        engines: Sequence[Engine],
        *,
        match: Callable[[Chain, float], Mapping[str, Match]],
        block_size: int,
        lag: float,
        later: Later,
        epoch: float,
    ) -> None:
        """Nothing is known yet. All times here are the engines'.

        Args:
            config: which rules, and how much they may ask for.
            workers: of the gateway.
            engines: theirs, in the same order.
            match: who holds how much of a prompt at a time, by worker id.
            block_size: tokens per block.
            lag: seconds from a hint to its taking effect.
            later: see `Later`.
            epoch: what the gateway's objects see as the engines' time 0.
        """
        self._engines = {worker.id: engine for worker, engine in zip(workers, engines, strict=True)}
        self._block_size = block_size
        self._lag = lag
        self._later = later
        self._epoch = epoch
        self._now = 0.0
        self.core = Residency(
            config,
            workers=lambda: workers,
            holds=lambda subject: match(Chain(block_size, list(subject.chains[block_size]), subject.tokens), self._now),
        )

    def asked(self, chain: Chain, session: str, stage: str | None, now: float) -> Asked:
        """A request as the rules see it."""
        subject = Subject(FLEET, chain.tokens, {chain.block_size: chain.hashes}, session=session)
        return Asked(subject, now + self._epoch, stage)

    def waits(self, asked: Asked, worker: Worker, match: Match, now: float) -> None:
        """It waits, in the gateway or at the worker, and will probably be computed by `worker`."""
        self._now = now
        asked.now = now + self._epoch
        self._say(self.core.waiting(asked, worker, match))

    def sent(self, asked: Asked, worker: Worker, match: Match, now: float) -> Sequence[Retention]:
        """It goes to `worker`: what it is to carry."""
        self._now = now
        asked.now = now + self._epoch
        hints = self.core.sent(asked, worker, match)
        inside = [hint for hint in hints if hint.subject is asked.subject and _inside(hint, worker)]
        if len(inside) < len(hints):
            self._say([hint for hint in hints if hint not in inside])
        if not inside:
            return ()
        for hint in inside:
            self.core.ledger.fate(hint, Fate.SENT, "inside the request", asked.now)
            self.core.ledger.fate(hint, Fate.ACCEPTED, "inside the request", asked.now)
        # A block belongs to the range that has its first token.
        size = self._block_size
        retentions = [
            Retention(-(-run.start // size), -(-run.stop // size), run.priority, now + (run.ttl or FOREVER))
            for run in directives(inside, MOST_DIRECTIVES)
        ]
        if any(hint.answer for hint in inside):
            retentions[-1] = retentions[-1]._replace(stop=ENDLESS)
        return retentions

    def answered(self, asked: Asked, worker: str, cached: int, now: float) -> None:
        """It has ended; `cached`: tokens of the prompt that the worker had."""
        self._now = now
        self._say(self.core.answered(asked, worker, cached, now + self._epoch))

    def reserved(self, session: str, stage: str, worker: Worker, now: float) -> None:
        """A slot is kept at `worker` for a conversation's next stage."""
        self._now = now
        self._say(self.core.reserved(session, stage, worker, now + self._epoch))

    def heard(self, worker: str, outputs: Iterable[Output], now: float) -> None:
        """A worker publishes what changed in its cache."""
        core = self.core
        if not core.wants_events:
            return
        for event in outputs:
            if type(event) is Stored:
                # The engine's keys are the hashes that we gave it.
                core.event(worker, event.tier, event.keys, stored=True, now=now + self._epoch)  # type: ignore[arg-type]

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        self._say(self.core.tick(now + self._epoch))

    @property
    def next_tick(self) -> float:
        """When `tick` is to be called next; infinite while there is nothing to wait for."""
        return self.core.next_tick - self._epoch

    def take_effect(self, hint: Hint, now: float) -> None:
        """A hint has come to its worker."""
        refusal = self._do(hint, now)
        self.core.ledger.fate(hint, Fate.REFUSED if refusal else Fate.ACCEPTED, refusal, now + self._epoch)

    def summary(self) -> dict[str, dict[str, Any]]:
        """What became of the hints, by rule."""
        return {rule.name: {} for rule in self.core.rules} | self.core.ledger.by_rule()

    def _say(self, hints: Sequence[Hint]) -> None:
        """Send on their way what is within the budget."""
        ledger, now = self.core.ledger, self._now + self._epoch
        for hint in hints:
            moved = 0
            if hint.action is Action.PREFETCH:
                moved = (hint.stop - hint.start) * self._engines[hint.worker].profile.kv_bytes_per_token
            if self.core.budget.allow(hint, moved, now):
                ledger.fate(hint, Fate.SENT, "", now)
                self._later(self._now + self._lag, hint)
            else:
                ledger.fate(hint, Fate.SKIPPED, "over budget", now)

    def _do(self, hint: Hint, now: float) -> str:
        """Do what is wished; why not, or nothing."""
        engine, size = self._engines[hint.worker], self._block_size
        keys = hint.subject.chains[size]
        start, stop = -(-hint.start // size), hint.stop // size
        until = now + (hint.ttl or FOREVER)
        match hint.action:
            case Action.PREFETCH:
                if hint.peer is not None:
                    seconds = engine.prefetch(
                        keys, start, stop, "l1", hint.target, now, peer=(hint.peer, self._engines[hint.peer])
                    )
                else:
                    seconds = engine.prefetch(keys, start, stop, hint.source or "l2", hint.target, now)
                return "" if seconds is not None else "nothing to fetch"
            case Action.RETAIN:
                return "" if engine.retain(keys, start, stop, hint.priority, until, now) else "not there"
            case Action.DEMOTE:
                return "" if engine.demote(keys, start, stop, now, until) else "not there"
            case Action.PIN:
                return "" if engine.pin(keys, start, stop, hint.target, until, now) else "not there, or no room"
            case Action.UNPIN:
                engine.unpin(keys, start, stop, hint.target, now)
                return ""


def _inside(hint: Hint, worker: Worker) -> bool:
    """Whether a request that goes to `worker` can carry it."""
    return hint.worker == worker.id and hint.target == "device" and hint.action in {Action.RETAIN, Action.DEMOTE}
