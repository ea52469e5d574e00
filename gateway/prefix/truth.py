"""Predictions against what the workers say: did they hold what we thought they held?

A worker's `usage.prompt_tokens_details.cached_tokens` is the truth about one prompt. It is compared with the match that the decision went by; where the worker's
own events were wrong again and again, it is followed anew.
"""

from collections.abc import Iterator
from typing import Final

from policies.base import Match

WINDOW: Final = 16
"""Predictions from events that a worker is judged by."""
WRONG: Final = 8
"""So many of them over by more than a block: its events are not followed rightly. At 4, small caches under pressure were followed anew now and
then for what they had evicted between decision and prefill, which costs more than it brings."""
QUIET: Final = 10.0
"""Seconds between two resyncs of a worker, at least."""


class WorkerTruth:
    """One worker's score.

    Attributes:
        answers: how many predictions were compared.
        prompt_tokens, predicted_tokens, cached_tokens: sums over those.
        over_tokens, under_tokens: sums of what was predicted and not cached, and the other way round.
        resyncs: how often its events were followed anew because of this.
    """

    __slots__ = (
        "_recent",
        "_resynced",
        "answers",
        "cached_tokens",
        "over_tokens",
        "predicted_tokens",
        "prompt_tokens",
        "resyncs",
        "under_tokens",
    )

    def __init__(self) -> None:
        self.answers = self.prompt_tokens = self.predicted_tokens = self.cached_tokens = 0
        self.over_tokens = self.under_tokens = self.resyncs = 0
        self._recent = 0  # one bit per prediction from events, the latest lowest; set: over by more than a block
        self._resynced = -QUIET

    def compare(
        self, match: Match, cached: int, prompt: int, block_size: int, now: float, *, judge: bool = True
    ) -> bool:
        """Count one answer in; True if the worker should be followed anew.

        Args:
            match: what the decision went by.
            cached: tokens that the worker took from its cache.
            prompt: tokens of the prompt.
            block_size: of the worker; an engine never takes the last token from its cache, so one block more or less is no error.
            now: monotonic seconds.
            judge: a prediction that was too high means that something was missed; not so where a worker uses less than it holds.
        """
        predicted = min(match.tokens, prompt)
        self.answers += 1
        self.prompt_tokens += prompt
        self.predicted_tokens += predicted
        self.cached_tokens += cached
        if predicted > cached:
            self.over_tokens += predicted - cached
        else:
            self.under_tokens += cached - predicted
        if match.source != "event" or not judge:
            # What is only expected or remembered may be wrong without anybody having missed anything.
            return False
        self._recent = (self._recent << 1 | (predicted > cached + block_size)) & ((1 << WINDOW) - 1)
        if self._recent.bit_count() < WRONG or now - self._resynced < QUIET:
            return False
        self._recent = 0
        self._resynced = now
        self.resyncs += 1
        return True


class Truth:
    """The scores of all workers that were ever compared and are still there."""

    __slots__ = ("_workers",)

    def __init__(self) -> None:
        self._workers: dict[str, WorkerTruth] = {}

    def of(self, worker_id: str) -> WorkerTruth:
        """A worker's score, which begins with its first answer."""
        found = self._workers.get(worker_id)
        if found is None:
            found = self._workers[worker_id] = WorkerTruth()
        return found

    def keep(self, worker_ids: set[str]) -> None:
        """Forget all other workers."""
        for gone in self._workers.keys() - worker_ids:
            del self._workers[gone]

    def __iter__(self) -> Iterator[tuple[str, WorkerTruth]]:
        return iter(self._workers.items())
