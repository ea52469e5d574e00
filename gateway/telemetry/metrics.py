"""The gateway's counters: plain integers that the data plane bumps and a scrape reads.

Nothing here formats, locks or allocates more than a tuple per call; `gateway.telemetry.collector` turns the integers into
Prometheus families. All calls come from the event loop's thread.

Every accepted request ends exactly once, so at any moment::

    accepted = completed + client_gone + failed + in flight

and all five are on ``/metrics``.
"""

import asyncio
import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from time import time
from typing import Final

from gateway.telemetry.collector import Collector, Readings, Snapshot
from gateway.telemetry.histogram import (
    DURATION_BOUNDS,
    FIRST_TOKEN_BOUNDS,
    GAP_BOUNDS,
    GATEWAY_BOUNDS,
    PER_TOKEN_BOUNDS,
    Exemplar,
    Histogram,
)

UNKNOWN: Final = "_unknown"
"""The label for a model or worker that is not in the configuration."""
OTHER: Final = "_other"
"""The label for anything else that is not in its list."""
MAX_VALUES: Final = 64
"""Error types and retry reasons come from our own code; should one ever be made of data, the label stays this small."""

MAX_DECISIONS: Final = 1024
"""Models times policies times reasons that are kept apart."""


class Outcome(enum.StrEnum):
    """How a request ended. A string enum because its hash, on the hot path, is the string's own."""

    COMPLETED = "completed"
    """The client got the whole of an answer, whatever its status below 500."""
    CLIENT_GONE = "client_gone"
    """The client left before the end."""
    FAILED = "failed"
    """A worker or the gateway failed: a status of 500 or above, or a stream that broke off."""


class RequestSeries:
    """Finished requests that have all labels in common.

    Attributes:
        count: how many.
        bytes_out: answer bytes that were written to clients.
        duration: seconds from the request's head to its end.
        first_byte: seconds from the request's head to the first byte of the answer's body, where there was one.
    """

    __slots__ = ("bytes_out", "count", "duration", "first_byte")

    def __init__(self) -> None:
        self.count = 0
        self.bytes_out = 0
        self.duration = Histogram(DURATION_BOUNDS)
        self.first_byte = Histogram(FIRST_TOKEN_BOUNDS)


RequestKey = tuple[str, str, int, Outcome, str | None]
"""model, path, status, outcome, error type."""


class DecisionSeries:
    """Decisions that have all labels in common.

    Attributes:
        overhead: one value per decision, so its count is theirs: seconds that the gateway itself took until then.
    """

    __slots__ = ("overhead",)

    def __init__(self) -> None:
        self.overhead = Histogram(GATEWAY_BOUNDS)


DecisionKey = tuple[str, str, str]
"""model, policy, reason (`gateway.telemetry.reasons`)."""


class WorkerSeries:
    """What one worker's answers came to. Sums only: a histogram per worker would be most of a scrape with 1,000 workers.

    Attributes:
        first_bytes, first_byte_seconds: attempts that brought a first byte, and the sum of their times from attempt to it.
        prompt_tokens, cached_tokens, output_tokens: as the worker counted them in answers that said so.
    """

    __slots__ = ("cached_tokens", "first_byte_seconds", "first_bytes", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.first_bytes = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.first_byte_seconds = 0.0

    def add(self, other: "WorkerSeries") -> None:
        """Take over the sums of another."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Metrics:
    """All counters of one process.

    Attributes:
        accepted: requests whose head was read and accepted for routing.
        in_flight: of those, the ones that have not ended.
        requests: finished requests by model, path, status, outcome and error type.
        attempts: finished attempts by worker and error type (None: it succeeded).
        workers: sums over each worker's answers.
        decisions: by model, policy and reason.
        per_token: seconds per token after the first, one value per answer that said how many there were, by model.
        longest_gap: seconds of the longest silence between two reads of a stream, one value per stream, by model.
        hyperpod: labels of the second set of names (`gateway.telemetry.hyperpod`); None: it is not shown.
        retries: by reason.
        refusals: answers that the gateway gave itself, without a worker, by error type.
        reloads: configuration reloads that worked and that did not.
        readings: where a scrape finds everything that is not counted here; the composition root sets it.
    """

    __slots__ = (
        "_collector",
        "_models",
        "_paths",
        "_workers",
        "accepted",
        "attempts",
        "decisions",
        "hyperpod",
        "in_flight",
        "longest_gap",
        "per_token",
        "readings",
        "refusals",
        "reloads",
        "requests",
        "retries",
        "workers",
    )

    def __init__(
        self, models: Iterable[str] = (), paths: Iterable[str] = (), workers: Iterable[str] = (), version: str = ""
    ) -> None:
        """Labels that are not in these lists are counted as `UNKNOWN` (models, workers) or `OTHER` (paths)."""
        self._models = frozenset(models)
        self._paths = frozenset(paths)
        self._workers = frozenset(workers)
        self.accepted = 0
        self.in_flight = 0
        self.requests: dict[RequestKey, RequestSeries] = {}
        self.attempts: dict[tuple[str, str | None], int] = {}
        self.workers: dict[str, WorkerSeries] = {}
        self.decisions: dict[DecisionKey, DecisionSeries] = {}
        self.per_token: dict[str, Histogram] = {}
        self.longest_gap: dict[str, Histogram] = {}
        self.hyperpod: Mapping[str, str] | None = None
        self.retries: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.reloads = {True: 0, False: 0}
        self.readings = Readings()
        self._collector = Collector(self, version)

    def configured(self, models: Iterable[str], workers: Iterable[str]) -> None:
        """Take over the names of a new configuration.

        What was counted of workers that it no longer has is folded into `UNKNOWN`, so that workers that come and go do not
        grow the metrics for ever and totals stay.
        """
        self._models = frozenset(models)
        self._workers = frozenset(workers)
        for worker_id in self.workers.keys() - self._workers - {UNKNOWN}:
            gone = self.workers.pop(worker_id)
            self.workers.setdefault(UNKNOWN, WorkerSeries()).add(gone)
        for key in [key for key in self.attempts if key[0] not in self._workers and key[0] != UNKNOWN]:
            folded = (UNKNOWN, key[1])
            self.attempts[folded] = self.attempts.get(folded, 0) + self.attempts.pop(key)

    def request_started(self) -> None:
        """Count a request in. Each call is followed by exactly one `request_ended`."""
        self.accepted += 1
        self.in_flight += 1

    def request_ended(
        self,
        model: str,
        path: str,
        status: int,
        outcome: Outcome,
        duration: float,
        first_byte: float | None,
        bytes_out: int,
        error_type: str | None,
        trace_id: str | None = None,
    ) -> None:
        """Count a request out.

        Args:
            model: the fleet's name; anything else is counted as `UNKNOWN`.
            path: the API path; anything else is counted as `OTHER`.
            status: of the answer that the client got, 0 if there was none.
            outcome: how it ended.
            duration: seconds from head to end.
            first_byte: seconds from head to first answer byte; None when none came.
            bytes_out: answer bytes written to the client.
            error_type: low-cardinality name of what went wrong, or None.
            trace_id: of a request whose trace is recorded, to be shown as an exemplar; None for all others.
        """
        self.in_flight -= 1
        # Only bounded labels are ever keys of the table, so a hit needs no check of its own.
        series = self.requests.get((model, path, status, outcome, error_type)) or self._series(
            model, path, status, outcome, error_type
        )
        series.count += 1
        series.bytes_out += bytes_out
        # `Histogram.observe` written out: two calls are a third of this method's cost.
        histogram = series.duration
        histogram.counts[bisect_left(DURATION_BOUNDS, duration)] += 1
        histogram.sum += duration
        if first_byte is not None:
            histogram = series.first_byte
            histogram.counts[bisect_left(FIRST_TOKEN_BOUNDS, first_byte)] += 1
            histogram.sum += first_byte
        if trace_id is not None:
            now = time()
            series.duration.keep(Exemplar(trace_id, duration, now))
            if first_byte is not None:
                series.first_byte.keep(Exemplar(trace_id, first_byte, now))

    def decided(self, model: str, policy: str, reason: str, overhead: float) -> None:
        """Count one decision.

        Args:
            model: the fleet's name.
            policy: what the configuration calls the policy.
            reason: one of `gateway.telemetry.reasons.Reason`.
            overhead: seconds that the gateway itself took: from the request's last byte to this decision, or for a retry
                from the end of the attempt before. What a request waits in a queue is not part of it.
        """
        try:
            histogram = self.decisions[model, policy, reason].overhead
        except KeyError:
            histogram = self._decision(model, policy, reason).overhead
        histogram.counts[bisect_left(GATEWAY_BOUNDS, overhead)] += 1
        histogram.sum += overhead

    def answered(self, worker_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Count the tokens of an answer, as its worker counted them; `cached_tokens` are among `prompt_tokens`."""
        series = self.workers.get(worker_id) or self._worker(worker_id)
        series.prompt_tokens += prompt_tokens
        series.cached_tokens += cached_tokens
        series.output_tokens += output_tokens

    def streamed(self, model: str, seconds: float, output_tokens: int) -> None:
        """Count the pace of a stream: `seconds` from its first byte to its end for `output_tokens` in all. One says nothing."""
        if output_tokens > 1:
            histogram = self.per_token.get(model) or self._of_model(self.per_token, model, PER_TOKEN_BOUNDS)
            pace = seconds / (output_tokens - 1)
            histogram.counts[bisect_left(PER_TOKEN_BOUNDS, pace)] += 1
            histogram.sum += pace

    def paused(self, model: str, seconds: float) -> None:
        """Count a stream by its longest silence between two reads."""
        histogram = self.longest_gap.get(model) or self._of_model(self.longest_gap, model, GAP_BOUNDS)
        histogram.counts[bisect_left(GAP_BOUNDS, seconds)] += 1
        histogram.sum += seconds

    def attempt_ended(self, worker_id: str, error_type: str | None, first_byte: float | None = None) -> None:
        """Count one attempt on a worker.

        Args:
            worker_id: whose; anything that is not configured is counted as `UNKNOWN`.
            error_type: low-cardinality name of what went wrong; None if it succeeded.
            first_byte: seconds from the attempt's begin to the first byte of its body; None when none came.
        """
        if first_byte is not None:
            series = self.workers.get(worker_id) or self._worker(worker_id)
            series.first_bytes += 1
            series.first_byte_seconds += first_byte
        try:
            self.attempts[worker_id, error_type] += 1
        except KeyError:
            worker_id = worker_id if worker_id in self._workers else UNKNOWN
            error_type = error_type and self._bounded_error(error_type)
            self.attempts[worker_id, error_type] = self.attempts.get((worker_id, error_type), 0) + 1

    def retry(self, reason: str) -> None:
        """Count one further attempt, by the error type of the one before."""
        _count(self.retries, reason)

    def refused(self, error_type: str) -> None:
        """Count an answer that the gateway gave itself, without asking a worker."""
        _count(self.refusals, error_type)

    def snapshot(self) -> Snapshot:
        """Everything as families of one moment."""
        return self._collector.snapshot()

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """Everything as text, and its content type: OpenMetrics when `accept` (a header's value) asks for it first."""
        return self._collector.snapshot().render(accept)

    async def scrape(self, accept: str | None) -> tuple[bytes, str]:
        """`render`, with the text made in a thread.

        With 1,000 workers the text takes 0.1 s and more, the snapshot some 2 ms (`bench/telemetry.py`): streams would stand
        still for the text, the snapshot must be of one moment.
        """
        return await asyncio.to_thread(self._collector.snapshot().render, accept)

    def _series(self, model: str, path: str, status: int, outcome: Outcome, error_type: str | None) -> RequestSeries:
        key = (
            model if model in self._models else UNKNOWN,
            path if path in self._paths else OTHER,
            status if 100 <= status <= 599 else 0,
            outcome,
            error_type and self._bounded_error(error_type),
        )
        series = self.requests.get(key)
        if series is None:
            series = self.requests[key] = RequestSeries()
        return series

    def _decision(self, model: str, policy: str, reason: str) -> DecisionSeries:
        # Policies and reasons are names of the configuration and of ours: few, but reloads may bring new ones for ever.
        if len(self.decisions) >= MAX_DECISIONS:
            policy = OTHER
        key = (model if model in self._models else UNKNOWN, policy, reason)
        return self.decisions.setdefault(key, DecisionSeries())

    def _worker(self, worker_id: str) -> WorkerSeries:
        return self.workers.setdefault(worker_id if worker_id in self._workers else UNKNOWN, WorkerSeries())

    def _of_model(self, histograms: dict[str, Histogram], model: str, bounds: Sequence[float]) -> Histogram:
        return histograms.setdefault(model if model in self._models else UNKNOWN, Histogram(bounds))

    def _bounded_error(self, error_type: str) -> str:
        """`error_type`, or `OTHER` once there are too many. Rarely called: once per new series."""
        known = {key[4] for key in self.requests} | {key[1] for key in self.attempts}
        return error_type if error_type in known or len(known) < MAX_VALUES else OTHER


def _count(counts: dict[str, int], key: str) -> None:
    """Add one to a count, unless that would make one key too many."""
    try:
        counts[key] += 1
    except KeyError:
        key = key if len(counts) < MAX_VALUES else OTHER
        counts[key] = counts.get(key, 0) + 1
