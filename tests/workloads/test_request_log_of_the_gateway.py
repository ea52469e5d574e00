"""What the gateway writes is what the replay reads."""

from gateway.telemetry.record import RequestRecord
from gateway.telemetry.request_log import Entry
from simulator.workloads import load


def record(request_id, start, prompt_tokens, **changes):
    known = {
        "request_id": request_id,
        "trace": None,
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "qwen",
        "policy": "ttft",
        "stream": True,
        "start": start,
        "read": start,
        "tokenized": start,
        "queued": 0.0,
        "first_byte": start + 0.5,
        "end": start + 2,
        "prompt_tokens": prompt_tokens,
        "how": None,
        "why": "",
        "prompt_seconds": 0.0,
        "off_loop": False,
        "decisions": [],
        "attempts": [],
        "gaps": None,
        "usage": None,
        "bytes_in": 10,
        "bytes_out": 20,
        "status": 200,
        "outcome": "completed",
        "error_type": None,
        "error_message": None,
        "stage": "planner",
    }
    return RequestRecord(**{**known, **changes})


def test_lines_of_the_gateway_are_read_with_lengths_prefixes_and_sessions(tmp_path):
    entries = [
        Entry(record(b"two", 105.0, 40), (11, 13), 16, b"alice"),
        Entry(record(b"one", 100.0, 36), (11, 12), 16, b"alice"),
        Entry(record(b"short", 106.0, 5), (), 0, None),
    ]
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(entry.line() for entry in entries) + b"\n")
    workload = load(path, "warmroute")
    one, two, short = workload.requests
    assert [round(request.time, 3) for request in workload.requests] == [0.0, 5.0, 6.0]
    assert (one.id, one.prompt_tokens, one.stage, two.id) == ("one", 36, "planner", "two")
    assert one.session == two.session != short.session
    assert one.blocks[0] == two.blocks[0]
    assert len({*one.blocks, *two.blocks, *short.blocks}) == 3 + 3 + 1 - 1
