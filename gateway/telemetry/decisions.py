"""Finished requests, kept for a while to be looked at: the latest ones, and errors and slow ones for longer.

Two rings, each bounded in number and in bytes. Adding costs a few appends; looking walks them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from gateway.telemetry.record import RUNNING, Attempt, Decided, RequestRecord

if TYPE_CHECKING:
    from gateway.config.schema import Decisions

__all__ = ["RUNNING", "Attempt", "Decided", "DecisionLog", "RequestRecord", "Subscription"]

WAITING = 1000
"""Records that may wait for one subscriber; when there are more, the oldest ones are dropped and counted."""


class Running(Protocol):
    """A request under way."""

    def record(self) -> RequestRecord:
        """What is known of it by now."""


class DecisionLog:
    """The rings. Use from the event loop's thread only.

    Attributes:
        running_now: the requests under way; whoever runs them adds and discards.
        passed: ordinary requests of which no record was kept, see `wants`.
    """

    __slots__ = (
        "_burst",
        "_kept",
        "_rate",
        "_recent",
        "_room",
        "_room_at",
        "_slow",
        "_subscribers",
        "passed",
        "running_now",
    )

    def __init__(self, section: "Decisions") -> None:
        self.running_now: set[Running] = set()
        self.passed = 0
        self._room = 0.0
        self._room_at = 0.0
        self._subscribers: set[Subscription] = set()
        self._recent = _Ring()
        self._kept = _Ring()
        self.configure(section)

    def configure(self, section: "Decisions") -> None:
        """Take over other bounds; what is there stays as far as they allow."""
        self._slow = section.slow
        self._rate = float(section.per_second)
        self._burst = self._room = float(section.count)
        self._recent.bound(section.count, section.bytes)
        # Errors and slow ones are rare, so that a quarter of the room holds them for much longer.
        self._kept.bound(section.count // 4, section.bytes // 4)

    def wants(self, first_byte: float, error_type: str | None, now: float) -> bool:
        """Whether a request that has ended is worth a record: an error, a slow one, or one of no more than `per_second`.

        Ten thousand records a second would push each other out within the blink of an eye, and the memory that they take through
        the processor's caches; those that are passed over cost next to nothing.

        Args:
            first_byte: seconds until the answer began, 0 if it never did.
            error_type: what went wrong, if anything.
            now: monotonic seconds.
        """
        if error_type is not None or first_byte >= self._slow or not self._rate:
            return True
        self._room = room = min(self._burst, self._room + (now - self._room_at) * self._rate)
        self._room_at = now
        if room < 1:
            self.passed += 1
            return False
        self._room = room - 1
        return True

    def add(self, record: RequestRecord) -> None:
        """Keep a request that has ended."""
        record.kept_bytes = record.size
        self._recent.add(record)
        if record.error_type is not None or (record.first_byte and record.first_byte - record.start >= self._slow):
            self._kept.add(record)
        if self._subscribers:
            for subscriber in self._subscribers:
                subscriber.put(record)

    def running(self) -> list[RequestRecord]:
        """The requests under way, oldest first."""
        return sorted((running.record() for running in self.running_now), key=_start)

    def get(self, request_id: str) -> RequestRecord | None:
        """The latest request of this id, finished or under way."""
        wanted = request_id.encode()
        for record in self._all():
            if record.request_id == wanted:
                return record
        return next((record for record in self.running() if record.request_id == wanted), None)

    def recent(
        self,
        limit: int,
        *,
        error: bool | str | None = None,
        worker: str | None = None,
        model: str | None = None,
        stage: str | None = None,
        slower_than: float | None = None,
        trace_id: str | None = None,
    ) -> list[RequestRecord]:
        """Finished requests, latest first.

        Args:
            limit: so many at most.
            error: only those with an error (True), without (False), or with this error type.
            worker: only those of which an attempt went there.
            model: only those of this fleet.
            stage: only those of this stage.
            slower_than: only those whose first byte (whose end, where there was none) took longer, in seconds.
            trace_id: only those of this trace, 32 hexadecimal digits.
        """
        found: list[RequestRecord] = []
        for record in self._all():
            if len(found) >= limit:
                break
            if error is not None and (
                record.error_type != error if isinstance(error, str) else (record.error_type is not None) is not error
            ):
                continue
            if worker is not None and not record.involves(worker):
                continue
            if (model is not None and record.model != model) or (stage is not None and record.stage != stage):
                continue
            if slower_than is not None and (record.ttft or record.total) <= slower_than:
                continue
            if trace_id is not None and (record.trace is None or record.trace.trace_id != trace_id):
                continue
            found.append(record)
        return found

    def subscribe(self) -> "Subscription":
        """Records as they end, from now on: ``with log.subscribe() as records: async for record in records: ...``."""
        return Subscription(self._subscribers)

    def _all(self) -> Iterator[RequestRecord]:
        """Both rings, latest first, each record once."""
        recent = list(self._recent.records)
        yield from reversed(recent)
        oldest = recent[0].end if recent else float("inf")
        known = {id(record) for record in recent}
        for record in reversed(self._kept.records):
            # Both are in the order of their ends.
            if record.end <= oldest and id(record) not in known:
                yield record


class Subscription:
    """A bounded queue of records, to be read in an ``async for`` within a ``with``.

    Attributes:
        dropped: records that the reader was too slow for.
    """

    def __init__(self, subscribers: "set[Subscription]") -> None:
        self._subscribers = subscribers
        self._records: deque[RequestRecord] = deque()
        self._changed = asyncio.Event()
        self.dropped = 0

    def __enter__(self) -> Self:
        self._subscribers.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._subscribers.discard(self)

    def put(self, record: RequestRecord) -> None:
        """Queue a record; the oldest one goes when there are too many."""
        if len(self._records) >= WAITING:
            self._records.popleft()
            self.dropped += 1
        self._records.append(record)
        self._changed.set()

    def __aiter__(self) -> AsyncIterator[RequestRecord]:
        return self

    async def __anext__(self) -> RequestRecord:
        while not self._records:
            self._changed.clear()
            await self._changed.wait()
        return self._records.popleft()


class _Ring:
    """Records, the oldest ones dropped beyond a number and a size."""

    __slots__ = ("_bytes", "_count", "_limit", "records")

    def __init__(self) -> None:
        self.records: deque[RequestRecord] = deque()
        self._bytes = 0
        self._count = 0
        self._limit = 0

    def bound(self, count: int, size: int) -> None:
        """Other bounds: number and bytes."""
        self._count = count
        self._limit = size
        self._trim()

    def add(self, record: RequestRecord) -> None:
        """The newest one; its `kept_bytes` are known."""
        records = self.records
        records.append(record)
        self._bytes += record.kept_bytes
        if len(records) > self._count or self._bytes > self._limit:
            self._bytes -= records.popleft().kept_bytes
            if self._bytes > self._limit:
                self._trim()

    def _trim(self) -> None:
        records = self.records
        while records and (len(records) > self._count or self._bytes > self._limit):
            self._bytes -= records.popleft().kept_bytes


def _start(record: RequestRecord) -> float:
    return record.start
