"""What telemetry costs per request, in microseconds of CPU time: ``python -m bench.telemetry``.

Each row is the least of several runs (the machine may be busy with other things) of CPU time of this thread, with the cost
of the empty loop taken off. Spans go to an exporter that discards them at once: what is measured is what the event loop's
thread pays. `export` is what the exporter's thread pays for making and encoding them, holding the interpreter lock.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from random import Random
from time import monotonic
from types import SimpleNamespace

from backends.registry import driver_named
from gateway.config.schema import Decisions, Logs, Telemetry, Traces
from gateway.fleet.worker import Worker
from gateway.http.journey import Journey
from gateway.http.report import Reports
from gateway.http.routes import ROUTES
from gateway.telemetry.collector import Readings
from gateway.telemetry.decisions import DecisionLog
from gateway.telemetry.export import BATCH, BoundedProcessor
from gateway.telemetry.logs import RequestLog, configure
from gateway.telemetry.metrics import Metrics, Outcome
from gateway.telemetry.pace import KEPT, Pace
from gateway.telemetry.record import Attempt, Decided, loads_of
from gateway.telemetry.recording import Recorder, encoded, resource_of
from gateway.telemetry.spans import Tracing
from gateway.telemetry.w3c import is_valid_traceparent
from policies.base import RouteRequest
from policies.registry import Registry

PATH = "/v1/chat/completions"
CALLER = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", "tracestate": "vendor=a"}
SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=a"}


class Discard:
    """Sends nothing."""

    def send(self, data):  # noqa: ARG002
        """Accept a batch."""
        return True

    def shutdown(self) -> None:
        """Nothing to close."""


def cost(call: Callable[[], object], rounds: int, runs: int) -> float:
    """Microseconds of CPU per call."""

    def once(body: Callable[[], object]) -> float:
        started = time.thread_time()
        for _ in range(rounds):
            body()
        return time.thread_time() - started

    def nothing() -> None:
        pass

    gc.collect()
    empty = min(once(nothing) for _ in range(runs))
    return (min(once(call) for _ in range(runs)) - empty) / rounds * 1e6


def metrics_rows(rounds, runs):
    metrics = Metrics(["m"], [PATH], ["w1"])
    yield "metrics.request_started", cost(metrics.request_started, rounds, runs)

    def ended():
        metrics.request_ended("m", PATH, 200, Outcome.COMPLETED, 1.25, 0.25, 1000, None)

    yield "metrics.request_ended", cost(ended, rounds, runs)
    yield "metrics.attempt_ended", cost(lambda: metrics.attempt_ended("w1", None), rounds, runs)
    yield "metrics.retry", cost(lambda: metrics.retry("upstream_connect"), rounds, runs)

    def unknown():
        metrics.request_ended("stranger", "/nothing", 404, Outcome.COMPLETED, 0.001, None, 100, "model_not_found")

    yield "metrics.request_ended, unknown model and path", cost(unknown, rounds, runs)
    large = Metrics([f"m{n}" for n in range(20)], [PATH], [])
    for number in range(20):
        for status in (200, 400, 429, 502, 503):
            large.request_ended(f"m{number}", PATH, status, Outcome.COMPLETED, 1.0, 0.5, 10, None)
    workers = [
        Worker(url=f"http://10.0.{n // 250}.{n % 250}", driver=driver_named("vllm"), model="m") for n in range(1000)
    ]
    for metrics, label in ((large, "20 models x 5 statuses"), (fleet_of(workers), "1,000 workers")):
        yield f"one scrape, {label}: snapshot", cost(metrics._collector.snapshot, max(1, rounds // 10_000), runs)  # noqa: SLF001
        yield (
            f"one scrape, {label}: with text",
            cost(lambda it=metrics: it.render(None), max(1, rounds // 10_000), runs),
        )


def fleet_of(workers):
    metrics = Metrics(["m"], [PATH], [worker.id for worker in workers])
    metrics.readings = Readings(
        workers=lambda: [("m", worker) for worker in workers],
        upstream_sockets=lambda: {worker.id: (3, 1) for worker in workers},
    )
    for worker in workers:
        metrics.attempt_ended(worker.id, None)
    return metrics


def record_rows(rounds, runs):
    """What a record costs: a request's bookkeeping with one less the same without, each the least of many short runs in turn."""
    for count in (2, 8, 64):
        with_record, without = _bookkeeping(count, recording=True), _bookkeeping(count, recording=False)
        pairs = [(cost(with_record, 500, 1), cost(without, 500, 1)) for _ in range(max(20, runs * rounds // 20_000))]
        yield (
            f"decision record, {count} workers",
            min(pair[0] for pair in pairs) - min(pair[1] for pair in pairs),
        )
    record = _record()
    yield (
        "decision record: its document, 8 workers, when somebody looks",
        cost(record.document, max(1, rounds // 1000), runs),
    )
    pace = Pace()

    def read():
        stamps = pace.stamps
        stamps.append(monotonic())
        if len(stamps) > KEPT:
            pace.fold()

    yield "a read of a stream", cost(read, rounds, runs)


def _bookkeeping(count, *, recording):
    """All that a request does beside its bytes: decide, count, report."""
    workers = [Worker(url=f"http://10.0.0.{number}", driver=driver_named("vllm"), model="m") for number in range(count)]
    for worker in workers:
        worker.routable = True
    policy = Registry.default().build("leastload", {})
    candidates = [worker.candidate for worker in workers]
    telemetry = Telemetry(decisions=Decisions(count=2000 if recording else 0))
    reports = Reports(telemetry, Metrics(["m"], [PATH], []), DecisionLog(telemetry.decisions), None)
    headers = {"host": "x", "content-type": "application/json", "user-agent": "bench"}
    message = SimpleNamespace(method="POST", headers=headers)
    request = SimpleNamespace(message=message)
    head = SimpleNamespace(request_id=b"00000000000000000000000a", trace=[])
    fleet = SimpleNamespace(name="m", policy_name="leastload")
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}], "stream": True, "max_tokens": 100}

    def run():
        journey = Journey(request, ROUTES[PATH], PATH, monotonic())
        reports.begun(journey)
        journey.head, journey.parsed, journey.fleet = head, body, fleet
        asked = journey.route_request = RouteRequest(model="m", path=PATH, headers=headers, body=body)
        asked.now = now = monotonic()
        decision = policy.decide(asked, candidates)
        done = monotonic()
        if reports.recording:
            journey.decisions.append(
                Decided(policy, asked, candidates, loads_of(candidates), decision, now, done - now)
            )
        lease = decision.chosen.worker.acquire(0, now=now)
        attempt = Attempt(decision.chosen.worker, monotonic())
        journey.attempts.append(attempt)
        attempt.seconds = monotonic() - attempt.at
        lease.release(monotonic())
        journey.status, journey.outcome = 200, Outcome.COMPLETED
        journey.first_byte_at = journey.end = monotonic()
        reports.ended(journey)
        return journey

    return run


def _record(trace=None):
    journey = _bookkeeping(8, recording=True)()
    journey.trace = trace
    return journey.record()


def spans_rows(rounds, runs):
    off = Tracing.from_config(Telemetry())

    def without():
        if off is not None:
            off.begin(CALLER)

    yield "spans off", cost(without, rounds, runs)
    yield (
        "spans off, caller's traceparent checked",
        cost(lambda: is_valid_traceparent(CALLER["traceparent"]), rounds, runs),
    )
    for name, sample, headers in (
        ("spans, sample 0, no caller", 0.0, {}),
        ("spans, caller not sampled", 1.0, CALLER),
        ("spans, sample 10 %", 0.1, {}),
        ("spans, sample 100 %", 1.0, {}),
        ("spans, caller sampled", 0.0, SAMPLED),
    ):
        processor = BoundedProcessor(Discard(), queue=1_000_000, batch=BATCH)
        tracing = Tracing(Traces(exporter="console", sample=sample), Recorder("bench", processor), Random(1))
        record = _record()

        def request(tracing=tracing, record=record, headers=headers):
            trace = tracing.begin(headers)
            trace.lines(0)
            if trace.sampled:
                record.trace = trace
                tracing.ended(record)

        yield name, cost(request, max(1, rounds // 20), runs)
        tracing.shutdown(30.0)
        if tracing.dropped:
            raise SystemExit(f"{tracing.dropped} spans were dropped: the number means nothing")
    resource = resource_of("bench")
    record = _record(Tracing(Traces(sample=1.0), None, Random(1)).begin({}))
    few = max(1, rounds // 1000)
    yield "export thread: the 3 spans of a request, 8 candidates", cost(lambda: encoded([record], resource), few, runs)


def log_rows(rounds, runs):
    descriptor = os.open(os.devnull, os.O_WRONLY)
    running = configure(Logs(), descriptor)

    def request(log):
        def run():
            log.ended(
                request_id="r",
                trace_id=None,
                model="m",
                path=PATH,
                worker="w1",
                status=200,
                outcome=Outcome.COMPLETED,
                error_type=None,
                duration=1.0,
                first_byte=0.5,
                attempts=1,
                bytes_out=1000,
            )

        return run

    for name, sample in (("request log, sample 0", 0.0), ("request log, sample 1 %", 0.01), ("request log, all", 1.0)):
        yield name, cost(request(RequestLog(sample, Random(1))), max(1, rounds // 20), runs)
    running.stop()
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.telemetry", description="What telemetry costs per request.")
    parser.add_argument("--rounds", type=int, default=100_000, help="calls per run of the cheapest rows")
    parser.add_argument("--runs", type=int, default=5, help="the least of so many runs counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    rows = [
        row
        for group in (metrics_rows, record_rows, spans_rows, log_rows)
        for row in group(options.rounds, options.runs)
    ]
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in rows}))
        return
    width = max(len(name) for name, _ in rows)
    print(f"{'CPU per call or request':<{width}}  {'us':>9}")
    for name, value in rows:
        print(f"{name:<{width}}  {value:>9.2f}")


if __name__ == "__main__":
    main()
