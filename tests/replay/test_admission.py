"""Replays through the gateway's gate: who waits, who is refused, what never comes, and that nothing is lost."""

import json
import math

import pytest

from gateway.cli import main
from gateway.config.schema import Admission, Stage, WorkerLimits
from simulator.fleet import replay
from simulator.fleet.admission import AdmissionOptions
from simulator.fleet.result import Outcome


def admission(**fields):
    return AdmissionOptions(settings=Admission(prefill_ahead=1e9), **fields)


def test_what_does_not_fit_waits_in_the_gateway_and_all_is_answered(script, fleet):
    for _ in range(6):
        script.ask(0.0, [1], 10)
    result = replay(script.workload, fleet(workers=1, slots=2, admission=admission()), "leastload")
    assert list(result.requests.outcome) == [Outcome.COMPLETED] * 6
    assert max(max(sample) for sample in result.series.in_flight) <= 2


def test_the_more_urgent_stage_goes_first(script, fleet):
    script.ask(0.0, [1], 50)
    for stage in ("batch", "batch", "chat"):
        script.ask(0.1, [1], 50, stage=stage)
    stages = {"batch": Stage(priority=5), "chat": Stage()}
    result = replay(script.workload, fleet(workers=1, slots=1, admission=admission(stages=stages)), "leastload")
    ttft = result.requests.ttft
    assert ttft[3] < ttft[1] < ttft[2]


def test_what_would_be_late_is_refused_and_what_follows_it_never_comes(script, fleet):
    script.ask(0.0, range(20), 50, stage="plan")
    late = script.ask(0.0, range(30, 50), 50, stage="plan")
    script.ask(0.0, [1], 5, after=late)
    stages = {"plan": Stage(deadline=3.0)}
    result = replay(script.workload, fleet(workers=1, slots=4, admission=admission(stages=stages)), "ttft")
    out = result.requests
    assert list(out.outcome) == [Outcome.COMPLETED, Outcome.REFUSED, Outcome.NEVER_CAME]
    assert out.refused_after[1] < 0.02
    assert math.isnan(out.ttft[1])
    assert result.summary()["refused"] == 1


def test_without_admission_nobody_is_refused_and_all_waits_in_the_worker(script, fleet):
    for _ in range(6):
        script.ask(0.0, [1], 10)
    result = replay(script.workload, fleet(workers=1, slots=2), "leastload")
    assert max(max(sample) for sample in result.series.in_flight) == 6


def test_limits_and_tenants_count(script, fleet):
    for index in range(8):
        script.ask(0.0, [1], 20, tenant="flood" if index < 7 else "other")
    limits = {"w0": WorkerLimits(max_concurrent=1)}
    result = replay(script.workload, fleet(workers=1, slots=4, admission=admission(limits=limits)), "leastload")
    ttft = list(result.requests.ttft)
    assert sum(other < ttft[7] for other in ttft) <= 2
    assert max(max(sample) for sample in result.series.in_flight) == 1


def test_workers_may_differ(script, fleet):
    from dataclasses import replace

    options = fleet(workers=2)
    fast = replace(options.profile, prefill_rate=10_000.0)
    for _ in range(2):
        script.ask(0.0, range(10), 1)
    result = replay(script.workload, replace(options, others={"w1": fast}), "roundrobin")
    assert sorted(result.requests.ttft) == pytest.approx([0.1, 1.0], rel=0.2)
    with pytest.raises(ValueError, match="same size"):
        replace(options, others={"w1": replace(fast, block_size=7)})


def test_the_command_takes_stages_from_a_configuration(tmp_path, capsys):
    config, out = tmp_path / "c.yaml", tmp_path / "out.json"
    config.write_text(
        'models: [{name: m, admission: {max_requests: 5}, workers: [{url: "http://a:1"}]}]\n'
        "stages: {planner: {deadline: 50ms, kind: completion}}\n"
    )
    command = f"replay --generate rufus --limit 60 --speed 50 --policy leastload --workers 1 --config {config}"
    assert main([*command.split(), "--admission", "on", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["policies"]["leastload"]["refused"] > 0
    assert data["fleet"]["admission"]["stages"]["planner"]["kind"] == "completion"
    assert main(command.split()) == 0
    capsys.readouterr()
