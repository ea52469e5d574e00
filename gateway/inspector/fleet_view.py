"""The fleets as the inspector shows them: one document, made of copies of numbers."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gateway import __version__
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.workers import QueueReading

if TYPE_CHECKING:
    from gateway.fleet.worker import Worker
    from gateway.inspector.sources import InspectorSources
    from gateway.prefix.feed_status import FeedStatus
    from gateway.prefix.truth import WorkerTruth
    from gateway.prompt.parity_status import ParityStatus


def fleet_document(sources: "InspectorSources") -> dict[str, Any]:
    """Every fleet with its workers, what the process did in all and how it is. Seconds and tokens everywhere; some 15 us a worker."""
    readings = sources.metrics.readings
    lives = {str(life["id"]): life for life in sources.lives()}
    feeds = {feed.worker: feed for feed in readings.feeds()}
    truth = dict(readings.truth())
    parity = {status.worker: status for _, status in readings.parity()}
    degraded = sources.degraded()
    queues = readings.queues()
    errors = _errors(sources)
    fleets = []
    for fleet in sources.fleets():
        queue = queues.get(fleet.name, QueueReading())
        rows = [
            {
                **worker_row(sources, worker, lives.get(worker.id, {}), feeds.get(worker.id), truth.get(worker.id)),
                "errors": errors.get(worker.id, 0),
                "parity": _parity(parity.get(worker.id)),
            }
            for worker in fleet.workers
        ]
        fleets.append(
            {
                "model": fleet.name,
                "aliases": list(fleet.aliases),
                "policy": fleet.policy_name,
                "ready": fleet.ready,
                "total": len(fleet.workers),
                "degraded": list(degraded.get(fleet.name, ())),
                "queue": {"requests": queue.requests, "oldest": queue.oldest},
                "workers": rows,
            }
        )
    return {
        "version": __version__,
        "time": time.time(),
        "totals": _totals(sources),
        "process": _process(sources),
        "prefix": _maps(sources),
        "fleets": fleets,
    }


def worker_row(
    sources: "InspectorSources",
    worker: "Worker",
    life: Mapping[str, Any],
    feed: "FeedStatus | None",
    truth: "WorkerTruth | None",
) -> dict[str, Any]:
    """One worker: who and how it is, its load, what was learned of it, what it holds, how right predictions were."""
    capabilities, calibration = worker.capabilities, worker.calibration
    answers = sources.metrics.workers.get(worker.id)
    waited = answers.first_byte_seconds / answers.first_bytes if answers is not None and answers.first_bytes else None
    return {
        "id": worker.id,
        "url": worker.url,
        "driver": worker.driver.name,
        "state": worker.state.value,
        "routable": worker.routable,
        "since": life.get("since"),
        "ejections": life.get("ejections", 0),
        "ejected_for": life.get("ejected_for"),
        "last_error": life.get("last_error"),
        "weight": worker.weight,
        "in_flight": worker.in_flight,
        "pending": worker.pending,
        "pending_tokens": worker.pending_tokens,
        "backlog": _rounded(worker.backlog),
        "slots": capabilities.slots,
        "learned": {
            "rate": _rounded(worker.rate),
            "overhead": _rounded(worker.overhead),
            "hold": _rounded(worker.hold),
            "samples": calibration.samples,
            "start": {"rate": calibration.start[0], "overhead": calibration.start[1]},
        },
        "kv": _kv(worker, feed),
        "ttft": _rounded(waited),
        "tokens": {
            "prompt": answers.prompt_tokens if answers is not None else 0,
            "cached": answers.cached_tokens if answers is not None else 0,
            "output": answers.output_tokens if answers is not None else 0,
        },
        "truth": _truth(truth),
        "feed": _feed(feed),
    }


def worker_document(sources: "InspectorSources", worker_id: str) -> dict[str, Any] | None:
    """One worker with everything: capabilities and where each is known from, its feed in full. None for an unknown one."""
    readings = sources.metrics.readings
    worker = next((each for each in sources.fleets().workers() if each.id == worker_id), None)
    if worker is None:
        return None
    life = next((each for each in sources.lives() if each["id"] == worker_id), {})
    feed = next((each for each in readings.feeds() if each.worker == worker_id), None)
    parity = next((each for _, each in readings.parity() if each.worker == worker_id), None)
    row = worker_row(sources, worker, life, feed, dict(readings.truth()).get(worker_id))
    row["fleet"] = next((fleet.name for fleet in sources.fleets() if worker in fleet.workers), None)
    row["model"] = worker.model
    row["errors"] = _errors(sources).get(worker_id, 0)
    row["parity"] = _parity(parity)
    row["capabilities"] = worker.capabilities.describe()
    row["doubts"] = list(worker.capabilities.doubts)
    if feed is not None:
        row["feed"] |= {
            "endpoints": list(feed.endpoints),
            "replay": feed.replay,
            "ranks": feed.ranks,
            "counters": dict(feed.counters),
            "problems": dict(feed.problems),
            "orphans": feed.orphans,
            "block_size": feed.block_size,
            "block_size_origin": feed.block_size_origin,
            "blocks": dict(feed.blocks),
            "capacity": feed.capacity,
            "capacity_origin": feed.capacity_origin,
        }
    return row


def _kv(worker: "Worker", feed: "FeedStatus | None") -> dict[str, Any]:
    """Tokens that it is known to hold by tier, and how many fit on the device; None where nobody knows."""
    size = feed.block_size if feed is not None else None
    held = {tier: count * size for tier, count in feed.blocks.items()} if feed is not None and size else {}
    capacity = worker.capabilities.kv_capacity_tokens
    if capacity is None and feed is not None and feed.capacity and size:
        capacity = feed.capacity * size
    return {
        "device": held.get("device"),
        "l1": held.get("l1"),
        "l2": held.get("l2"),
        "capacity": capacity,
    }


def _feed(feed: "FeedStatus | None") -> dict[str, Any] | None:
    if feed is None:
        return None
    return {
        "status": feed.status,
        "since": _rounded(feed.since),
        "reason": feed.reason or None,
        "events_per_second": _rounded(feed.events_per_second),
        "lag": _rounded(feed.lag),
        "last_seq": feed.last_seq,
        "gaps": feed.counters.get("gaps", 0),
        "problems": sum(feed.problems.values()),
        "silent": feed.silent,
    }


def _truth(truth: "WorkerTruth | None") -> dict[str, Any] | None:
    if truth is None or not truth.answers:
        return None
    return {
        "answers": truth.answers,
        "prompt": truth.prompt_tokens,
        "predicted": truth.predicted_tokens,
        "cached": truth.cached_tokens,
        "over": truth.over_tokens,
        "under": truth.under_tokens,
        "resyncs": truth.resyncs,
    }


def _parity(status: "ParityStatus | None") -> dict[str, Any] | None:
    if status is None:
        return None
    return {
        "standing": status.standing.value,
        "detail": status.detail or None,
        "observed": status.observed,
        "wrong": status.wrong,
    }


def _errors(sources: "InspectorSources") -> dict[str, int]:
    """Attempts that failed, by worker."""
    failed: dict[str, int] = {}
    for (worker_id, error), count in sources.metrics.attempts.items():
        if error is not None:
            failed[worker_id] = failed.get(worker_id, 0) + count
    return failed


def _totals(sources: "InspectorSources") -> dict[str, int]:
    metrics = sources.metrics
    ended = dict.fromkeys(Outcome, 0)
    for (_, _, _, outcome, _), series in metrics.requests.items():
        ended[outcome] += series.count
    return {
        "accepted": metrics.accepted,
        "in_flight": metrics.in_flight,
        **{outcome.value: count for outcome, count in ended.items()},
        "retries": sum(metrics.retries.values()),
        "prompt_tokens": sum(series.prompt_tokens for series in metrics.workers.values()),
        "cached_tokens": sum(series.cached_tokens for series in metrics.workers.values()),
        "output_tokens": sum(series.output_tokens for series in metrics.workers.values()),
    }


def _process(sources: "InspectorSources") -> dict[str, Any]:
    readings = sources.metrics.readings
    loop = readings.loop
    return {
        "lag": _rounded(loop.lag.last) if loop is not None else None,
        "lag_worst": _rounded(loop.lag.worst()) if loop is not None else None,
        "memory": loop.rss() if loop is not None else None,
        "connections": readings.client_connections(),
        "policy_faults": sum(readings.policy_faults().values()),
        "dropped": dict(readings.dropped()),
    }


def _maps(sources: "InspectorSources") -> list[dict[str, int]]:
    return [
        {
            "block_size": size,
            "blocks": len(prefix_map),
            "bytes": prefix_map.bytes,
            "budget": prefix_map.budget,
            "workers": prefix_map.workers,
            "evicted": prefix_map.counters.evicted,
        }
        for size, prefix_map in sources.metrics.readings.prefix_maps().items()
    ]


def _rounded(value: float | None) -> float | None:
    """Six significant digits: enough for eyes, and shorter on the wire."""
    return None if value is None else float(f"{value:.6g}")
