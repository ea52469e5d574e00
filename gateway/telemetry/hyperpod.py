"""The gateway's numbers under the names of SageMaker HyperPod's reverse proxy, for dashboards that were built on those.

HyperPod's proxy stands in front of each model's pod; we count what we sent to that pod. So `model_invocations_total`,
`model_errors_total` and `model_concurrent_requests` have ``pod_name``, which is the worker's id. The two histograms are of whole
requests with all their attempts, by model. Labels that only the deployment knows (``cluster_name``, ``namespace``,
``instance_type``, ...) come from the configuration.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric

from gateway.telemetry.families import counter, gauge, histograms
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.workers import WorkerRows

_NO_ERRORS: Final = frozenset({None, "client_disconnect", "stale_connection"})
"""Ends of an attempt that are no error of its worker."""
_MILLISECONDS: Final = 1000.0


def hyperpod_families(
    rows: WorkerRows,
    durations: Mapping[str, Histogram],
    first_bytes: Mapping[str, Histogram],
    labels: Mapping[str, str],
) -> Iterator[Metric]:
    """The second set; `durations` and `first_bytes` by model, in seconds; `labels`: added to every series."""
    fixed = {"metric_source": "reverse-proxy", **labels}
    names = " ".join(fixed)
    values = tuple(fixed.values())
    invocations = counter("model_invocations", "Requests sent to a model's pod", f"model_name pod_name {names}")
    errors = counter("model_errors", "Those that failed", f"model_name pod_name {names}")
    concurrent = gauge("model_concurrent_requests", "Those that have not ended", f"model_name pod_name {names}")
    sent: dict[str, int] = {}
    failed: dict[str, int] = {}
    for (worker_id, error_type), count in rows.attempts.items():
        sent[worker_id] = sent.get(worker_id, 0) + count
        if error_type not in _NO_ERRORS:
            failed[worker_id] = failed.get(worker_id, 0) + count
    for row in rows.workers:
        pod = (row.model, row.id, *values)
        invocations.add_metric(pod, sent.get(row.id, 0) + row.in_flight)
        errors.add_metric(pod, failed.get(row.id, 0))
        concurrent.add_metric(pod, row.in_flight)
    yield from (invocations, errors, concurrent)
    for name, text, by_model in (
        ("model_latency_milliseconds", "From a request's head to its end", durations),
        ("model_ttfb_milliseconds", "From a request's head to the first byte of its answer", first_bytes),
    ):
        by_labels = {(model, *values): histogram for model, histogram in by_model.items()}
        yield histograms(name, text, f"model_name {names}", by_labels, scale=_MILLISECONDS)
