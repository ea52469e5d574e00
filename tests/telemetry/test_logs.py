import json
import logging
import os
import threading
import time
from random import Random

import pytest
import structlog

from gateway.config.schema import Logs
from gateway.telemetry.logs import QueuedSink, RequestLog, configure
from gateway.telemetry.metrics import Outcome

EVIL = "a\x1b[31m\r\nx\u009b\u202e\ud800\x7f"


@pytest.fixture
def log_to(tmp_path):
    """Configure logging into a file; the result stops it and gives the text."""
    stops = []

    def configured(**logs):
        path = tmp_path / "log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        running = configure(Logs(**logs), descriptor)

        def stop():
            if running not in stops:
                stops.append(running)
                running.stop()
                os.close(descriptor)
            return path.read_text()

        stops_later.append(stop)
        return stop

    stops_later = []
    yield configured
    for stop in stops_later:
        stop()


def request_ended(log, **changes):
    facts = {
        "request_id": "r",
        "trace_id": "0" * 31 + "1",
        "model": "m",
        "path": "/v1/chat/completions",
        "worker": "w1",
        "status": 200,
        "outcome": Outcome.COMPLETED,
        "error_type": None,
        "duration": 1.2345678,
        "first_byte": 0.5,
        "attempts": 1,
        "bytes_out": 42,
    }
    log.ended(**facts | changes)


def test_a_request_is_one_json_line_with_these_fields(log_to):
    stop = log_to()
    request_ended(RequestLog(1.0))
    (line,) = stop().splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("Z")
    assert record == {
        "event": "request",
        "level": "info",
        "logger": "warmroute.request",
        "request_id": "r",
        "trace_id": "0" * 31 + "1",
        "model": "m",
        "path": "/v1/chat/completions",
        "worker": "w1",
        "status": 200,
        "outcome": "completed",
        "error_type": None,
        "duration_ms": 1234.568,
        "first_byte_ms": 500.0,
        "attempts": 1,
        "bytes_out": 42,
    }


def test_a_request_without_answer_has_no_first_byte(log_to):
    stop = log_to()
    request_ended(
        RequestLog(0.0), status=0, outcome=Outcome.FAILED, error_type="no_worker", first_byte=None, worker=None
    )
    record = json.loads(stop())
    assert (record["first_byte_ms"], record["worker"], record["error_type"]) == (None, None, "no_worker")


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_failed_requests_always_get_a_line(log_to, level):
    stop = log_to(level=level)
    log = RequestLog(0.0)
    for _ in range(10):
        request_ended(log, outcome=Outcome.FAILED, status=502, error_type="upstream_connect")
        request_ended(log)
        request_ended(log, outcome=Outcome.CLIENT_GONE)
    records = [json.loads(line) for line in stop().splitlines()]
    assert [record["outcome"] for record in records] == ["failed"] * 10


def test_successes_get_a_line_by_share(log_to):
    stop = log_to()
    log = RequestLog(0.25, Random(3))
    for _ in range(2000):
        request_ended(log)
    assert len(stop().splitlines()) == pytest.approx(500, abs=60)


@pytest.mark.parametrize("form", ["json", "console"])
def test_what_a_client_chose_stands_escaped_on_one_line(log_to, form):
    stop = log_to(format=form)
    request_ended(RequestLog(1.0), model=EVIL, request_id=EVIL)
    logging.getLogger("library").warning("peer said %s", EVIL)
    text = stop()
    assert len(text.splitlines()) == 2
    assert all(character.isprintable() for character in text.replace("\n", ""))
    if form == "json":
        first, second = (json.loads(line) for line in text.splitlines())
        assert first["model"] == first["request_id"] == EVIL
        assert second["event"] == f"peer said {EVIL}"


def test_lines_of_the_standard_library_take_the_same_way(log_to):
    stop = log_to()
    logging.getLogger("asyncio").warning("slow %d", 3)
    logging.getLogger("asyncio").debug("never seen")
    try:
        int("lost")
    except ValueError:
        logging.getLogger("aiohttp.server").exception("oops")
    slow, oops = (json.loads(line) for line in stop().splitlines())
    assert (slow["event"], slow["level"], slow["logger"]) == ("slow 3", "warning", "asyncio")
    assert "ValueError: invalid literal" in oops["exception"]


def test_the_level_holds_for_both_ways(log_to):
    stop = log_to(level="error")
    structlog.get_logger("a").warning("no")
    logging.getLogger("b").warning("no")
    structlog.get_logger("a").error("yes")
    logging.getLogger("b").error("yes")
    assert [json.loads(line)["event"] for line in stop().splitlines()] == ["yes", "yes"]


def test_stop_leaves_structlog_and_logging_as_they_were(log_to):
    root = logging.getLogger()
    before = (structlog.get_config(), root.level, list(root.handlers))
    log_to()()
    assert (structlog.get_config(), root.level, list(root.handlers)) == before


def test_a_value_that_json_does_not_know_is_shown_all_the_same(log_to):
    stop = log_to()
    structlog.get_logger("a").info("odd", thing={1, 2}, data=b"\x00")
    record = json.loads(stop())
    assert (record["thing"], record["data"]) == ("{1, 2}", "b'\\x00'")


@pytest.fixture
def pipe():
    """A pipe that nobody reads."""
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def filled(write):
    """Fill a pipe to the brim; how many bytes went in."""
    os.set_blocking(write, False)
    size = 0
    try:
        while True:
            size += os.write(write, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(write, True)
    return size


def drained(read, size):
    data = b""
    while len(data) < size:
        data += os.read(read, 1 << 20)
    return data


def test_a_blocked_pipe_never_blocks_the_caller_and_every_lost_line_is_counted():
    read, write = os.pipe()
    filled(write)
    running = configure(Logs(), write)
    log = RequestLog(1.0)
    longest = 0.0
    for _ in range(11_000):
        before = time.perf_counter()
        request_ended(log)
        longest = max(longest, time.perf_counter() - before)
    # Up to a batch of 256 is in the write that hangs, 10,000 wait.
    assert 11_000 - 10_256 <= running.dropped <= 1_000
    assert longest < 0.5
    before = time.monotonic()
    running.stop(0.1)
    assert time.monotonic() - before < 1.0
    # The reader leaves: the hanging write fails, and its thread ends.
    os.close(read)
    running._sink._thread.join(5)
    os.close(write)
    assert running.dropped == 11_000


def test_a_pipe_that_flows_again_gets_every_line_that_waited(pipe):
    read, write = pipe
    size = filled(write)
    sink = QueuedSink(write)
    for number in range(100):
        sink.write(b"%d\n" % number)
    assert drained(read, size)[:1] == b"x"
    sink.stop(5)
    os.set_blocking(read, False)
    assert os.read(read, 1 << 20) == b"".join(b"%d\n" % number for number in range(100))
    assert sink.dropped == 0


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing(pipe):
    read, write = pipe
    size = filled(write)
    os.set_blocking(write, False)
    sink = QueuedSink(write)
    sink.write(b"line\n")
    drained(read, size)
    sink.stop(5)
    assert os.read(read, 100) == b"line\n"
    assert sink.dropped == 0


def test_a_full_disk_costs_lines_and_nothing_else():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    sink = QueuedSink(descriptor)
    for _ in range(10):
        sink.write(b"line\n")
    sink.stop(5)
    os.close(descriptor)
    assert sink.dropped == 10


def test_stop_writes_what_is_queued_and_later_lines_are_counted(tmp_path):
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    sink = QueuedSink(descriptor)
    threads = [
        threading.Thread(target=lambda: [sink.write(b"line\n") for _ in range(500)], name=f"writer {number}")
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.stop(5)
    sink.write(b"late\n")
    os.close(descriptor)
    assert path.read_bytes() == b"line\n" * 2000
    assert sink.dropped == 1
