"""Recordings are read as they are, and errors say where and what."""

import gzip
import json
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workloads import FORMATS, WorkloadError, load

FIXTURES = Path(__file__).parent / "fixtures"


def sessions(name="weka_ranges.jsonl"):
    return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]


def whole(**options):
    return {"begin": 0, "end": 0, "sessions": 0, "max_prompt_tokens": 0, "spread": 0, **options}


def contents(workload):
    return [(request.id, request.prompt_tokens, list(request.blocks)) for request in workload.requests]


def test_mooncake_requests_have_the_ids_and_lengths_of_the_file():
    lines = [json.loads(line) for line in (FIXTURES / "mooncake_synthetic.jsonl").read_text().splitlines()]
    workload = load(FIXTURES / "mooncake_synthetic.jsonl", "mooncake")
    assert workload.block_tokens == 512
    assert [list(request.blocks) for request in workload.requests] == [line["hash_ids"] for line in lines]
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.requests] == [
        (line["input_length"], line["output_length"]) for line in lines
    ]
    assert [request.time for request in workload.requests] == [line["timestamp"] / 1000 for line in lines]


def test_mooncake_arrivals_recorded_in_steps_are_spread_inside_them():
    lines = [json.loads(line) for line in (FIXTURES / "mooncake_conversation.jsonl").read_text().splitlines()]
    stamps = sorted({line["timestamp"] / 1000 for line in lines})
    workload = load(FIXTURES / "mooncake_conversation.jsonl", "mooncake", seed=3)
    times = [request.time for request in workload.requests]
    assert len(set(times)) == len(times) > len(stamps)
    assert times == sorted(times)
    kept = load(FIXTURES / "mooncake_conversation.jsonl", "mooncake", spread="0")
    assert sorted({request.time for request in kept.requests}) == stamps
    as_recorded = {tuple(line["hash_ids"]): line["timestamp"] / 1000 for line in lines}
    for request in workload.requests:
        assert 0 <= request.time - as_recorded[tuple(request.blocks)] < 3


def test_equal_seeds_make_equal_arrivals_and_others_make_others():
    first, again, other = (load(FIXTURES / "mooncake_conversation.jsonl", "mooncake", seed=s) for s in (1, 1, 2))
    assert first == again
    assert [r.time for r in first.requests] != [r.time for r in other.requests]


def test_a_gzip_file_is_read_like_a_plain_one(tmp_path):
    plain = FIXTURES / "mooncake_synthetic.jsonl"
    zipped = tmp_path / "mooncake_synthetic.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert load(zipped, "mooncake") == load(plain, "mooncake")


def test_weka_originals_and_range_coded_sessions_are_the_same(tmp_path):
    coded = tmp_path / "trace_original.json"
    coded.write_text(json.dumps(sessions()[-1]))
    assert contents(load(FIXTURES / "trace_original.json", "weka", **whole())) == contents(
        load(coded, "weka", **whole())
    )


def test_weka_reads_a_folder_of_originals_indented_or_not(tmp_path):
    original = FIXTURES / "trace_original.json"
    shutil.copy(original, tmp_path / "a.json")
    second = {**json.loads(original.read_text()), "id": "other"}
    (tmp_path / "b.json").write_text(json.dumps(second, indent=2))
    workload = load(tmp_path, "weka", **whole())
    alone = load(original, "weka", **whole())
    assert len(workload.requests) == 2 * len(alone.requests)
    ids = [set(r.blocks) for r in workload.requests]
    ones = [ids[i] for i, r in enumerate(workload.requests) if r.session == "other"]
    others = [ids[i] for i, r in enumerate(workload.requests) if r.session != "other"]
    assert set().union(*ones).isdisjoint(set().union(*others))


def test_weka_prompts_of_a_session_share_what_the_file_says_and_their_short_ends_nothing():
    session = sessions()[-1]
    workload = load(FIXTURES / "weka_ranges.jsonl", "weka", **whole())
    requests = {request.id: request for request in workload.requests}
    turns = [(i, turn) for i, turn in enumerate(session["requests"]) if "in" in turn]
    ends = []
    for (one, before), (two, after) in pairwise(turns):
        first = [x for a, b in before["hash_ranges"] for x in range(a, b + 1)]
        second = [x for a, b in after["hash_ranges"] for x in range(a, b + 1)]
        shared = next(
            (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
        )
        blocks = list(requests[f"{session['id']}#{one}"].blocks), list(requests[f"{session['id']}#{two}"].blocks)
        assert blocks[0][:shared] == blocks[1][:shared]
        assert blocks[0][shared : shared + 1] != blocks[1][shared : shared + 1]
        ends.append(blocks[0][-1])
    assert len(set(ends)) == len(ends)


def test_weka_closed_loop_waits_the_thinking_time_after_the_turn_before():
    session = sessions()[-1]
    workload = load(FIXTURES / "weka_ranges.jsonl", "weka", **whole(loop="closed"))
    requests = {request.id: request for request in workload.requests}
    for position, turn in enumerate(session["requests"][1:], start=1):
        request = requests[f"{session['id']}#{position}"]
        assert request.after == f"{session['id']}#{position - 1}"
        if turn.get("think_time"):
            assert request.delay == turn["think_time"]
    opened = load(FIXTURES / "weka_ranges.jsonl", "weka", **whole(loop="open"))
    assert all(request.after is None for request in opened.requests)
    times = {request.id: request.time for request in opened.requests}
    assert [times[f"{session['id']}#{i}"] for i in range(len(session["requests"]))] == [
        turn["t"] for turn in session["requests"]
    ]


def test_weka_sub_agents_run_beside_each_other_and_are_waited_for():
    workload = load(FIXTURES / "weka_ranges.jsonl", "weka", **whole())
    session = sessions()[0]
    agents = [i for i, turn in enumerate(session["requests"]) if turn["type"] == "subagent"]
    first = agents[0]
    requests = {request.id: request for request in workload.requests}
    parent = requests[f"{session['id']}#{first - 1}"]
    starts = [requests[f"{session['id']}/{session['requests'][i]['agent_id']}#0"] for i in agents[:3]]
    assert {request.after for request in starts} == {parent.id}
    assert all(request.session.startswith(f"{session['id']}/") for request in starts)
    latest = max(agents[:3], key=lambda i: session["requests"][i]["t"])
    agent = session["requests"][latest]
    joined = requests[f"{session['id']}#{agents[2] + 1}"]
    assert joined.after == f"{session['id']}/{agent['agent_id']}#{len(agent['requests']) - 1}"
    assert joined.delay == pytest.approx(session["requests"][agents[2] + 1]["t"] - agent["t"])


def test_weka_keeps_only_what_lies_in_the_slice():
    workload = load(FIXTURES / "weka_ranges.jsonl", "weka", **whole(loop="open", begin=100, end=200))
    recorded = {turn["t"] for session in sessions() for turn in session["requests"] if "in" in turn}
    mains = [request for request in workload.requests if "/" not in request.session]
    assert mains
    assert {request.time + 100 for request in mains} == {t for t in recorded if 100 <= t < 200}
    closed = load(FIXTURES / "weka_ranges.jsonl", "weka", **whole(loop="closed", begin=100, end=200))
    assert {request.id for request in closed.requests} == {request.id for request in workload.requests}


def test_weka_leaves_out_too_long_prompts_and_says_so():
    workload = load(FIXTURES / "weka_ranges.jsonl", "weka", **whole(max_prompt_tokens=20_000))
    assert max(request.prompt_tokens for request in workload.requests) <= 20_000
    assert "too long" in workload.notes[0]


def test_azure_times_count_from_the_first_request():
    workload = load(FIXTURES / "azure_conv.csv", "azure")
    first, second = workload.requests[:2]
    assert (first.time, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.time == pytest.approx(4.314579, abs=1e-6)
    assert len({block for r in workload.requests for block in r.blocks}) == sum(
        len(r.blocks) for r in workload.requests
    )


def test_vidur_takes_recorded_arrivals_or_a_rate():
    assert load(FIXTURES / "vidur_code.csv", "vidur").requests[1].time == pytest.approx(0.052)
    with pytest.raises(WorkloadError, match=r"vidur_arxiv\.csv:2: .*rate"):
        load(FIXTURES / "vidur_arxiv.csv", "vidur")
    rated = load(FIXTURES / "vidur_arxiv.csv", "vidur", rate=1000)
    assert 0 < rated.requests[-1].time < 1
    assert rated.requests[0].prompt_tokens == 3772


def log_line(**changes):
    return {
        "id": "a",
        "time": 1000.0,
        "model": "qwen",
        "stage": None,
        "session": "s1",
        "prompt": {"tokens": 40},
        "actual": {"prompt_tokens": 40, "output_tokens": 7},
        "prefix": ["00ff", "aa01"],
        "block_size": 16,
        "outcome": "completed",
        **changes,
    }


def written(tmp_path, *lines):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_a_request_log_is_replayed_in_the_order_of_arrival(tmp_path):
    path = written(
        tmp_path,
        log_line(id="b", time=1002.5, prefix=["00ff", "bb02"]),
        log_line(id="a"),
        log_line(
            id="c",
            time=1003.0,
            prompt={"tokens": None},
            actual={"prompt_tokens": 20, "output_tokens": None},
            prefix=None,
        ),
        log_line(id="d", time=1004.0, prompt={"tokens": None}, actual=None),
    )
    workload = load(path, "warmroute")
    first, second, third = workload.requests
    assert [(r.id, r.time) for r in workload.requests] == [("a", 0.0), ("b", 2.5), ("c", 3.0)]
    assert workload.block_tokens == 16
    assert first.blocks[0] == second.blocks[0]
    assert set(first.blocks[1:]).isdisjoint(second.blocks[1:])
    assert len(first.blocks) == 3
    assert (third.prompt_tokens, third.output_tokens, len(third.blocks)) == (20, 7, 2)
    assert first.session == second.session
    assert third.session == first.session
    assert "1 requests had no known prompt length" in workload.notes[0]


def test_hashes_and_sessions_of_two_runs_of_the_gateway_have_nothing_in_common(tmp_path):
    path = written(tmp_path, log_line(process="p1"), log_line(id="b", process="p1"), log_line(id="c", process="p2"))
    one, same, other = load(path, "warmroute").requests
    assert list(one.blocks[:2]) == list(same.blocks[:2])
    assert set(one.blocks).isdisjoint(other.blocks)
    assert one.session == same.session != other.session


def test_a_request_log_of_two_block_sizes_is_refused(tmp_path):
    path = written(tmp_path, log_line(), log_line(id="b", block_size=32))
    with pytest.raises(WorkloadError, match=r"requests\.jsonl:2: block_size 32 after 16"):
        load(path, "warmroute")


def test_one_model_of_a_request_log_can_be_chosen(tmp_path):
    path = written(tmp_path, log_line(), log_line(id="b", model="other", block_size=32))
    chosen = load(path, "warmroute", model="other", one_model=False)
    assert [(r.id, r.model, chosen.block_tokens) for r in chosen.requests] == [("b", "other", 32)]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1}', r":1: .*`hash_ids`.*hash_ids"),
        ("mooncake", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', r":1: 1 hash_ids"),
        ("mooncake", '\n{"timestamp": 0, "inp', r":2: .*A line is"),
        ("mooncake", '{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', r":1: timestamp"),
        ("mooncake", "", r"no request is left"),
        ("weka", '{"id": "x", "requests": [{"t": 0, "in": 64, "out": 1}]}', r":1: session x: request 0: neither"),
        ("weka", '{"id": "x", "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": []}]}', r":1: session x: request 0: 0 blocks"),
        ("weka", '{"id": "x", "requests": [{"t": 0, "in": 64, "out": 1, "hash_ranges": [[0, 1e30]]}]}', r":1: .*hash_ranges"),
        ("weka", '{"id": "x", "requests": [{"t": 0, "in": 64, "out": 1, "hash_ranges": [[5, 4294967296]]}]}', r":1: .*a hash id is not between"),
        ("weka", '{"id": "x", "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [-1]}]}', r":1: .*a hash id is not between"),
        ("weka", '{"id": "x", "requests": ' + '[{"t": 0, "requests": ' * 5000 + "[]" + "}]" * 5000 + "}", r":1: .*recursion"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1e300,1\n", r":2: .*whole number up to"),
        ("warmroute", '{"time": 1, "prompt": {"tokens": 9999999999999999999}}', r":1: a prompt of 9+ tokens"),
        ("weka", '{"requests": []}', r":1: .*`id`.*A session is"),
        ("azure", "TIME,ContextTokens\n", r":1: the header has no TIMESTAMP, GeneratedTokens; the columns"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", r":2: TIMESTAMP is 'yesterday'; a time like"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,x,1\n", r":2: ContextTokens is 'x'; a number"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,5\n", r":2: 2 cells"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1.5,1\n", r":2: .*whole number"),
        ("warmroute", '{"id": 3, "time": 1}', r":1: .*`\$\.id`"),
        ("warmroute", '{"time": 1, "prompt": {"tokens": 5}, "prefix": ["a"]}', r":1: .*block_size None"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_with_file_and_line(tmp_path, kind, text, message):
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=rf"^{path}.*{message}"):
        load(path, kind, **({"begin": 0} if kind == "weka" else {}))


def test_a_missing_file_and_a_broken_gzip_are_errors_of_the_workload(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        load(tmp_path / "none", "mooncake")
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(WorkloadError, match="cannot be read"):
        load(broken, "mooncake")


def test_unknown_formats_and_options_name_the_known_ones():
    with pytest.raises(WorkloadError, match="unknown format 'mooncat'; there are azure, mooncake"):
        load("x", "mooncat")
    with pytest.raises(WorkloadError, match="mooncake has no 'speed'; there are block_tokens, spread"):
        load(FIXTURES / "mooncake_synthetic.jsonl", "mooncake", speed=2)
    with pytest.raises(WorkloadError, match="spread is 'far'; a number is accepted"):
        load(FIXTURES / "mooncake_synthetic.jsonl", "mooncake", spread="far")
    with pytest.raises(WorkloadError, match="recorded, open, closed are accepted"):
        load(FIXTURES / "weka_ranges.jsonl", "weka", loop="round")


_NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))
_VALUES = st.recursive(_NUMBERS, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
_NAMES = ["timestamp", "input_length", "output_length", "hash_ids", "id", "requests", "t", "in", "out", "hash_ranges", "block_size",
          "time", "prompt", "tokens", "actual", "prefix", "session", "think_time"]  # fmt: skip
_LINES = st.dictionaries(
    st.sampled_from(_NAMES),
    st.one_of(_VALUES, st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=6)),
    max_size=10,
)


@given(st.sampled_from(sorted(FORMATS)), st.one_of(st.binary(max_size=60), st.lists(_LINES, max_size=3)))
def test_whatever_stands_in_a_file_is_a_workload_or_an_error_of_it(kind, content):
    raw = content if isinstance(content, bytes) else b"\n".join(json.dumps(line).encode() for line in content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(raw)
        try:
            workload = load(path, kind, **({"begin": 0, "end": 0} if kind == "weka" else {}))
        except WorkloadError as error:
            workload, problem = None, str(error)
        assert workload.requests if workload else problem.startswith(str(path))
