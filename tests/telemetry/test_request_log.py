"""The file with a line per request."""

import threading

import orjson
import pytest

from gateway.config.schema import RequestLogFile
from gateway.telemetry.request_log import QUEUE, Entry, RequestLogWriter
from simulator.workloads.formats.request_log import request_log


def lines(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_has_the_document_and_what_a_replay_needs(tmp_path, finished):
    path = tmp_path / "requests.jsonl"
    writer = RequestLogWriter(RequestLogFile(file=str(path)))
    record = finished(None, prompt_tokens=40)
    writer.write(Entry(record, [1, 255], 16, b"alice"))
    writer.write(Entry(record, session=b"alice"))
    writer.write(Entry(record, session=b"bob"))
    writer.stop()
    first, second, third = lines(path)
    assert first["prefix"] == [f"{1:014x}", f"{255:014x}"]
    assert first["block_size"] == 16
    assert second["block_size"] is None
    assert first["session"] == second["session"] != third["session"]
    assert "alice" not in path.read_text()
    assert first["id"] == "r-1"
    assert writer.dropped == 0


def test_a_replay_reads_what_the_gateway_wrote(tmp_path, finished):
    path = tmp_path / "requests.jsonl"
    writer = RequestLogWriter(RequestLogFile(file=str(path)))
    for ago, hashes in ((10.0, [1, 2]), (8.0, [1, 3])):
        writer.write(Entry(finished(None, ago=ago, prompt_tokens=40), hashes, 16, b"s"))
    writer.stop()
    first, second = request_log(path).requests
    assert second.time - first.time == pytest.approx(2.0, abs=0.01)
    assert first.session == second.session
    assert [one == other for one, other in zip(first.blocks, second.blocks, strict=True)] == [True, False, False]


def test_a_full_file_is_set_aside_and_only_so_many_are_kept(tmp_path, finished):
    path = tmp_path / "requests.jsonl"
    writer = RequestLogWriter(RequestLogFile(file=str(path), rotate=4000, files=2))
    for number in range(40):
        writer.write(Entry(finished(None, request_id=b"%d" % number)))
    writer.stop()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "requests.jsonl",
        "requests.jsonl.1",
        "requests.jsonl.2",
    ]
    assert all(each.stat().st_size <= 4000 for each in tmp_path.iterdir())
    assert lines(path)[-1]["id"] == "39"


def test_a_disk_that_hangs_costs_lines_and_no_time(tmp_path, finished, monkeypatch):
    writer = RequestLogWriter(RequestLogFile(file=str(tmp_path / "requests.jsonl")))
    released = threading.Event()
    hanging = threading.Event()

    def hang(_record):
        hanging.set()
        released.wait(10)

    monkeypatch.setattr(writer._handler, "emit", hang)
    entry = Entry(finished(None))
    writer.write(entry)
    assert hanging.wait(5)
    for _ in range(QUEUE + 7):
        writer.write(entry)
    assert writer.dropped == 7
    monkeypatch.setattr(writer._handler, "emit", lambda _record: None)
    released.set()
    writer.stop(10)


def test_a_full_disk_costs_lines_and_nothing_else(finished):
    writer = RequestLogWriter(RequestLogFile(file="/dev/full", rotate=0))
    for _ in range(3):
        writer.write(Entry(finished(None)))
    writer.stop()
    assert writer.dropped == 3


def test_a_request_that_cannot_be_told_costs_its_own_line_only(tmp_path, finished):
    path = tmp_path / "requests.jsonl"
    writer = RequestLogWriter(RequestLogFile(file=str(path)))
    writer.write(Entry(finished(None, decisions=[object()])))
    writer.write(Entry(finished(None, request_id=b"good")))
    writer.stop()
    assert [line["id"] for line in lines(path)] == ["good"]
    assert writer.dropped == 1


def test_a_file_in_a_missing_folder_is_an_error_at_start(tmp_path):
    with pytest.raises(FileNotFoundError):
        RequestLogWriter.from_config(RequestLogFile(file=str(tmp_path / "missing" / "requests.jsonl")))
    assert RequestLogWriter.from_config(RequestLogFile()) is None
