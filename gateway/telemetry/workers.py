"""The families of `/metrics` about workers and fleets: load, slots, state, what their answers came to.

With 1,000 workers these are most of a scrape. So it is done in two halves: `worker_rows` copies numbers, on the event loop's
thread; `worker_families` makes families of the rows, in any thread.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from prometheus_client.core import Metric, SummaryMetricFamily

from gateway.fleet.worker import WorkerState
from gateway.telemetry.families import counter, gauge
from policies.base import WorkerView

if TYPE_CHECKING:
    from gateway.telemetry.metrics import Metrics


class WorkerReading(WorkerView, Protocol):
    """What is shown of a worker: what a policy may see, and its state. `gateway.fleet.worker.Worker` is one."""

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""


class QueueReading(NamedTuple):
    """Requests of one model that wait in the gateway.

    Attributes:
        requests: how many.
        oldest: seconds that the oldest of them has waited; 0 without any.
        misses: those of them that are predicted to miss their deadline.
    """

    requests: int = 0
    oldest: float = 0.0
    misses: int = 0


class WorkerRow(NamedTuple):
    """One worker's numbers at one moment, in the order of their families."""

    id: str
    model: str
    state: WorkerState
    in_flight: int
    in_flight_tokens: int
    pending: int
    pending_tokens: int
    weight: float
    slots: int | None
    ejections: int
    rate: float
    overhead: float
    hold: float


class AnswersRow(NamedTuple):
    """What one worker's answers came to (`gateway.telemetry.metrics.WorkerSeries`)."""

    id: str
    first_bytes: int
    first_byte_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class WorkerRows(NamedTuple):
    """Everything about workers and fleets at one moment.

    Attributes:
        workers: those that are configured.
        answers: of those, and of all that are gone together, the ones that have answered.
        attempts: finished attempts by worker and error type.
        sockets: connections by worker, open and, of those, idle.
        queues: by model; every model is there.
    """

    workers: list[WorkerRow]
    answers: list[AnswersRow]
    attempts: dict[tuple[str, str | None], int]
    sockets: dict[str, tuple[int, int]]
    queues: dict[str, QueueReading]

    def models(self) -> dict[str, str]:
        """The model of every worker that is configured, by its id."""
        return {row.id: row.model for row in self.workers}


def worker_rows(
    metrics: "Metrics",
    workers: Iterable[tuple[str, WorkerReading]],
    ejections: Mapping[str, int],
    sockets: Mapping[str, tuple[int, int]],
    queues: Mapping[str, QueueReading],
) -> WorkerRows:
    """Copy the numbers: some 2 us a worker."""
    rows = [
        WorkerRow(
            worker.id,
            model,
            worker.state,
            worker.in_flight,
            worker.in_flight_tokens,
            worker.pending,
            worker.pending_tokens,
            worker.weight,
            worker.capabilities.slots,
            ejections.get(worker.id, 0),
            worker.rate,
            worker.overhead,
            worker.hold,
        )
        for model, worker in workers
    ]
    answers = [
        AnswersRow(
            worker_id,
            series.first_bytes,
            series.first_byte_seconds,
            series.prompt_tokens,
            series.cached_tokens,
            series.output_tokens,
        )
        for worker_id, series in metrics.workers.items()
    ]
    waiting = {row.model: queues.get(row.model, QueueReading()) for row in rows}
    return WorkerRows(rows, answers, metrics.attempts.copy(), dict(sockets), waiting)


_WORKER = "worker model"
_GAUGES: tuple[tuple[str, str, Callable[[WorkerRow], float | None]], ...] = (
    ("warmroute_worker_requests_in_flight", "Requests sent there and not ended", lambda row: row.in_flight),
    (
        "warmroute_worker_prompt_tokens_in_flight",
        "Their prompt tokens, where known",
        lambda row: row.in_flight_tokens,
    ),
    (
        "warmroute_worker_requests_pending",
        "Those of them whose answer has not begun: they wait for their prefill or are in it",
        lambda row: row.pending,
    ),
    (
        "warmroute_worker_prompt_tokens_pending",
        "Prompt tokens that it has to compute for the pending ones, as far as known",
        lambda row: row.pending_tokens,
    ),
    ("warmroute_worker_weight", "Share of a full load; below 1 during slow start", lambda row: row.weight),
    ("warmroute_worker_slots", "Places in its running batch, where known", lambda row: row.slots),
    (
        "warmroute_worker_slots_used",
        "Of those, the ones that our requests take",
        lambda row: None if row.slots is None else min(row.slots, row.in_flight),
    ),
    ("warmroute_worker_prefill_rate", "Prompt tokens that it computes in a second, as learned", lambda row: row.rate),
    (
        "warmroute_worker_prefill_overhead_seconds",
        "What each prefill takes besides its tokens, as learned",
        lambda row: row.overhead,
    ),
    (
        "warmroute_worker_slot_hold_seconds",
        "How long a request holds a slot in the mean, once known",
        lambda row: row.hold or None,
    ),
)
_ANSWERS: tuple[tuple[str, str, Callable[[AnswersRow], int]], ...] = (
    (
        "warmroute_worker_prompt_tokens",
        "Prompt tokens of answers, as the worker counted them",
        lambda row: row.prompt_tokens,
    ),
    ("warmroute_worker_cached_tokens", "Of those, the ones from its cache", lambda row: row.cached_tokens),
    ("warmroute_worker_output_tokens", "Generated tokens, as the worker counted them", lambda row: row.output_tokens),
)


def worker_families(rows: WorkerRows) -> Iterator[Metric]:
    """One series per worker and family."""
    for name, text, read in _GAUGES:
        family = gauge(name, text, _WORKER)
        for row in rows.workers:
            value = read(row)
            if value is not None:
                family.add_metric((row.id, row.model), value)
        yield family
    state = gauge("warmroute_worker_state", "1 for the state it is in, 0 for the others", "worker model state")
    ejections = counter("warmroute_worker_ejections", "Times it was left out because it failed", _WORKER)
    for row in rows.workers:
        ejections.add_metric((row.id, row.model), row.ejections)
        for one in WorkerState:
            state.add_metric((row.id, row.model, one.value), float(row.state is one))
    yield from (state, ejections)
    yield from _answer_families(rows)
    sockets = gauge("warmroute_upstream_connections", "Connections to a worker", "worker state")
    for worker_id, (opened, idle) in rows.sockets.items():
        sockets.add_metric((worker_id, "active"), opened - idle)
        sockets.add_metric((worker_id, "idle"), idle)
    yield sockets


def _answer_families(rows: WorkerRows) -> Iterator[Metric]:
    """What attempts and answers came to. Those of workers that are gone are together, without a model."""
    models = rows.models()
    attempts = counter(
        "warmroute_attempts",
        "Finished attempts on a worker; error_type is empty for good ones",
        "worker model error_type",
    )
    for (worker_id, error_type), value in rows.attempts.items():
        attempts.add_metric((worker_id, models.get(worker_id, ""), error_type or ""), value)
    yield attempts
    waited = SummaryMetricFamily(
        "warmroute_worker_time_to_first_byte_seconds",
        "From an attempt's begin to the first byte of its answer's body",
        labels=_WORKER.split(),
    )
    for row in rows.answers:
        waited.add_metric((row.id, models.get(row.id, "")), row.first_bytes, row.first_byte_seconds)
    yield waited
    for name, text, read in _ANSWERS:
        family = counter(name, text, _WORKER)
        for row in rows.answers:
            family.add_metric((row.id, models.get(row.id, "")), read(row))
        yield family


def fleet_families(rows: WorkerRows) -> Iterator[Metric]:
    """What an autoscaler needs to know of each model, without having to add workers up."""
    slots = gauge(
        "warmroute_fleet_slots", "Places in the running batches of workers that take requests, where known", "model"
    )
    used = gauge("warmroute_fleet_slots_used", "Of those, the ones that our requests take", "model")
    requests = gauge("warmroute_queue_requests", "Requests that wait in the gateway", "model")
    oldest = gauge("warmroute_queue_oldest_seconds", "How long the oldest of them has waited", "model")
    misses = gauge(
        "warmroute_queue_deadline_misses", "Those of them that are predicted to miss their deadline", "model"
    )
    for model, queue in rows.queues.items():
        counted = [
            (row.slots, row.in_flight)
            for row in rows.workers
            if row.model == model and row.slots is not None and row.state is WorkerState.READY
        ]
        if counted:
            slots.add_metric((model,), sum(places for places, _ in counted))
            used.add_metric((model,), sum(min(places, taken) for places, taken in counted))
        requests.add_metric((model,), queue.requests)
        oldest.add_metric((model,), queue.oldest)
        misses.add_metric((model,), queue.misses)
    yield from (slots, used, requests, oldest, misses)
