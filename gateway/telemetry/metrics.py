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
from collections.abc import Iterable
from typing import Final

from gateway.telemetry.collector import Collector, Readings
from gateway.telemetry.histogram import DURATION_BOUNDS, FIRST_TOKEN_BOUNDS, Histogram

UNKNOWN: Final = "_unknown"
"""The label for a model or worker that is not in the configuration."""
OTHER: Final = "_other"
"""The label for anything else that is not in its list."""
MAX_VALUES: Final = 64
"""Error types and retry reasons come from our own code; should one ever be made of data, the label stays this small."""


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


class Metrics:
    """All counters of one process.

    Attributes:
        accepted: requests whose head was read and accepted for routing.
        in_flight: of those, the ones that have not ended.
        requests: finished requests by model, path, status, outcome and error type.
        attempts: finished attempts by worker and error type (None: it succeeded).
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
        "in_flight",
        "readings",
        "refusals",
        "reloads",
        "requests",
        "retries",
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
        self.retries: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.reloads = {True: 0, False: 0}
        self.readings = Readings()
        self._collector = Collector(self, version)

    def configured(self, models: Iterable[str], workers: Iterable[str]) -> None:
        """Take over the names of a new configuration.

        Attempts on workers that it no longer has are folded into `UNKNOWN`, so that workers that come and go do not grow
        the metrics for ever and totals stay.
        """
        self._models = frozenset(models)
        self._workers = frozenset(workers)
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

    def attempt_ended(self, worker_id: str, error_type: str | None) -> None:
        """Count one attempt on a worker; `error_type` is None if it succeeded."""
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

    def reloaded(self, ok: bool) -> None:
        """Count a configuration reload."""
        self.reloads[ok] += 1

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """Everything as text, and its content type: OpenMetrics when `accept` (a header's value) asks for it first."""
        return self._collector.snapshot().render(accept)

    async def scrape(self, accept: str | None) -> tuple[bytes, str]:
        """`render`, with the text made in a thread.

        With 1,000 workers the text takes some 50 ms and the snapshot 15 ms (`bench/telemetry.py`): streams would stand
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
