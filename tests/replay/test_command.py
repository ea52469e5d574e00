"""``warmroute replay``: files in, a table, JSON and HTML out; mistakes end with status 2 and a remedy."""

import json

import pytest

from gateway.cli import main


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * index, "input_length": 2048, "output_length": 10, "hash_ids": [0, 1, 2, 10 + index]}
        for index in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_contracts_command_gives_the_contracts_json(trace, tmp_path, capsys):
    out = tmp_path / "out.json"
    command = f"replay {trace} --format mooncake --policy roundrobin --policy kvaware --workers 8 --block-tokens 512"
    command += (
        f" --kv-tokens 1228800 --prefill-rate 8000 --overhead-ms 30 --itl-ms 20 --speed 1.0 --seed 0 --json {out}"
    )
    assert main(command.split()) == 0
    data = json.loads(out.read_text())
    assert list(data["policies"]) == ["roundrobin", "kvaware"]
    figures = data["policies"]["kvaware"]
    assert figures["requests"] == 20
    assert figures["refused"] == 0
    assert figures["hit_rate"] == pytest.approx(19 * 3 / 80)
    assert figures["ttft_p50_s"] == pytest.approx(0.03 + 512 / 8000)
    assert figures["wall_s"] > 0
    assert data["fleet"]["profile"]["kv_blocks"] == 2400
    assert data["workload"]["requests"] == 20
    table = capsys.readouterr().out
    assert "roundrobin" in table
    assert "0.713" in table


def test_a_report_is_written_for_people(trace, tmp_path):
    out = tmp_path / "out.html"
    command = f"replay {trace} --format mooncake --policy roundrobin --policy kvaware --workers 2 --jobs 1 --html {out}"
    assert main(command.split()) == 0
    page = out.read_text()
    assert "kvaware" in page
    assert "<svg" in page


def test_a_profile_is_taken_and_its_numbers_replaced(trace, tmp_path):
    out = tmp_path / "out.json"
    command = f"replay {trace} --format mooncake --policy leastload --profile trn2-70b --workers 2 --prefill-rate 5000"
    assert main([*command.split(), "--json", str(out)]) == 0
    profile = json.loads(out.read_text())["fleet"]["profile"]
    assert (profile["name"], profile["segment_size"], profile["prefill_rate"]) == ("trn2-70b", 1024, 5000)


def test_tiers_show_up_in_the_hits(trace, tmp_path):
    out = tmp_path / "out.json"
    command = f"replay {trace} --format mooncake --policy roundrobin --workers 2 --tier l2=100000:40 --tier l1=10000:60"
    assert main([*command.split(), "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["policies"]["roundrobin"]["hit_rate_l2"] > 0
    assert data["fleet"]["profile"]["l1_bandwidth"] == 60e9


def test_traffic_can_be_made_up(tmp_path):
    out = tmp_path / "out.json"
    command = "replay --generate unique --limit 30 --policy roundrobin --profile h100x2-32b --jobs 1"
    assert main([*command.split(), "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["workload"]["requests"] == 30
    assert data["policies"]["roundrobin"]["hit_rate"] == 0


def test_policies_of_ones_own_come_from_a_configuration(trace, tmp_path, capsys):
    config = tmp_path / "warmroute.yaml"
    config.write_text(
        "policies:\n  mine:\n    scorers: [{type: uncached-tokens}]\n"
        "models: [{name: m, policy: mine, workers: [{url: 'http://localhost:1'}]}]\n"
    )
    assert main(["replay", str(trace), "--format", "mooncake", "--config", str(config), "--policy", "mine"]) == 0
    assert "mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("replay", "--generate"),
        ("replay nowhere.jsonl --format mooncake", "nowhere.jsonl"),
        ("replay {trace}", "--format"),
        ("replay {trace} --format mooncke", "mooncake"),
        ("replay {trace} --format mooncake --generate chat", "not both"),
        ("replay {trace} --format mooncake --policy kvawere", "kvaware"),
        ("replay {trace} --format mooncake --profile trn3", "trn2-70b"),
        ("replay {trace} --format mooncake --block-tokens 500", "neither divide"),
        ("replay {trace} --format mooncake --kv-tokens 100", "less than one block"),
        ("replay {trace} --format mooncake --set nonsense=1", "nonsense"),
        ("replay {trace} --format mooncake --config nowhere.yaml", "nowhere.yaml"),
        ("replay {trace} --format mooncake --json {trace}/x", "can't write"),
    ],
)
def test_mistakes_name_their_remedy(trace, capsys, command, complaint):
    assert main(command.format(trace=trace).split()) == 2
    assert complaint in capsys.readouterr().err


def test_a_broken_file_is_named_with_its_line(trace, capsys):
    trace.write_text(trace.read_text() + "{nonsense\n")
    assert main(["replay", str(trace), "--format", "mooncake"]) == 2
    assert f"{trace}:21:" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tier l3=5:5", "--tier l1=5", "--speed 0", "--workers 0", "--event-loss 2"])
def test_options_out_of_bounds_are_refused(trace, option):
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(trace), "--format", "mooncake", *option.split()])
    assert ended.value.code == 2


def test_progress_is_shown_on_a_terminal_only_and_taken_away(trace, capsys, monkeypatch):
    command = ["replay", str(trace), "--format", "mooncake", "--policy", "roundrobin", "--jobs", "1"]
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(command) == 0
    shown = capsys.readouterr().err
    assert "20 of 20 requests" in shown
    assert shown.endswith("\r\x1b[K")
