"""Predicted against actual cached tokens, as Prometheus families."""

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from gateway.prefix.truth import WorkerTruth

_FAMILIES: Final = (
    ("answers", "warmroute_prediction_answers", "Answers that named their cached tokens"),
    ("prompt_tokens", "warmroute_prediction_prompt_tokens", "Prompt tokens of those"),
    ("predicted_tokens", "warmroute_prediction_predicted_tokens", "Tokens that the chosen worker was believed to hold"),
    ("cached_tokens", "warmroute_prediction_cached_tokens", "Tokens that it took from its cache"),
    ("over_tokens", "warmroute_prediction_over_tokens", "Tokens predicted and not cached"),
    ("under_tokens", "warmroute_prediction_under_tokens", "Tokens cached and not predicted"),
    (
        "resyncs",
        "warmroute_prediction_resyncs",
        "Times a worker's events were followed anew because predictions were wrong",
    ),
)


def truth_families(truth: "Iterable[tuple[str, WorkerTruth]]", models: "Mapping[str, str]") -> "Iterator[Metric]":
    """One counter per sum, by worker; `models`: each worker's."""
    rows = list(truth)
    for attribute, name, text in _FAMILIES:
        family = CounterMetricFamily(name, text, labels=["worker", "model"])
        for worker_id, score in rows:
            family.add_metric([worker_id, models.get(worker_id, "")], getattr(score, attribute))
        yield family
