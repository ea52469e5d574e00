"""What goes to a worker: the head of its request, and the body it gets."""

from typing import TYPE_CHECKING, Any

from gateway.http.body import with_model
from gateway.http.hints import with_hints
from gateway.http.splice import with_include_usage, with_token_ids
from gateway.http.watch import UsageWatch
from gateway.telemetry.w3c import is_valid_traceparent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.fleet.worker import Worker
    from gateway.http.journey import Journey
    from gateway.prefix.lookup import Matcher

_COMPLETIONS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose streams carry usage only if they are asked to."""


def head_for(journey: "Journey", worker: "Worker", length: int, number: int) -> bytes:
    """The head of the request to `worker`, for a body of `length` bytes, in the attempt of that number, from 0."""
    head = journey.head
    assert head is not None
    if journey.trace is not None:
        trace = journey.trace.lines(number)
    else:
        trace = head.trace_lines(is_valid_traceparent) if head.trace else b""
    return b"POST %b%b HTTP/1.1\r\nhost: %b\r\n%b%b%bcontent-length: %d\r\n\r\n" % (
        worker.base_path.encode(),
        journey.target.encode("utf-8", "surrogateescape"),
        worker.authority,
        _credentials(journey, worker),
        trace,
        b"".join(head.lines),
        length,
    )


def _credentials(journey: "Journey", worker: "Worker") -> bytes:
    """The worker's own key; without one the client's, unless that was meant for the gateway."""
    if worker.api_key:
        return b"authorization: Bearer %b\r\n" % worker.api_key.encode()
    assert journey.head is not None
    return journey.head.authorization if journey.tenant is None else b""


def body_for(journey: "Journey", worker: "Worker", matchers: "Mapping[str, Matcher]", *, hints: bool = True) -> bytes:
    """The body that `worker` gets: the client's own bytes, but for what has to be another there.

    That is the model, where the worker calls it by another name (a LoRA adapter's it knows as it is); that a stream ends with its usage, where that is wanted to compare predictions
    with (`Journey.watch` takes it out again); what it is to be told about its caches (with `hints`); and the prompt's ids, where they spare the worker work.
    """
    body, model, lookup = journey.body, journey.model, journey.lookup
    counted = lookup is not None or (journey.tenant is not None and journey.tenant.limits_tokens)
    if counted and journey.route.path in _COMPLETIONS:
        body = with_include_usage(body, journey.parsed, worker_default=worker.driver.usage_by_default)
    asked = body is not journey.body
    if lookup is not None or journey.wants_usage:
        journey.watch = UsageWatch(asked=asked)
    if model is not None and model != worker.model and _is_the_fleets(model, journey):
        if journey.multipart is not None:
            return journey.multipart.replaced(worker.model)
        body = with_model(body, model, worker.model)
    parsed: Mapping[str, Any] = journey.parsed
    if hints and (hinted := journey.hinted) is not None and hinted.inside:
        body, parsed = with_hints(body, parsed, hinted)
    if lookup is not None:
        matcher = matchers.get(lookup.fleet)
        ids = matcher.ids(worker, journey.route.path, lookup, journey.parsed) if matcher is not None else None
        if ids is not None:
            body = with_token_ids(body, parsed, ids)
    return body


def _is_the_fleets(model: str, journey: "Journey") -> bool:
    return journey.fleet is None or model in journey.fleet.own_names
