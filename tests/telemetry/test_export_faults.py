"""Collectors that are away, silent or unwilling. Requests must not notice, and what is lost must be counted."""

import asyncio
import socket
import subprocess
import sys
import time

import pytest
import structlog

from gateway.telemetry.export import BoundedProcessor, LinesExporter, exporter_for
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.recording import Recorder
from gateway.telemetry.spans import Tracing

PATH = "/v1/chat/completions"


def refused_endpoint():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"


def tracing_with(telemetry, exporter=None, **bounds):
    processor = BoundedProcessor(exporter or exporter_for(telemetry.traces), **bounds)
    return Tracing(telemetry.traces, Recorder("gw", processor))


def refused(trace):
    """The record of a request that asked no worker: one span."""
    marks = (1.0, 1.0, 0.0, 0.0, 0.0, 2.0)
    prompt = (0, None, "", 0.0, False)
    end = ([], [], None, None, 0, 0, 404, Outcome.COMPLETED, "model_not_found", "no such model")
    return RequestRecord(b"r", trace, "POST", PATH, "", "", False, *marks, *prompt, *end)


def spans(tracing, count):
    """Make spans; the longest that the caller was held up, in seconds."""
    longest = 0.0
    for _ in range(count):
        before = time.perf_counter()
        tracing.ended(refused(tracing.begin({})))
        longest = max(longest, time.perf_counter() - before)
    return longest


async def closed(tracing, patience=2.0):
    """Shut down; how long it took in seconds."""
    before = time.monotonic()
    await asyncio.to_thread(tracing.shutdown, patience)
    return time.monotonic() - before


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # another thread counts
            await asyncio.sleep(0.01)


async def test_a_hanging_collector_fills_the_queue_and_no_more(otlp, collector):
    collector.hanging = True
    tracing = tracing_with(otlp(), queue=100, batch=10, delay=0.01)
    longest = spans(tracing, 20)
    await collector.until(lambda: collector.requests == 1)
    longest = max(longest, spans(tracing, 1000))
    # 10 are in the request that hangs, 100 wait.
    assert tracing.dropped == 1020 - 110
    assert longest < 0.5
    assert await closed(tracing, 0.3) < 1.5


async def test_a_collector_that_is_away_costs_its_spans_and_is_logged_once(otlp):
    with structlog.testing.capture_logs() as lines:
        tracing = tracing_with(otlp(endpoint=refused_endpoint()), queue=100, batch=10, delay=0.01)
        assert spans(tracing, 50) < 0.5
        assert await closed(tracing, 0.5) < 2.0
        await until(lambda: tracing.dropped == 50)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] in (
        ["spans were lost"],
        ["spans cannot be exported", "spans were lost"],
    )


async def test_a_collector_that_refuses_with_413_costs_only_that_batch(otlp, collector):
    with structlog.testing.capture_logs() as lines:
        collector.status = 413
        tracing = tracing_with(otlp(), queue=100, batch=10, delay=0.01)
        spans(tracing, 30)
        await until(lambda: tracing.dropped == 30)
        collector.status = 200
        spans(tracing, 10)
        await collector.until(lambda: len(collector.spans) == 10)
        await closed(tracing)
    assert tracing.dropped == 30
    assert [line["event"] for line in lines] == [
        "spans cannot be exported",
        "spans are exported again",
        "spans were lost",
    ]


async def test_a_collector_that_comes_back_gets_what_waited(otlp, collector):
    collector.status = 503
    tracing = tracing_with(otlp(), queue=100, batch=10, delay=0.01)
    spans(tracing, 10)
    await collector.until(lambda: collector.requests >= 1)
    collector.status = 200
    await collector.until(lambda: len(collector.spans) == 10)
    await closed(tracing)
    assert tracing.dropped == 0


async def test_shutdown_sends_what_is_queued(otlp, collector):
    tracing = tracing_with(otlp(), queue=1000, batch=100, delay=60)
    spans(tracing, 250)
    assert await closed(tracing) < 2.0
    assert len(collector.spans) == 250
    assert tracing.dropped == 0


async def test_spans_after_shutdown_are_counted_and_a_second_shutdown_does_nothing(otlp):
    tracing = tracing_with(otlp())
    await closed(tracing)
    spans(tracing, 3)
    assert tracing.dropped == 3
    assert await closed(tracing) < 0.1


async def test_a_full_disk_costs_spans_and_nothing_else(otlp):
    tracing = tracing_with(otlp(), LinesExporter.to_file("/dev/full"), delay=0.01)
    spans(tracing, 5)
    await until(lambda: tracing.dropped == 5)
    await closed(tracing)


def test_a_trace_file_in_a_missing_folder_is_an_error_at_start(tmp_path):
    with pytest.raises(FileNotFoundError):
        LinesExporter.to_file(str(tmp_path / "missing" / "spans.jsonl"))


async def test_a_process_ends_in_time_though_its_collector_hangs(otlp, collector):
    collector.hanging = True
    program = (
        "import sys\n"
        "from gateway.config.schema import Telemetry, Traces\n"
        "from gateway.telemetry.spans import Tracing\n"
        "traces = Traces(exporter='otlp', endpoint=sys.argv[1], sample=1.0)\n"
        "tracing = Tracing.from_config(Telemetry(traces=traces))\n"
        "from gateway.telemetry.record import RequestRecord\n"
        "marks = (1.0, 1.0, 0.0, 0.0, 0.0, 2.0)\n"
        "prompt = (0, None, '', 0.0, False)\n"
        "tracing.ended(RequestRecord(b'r', tracing.begin({}), 'POST', '/v1/completions', 'm', 'p', False, *marks,\n"
        "    *prompt, [], [], None, None, 0, 0, 200, 'completed', None, None))\n"
        "print('up', flush=True)\n"
        "sys.stdin.readline()\n"
        "tracing.shutdown()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, collector.endpoint, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert await process.stdout.readline() == b"up\n"
    await collector.until(lambda: collector.requests == 1)
    before = time.monotonic()
    await process.communicate(b"\n")
    assert process.returncode == 0
    assert time.monotonic() - before < 4.0
