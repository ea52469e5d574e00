"""Replays with residency: hints change what engines keep and fetch, their fates add up, and without them nothing is different."""

import json

import pytest

from backends.hints.model import Action
from gateway.cli import main
from gateway.config.residency import ResidencyBudget, ResidencyConfig, ResidencyRules
from gateway.config.schema import Admission, Stage
from gateway.residency.rules.base import Rule
from simulator.fleet import replay
from simulator.fleet.admission import AdmissionOptions

NOTHING = dict.fromkeys(ResidencyRules.__struct_fields__, False)


def only(**rules):
    return ResidencyConfig(rules=ResidencyRules(**NOTHING | rules))


def course(result):
    """Where each request went, and how long it took."""
    return list(result.requests.worker), list(result.requests.ttft), list(result.requests.e2e)


def conversation(script, session, first, turns, *, at, gap=10.0, blocks=20):
    """Turns of one conversation, `gap` seconds apart, each one block longer than the one before."""
    for turn in range(turns):
        content = range(first, first + blocks + turn)
        script.ask(at + gap * turn, content, 2, session=session)


@pytest.fixture
def crowded(script):
    """Conversations that come back, and between their turns strangers that never do: more than a device holds."""
    for index in range(3):
        conversation(script, f"live {index}", 1000 * index, 12, at=3.0 * index)
    for index in range(60):
        script.ask(1.0 + 2.0 * index, range(100_000 + 100 * index, 100_000 + 100 * index + 19), 1)
    return script.workload


class KeepLive(Rule):
    """A rule that knows which conversations come back."""

    name = "keep-live"

    def sent(self, into, asked, worker, match):
        if asked.subject.session.startswith("live") or match.tokens:
            self.context.voice.say(
                into,
                self.name,
                Action.RETAIN,
                worker.id,
                asked.subject,
                asked.now,
                stop=asked.subject.tokens,
                priority=90,
                ttl=60.0,
                session=asked.session,
            )


@pytest.fixture
def keeping(monkeypatch):
    """That rule in place of all others."""
    monkeypatch.setattr("gateway.residency.residency.RULES", (lambda context, _: KeepLive(context),))
    return ResidencyConfig()


def test_conversations_are_kept_between_their_turns_though_lru_would_have_let_them_go(crowded, fleet, keeping):
    plain = replay(crowded, fleet(workers=1, kv_blocks=110), "ttft")
    kept = replay(crowded, fleet(workers=1, kv_blocks=110, residency=keeping), "ttft")
    assert kept.summary()["hit_rate"] > plain.summary()["hit_rate"] + 0.1
    assert kept.hints["keep-live"]["accepted"] == kept.hints["keep-live"]["offered"] == 36
    assert kept.hints["keep-live"]["useful"] > 25


def test_without_a_rule_that_is_on_a_replay_is_the_same_as_without_residency(crowded, fleet):
    plain = replay(crowded, fleet(workers=2), "ttft")
    silent = replay(crowded, fleet(workers=2, residency=only()), "ttft")
    assert course(silent) == course(plain)
    assert plain.hints is None
    assert silent.hints == {}


TIERS = {
    "kv_blocks": 60,
    "l1_blocks": 1000,
    "l1_bandwidth": 100 * 131_072 * 40.0,
    "l1_latency": 0.0,
    "prefill_rate": 1000.0,
}
"""40 blocks a second from l1: four times as fast as computing them."""


@pytest.fixture
def queue(script):
    """A conversation whose prompt has gone to l1, then a long stranger, and behind that the conversation's next turn."""
    conversation(script, "a", 0, 1, at=0.0, blocks=40)
    script.ask(10.0, range(5000, 5050), 1)
    script.ask(20.0, range(7000, 7030), 1)
    script.ask(20.1, range(42), 2, session="a")
    return script.workload


def test_what_waits_at_a_worker_is_fetched_from_l1_meanwhile(queue, fleet):
    fetching = ResidencyConfig(
        rules=ResidencyRules(**NOTHING | {"queued_next": True}), budget=ResidencyBudget(bandwidth_share=1.0)
    )
    plain = replay(queue, fleet(workers=1, **TIERS), "ttft")
    fetched = replay(queue, fleet(workers=1, **TIERS, residency=fetching), "ttft")
    assert plain.requests.l1[-1] == 4000
    assert plain.requests.device[-1] == 0
    # The stranger holds half the device: what there is room for has come, the rest is loaded as before.
    assert fetched.requests.device[-1] >= 2000
    assert fetched.requests.ttft[-1] < plain.requests.ttft[-1] - 0.4
    row = fetched.hints["queued-next"]
    assert (row["offered"], row["accepted"], row["useful"]) == (1, 1, 1)


def test_what_waits_in_the_gateway_is_fetched_meanwhile(queue, fleet):
    line = AdmissionOptions(settings=Admission(prefill_ahead=1e9))
    options = {"workers": 1, "slots": 1, "admission": line, **TIERS}
    plain = replay(queue, fleet(**options), "ttft")
    fetched = replay(queue, fleet(**options, residency=only(queued_next=True)), "ttft")
    assert fetched.requests.device[-1] > plain.requests.device[-1]
    assert fetched.requests.ttft[-1] < plain.requests.ttft[-1]


def test_what_is_over_budget_is_skipped(queue, fleet):
    poor = ResidencyConfig(
        rules=ResidencyRules(**NOTHING | {"queued_next": True}), budget=ResidencyBudget(bandwidth_share=0.0)
    )
    plain = replay(queue, fleet(workers=1, **TIERS), "ttft")
    result = replay(queue, fleet(workers=1, **TIERS, residency=poor), "ttft")
    assert result.hints["queued-next"]["skipped"] == 1
    assert course(result) == course(plain)


def test_a_policy_that_looks_at_no_prompts_has_no_hints(queue, fleet):
    assert replay(queue, fleet(workers=1, residency=only(retain=True)), "roundrobin").hints is None


def test_every_hint_that_was_offered_has_ended_or_is_waited_for(crowded, fleet):
    result = replay(crowded, fleet(workers=2, kv_blocks=110, residency=ResidencyConfig()), "ttft")
    for row in result.hints.values():
        ended = sum(row.get(fate, 0) for fate in ("skipped", "refused", "failed", "useful", "wasted"))
        assert 0 <= ended <= row.get("offered", 0)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * index, "input_length": 2048, "output_length": 10, "hash_ids": [0, 1, 2, 10 + index]}
        for index in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.usefixtures("keeping")
def test_the_command_tells_the_hints_fates_in_its_table_json_and_report(trace, tmp_path, capsys):
    command = f"replay {trace} --format mooncake --policy ttft --workers 2 --jobs 1 --hints on"
    assert main([*command.split(), "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]) == 0
    row = json.loads((tmp_path / "a.json").read_text())["policies"]["ttft"]["hints"]["keep-live"]
    assert row["offered"] > 10
    assert f"hints of keep-live: {row['offered']} offered" in capsys.readouterr().out
    page = (tmp_path / "a.html").read_text()
    assert "<h2>Hints</h2>" in page
    assert "ttft: keep-live" in page


def test_the_command_takes_names_of_rules_and_a_configurations_numbers(trace, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "residency: {rules: {retain: {min_tokens: 100000}}}\nmodels: [{name: m, workers: [{url: http://localhost:1}]}]\n"
    )
    out = tmp_path / "a.json"
    command = f"replay {trace} --format mooncake --policy ttft --workers 2 --json {out} --hints retain,queued-next"
    assert main(command.split()) == 0
    assert list(json.loads(out.read_text())["policies"]["ttft"]["hints"]) == ["queued-next", "retain"]
    assert main([*command.split(), "--config", str(config)]) == 0
    assert json.loads(out.read_text())["policies"]["ttft"]["hints"]["retain"] == {}


def test_an_unknown_rule_is_refused_with_those_that_there_are(trace, capsys):
    assert main(["replay", str(trace), "--format", "mooncake", "--hints", "retian"]) == 2
    error = capsys.readouterr().err
    assert "retian" in error
    assert "queued-next" in error


def test_what_a_following_stage_will_need_is_fetched_when_its_slot_is_reserved(script, fleet):
    script.ask(0.0, range(100, 140), 2, session="a", stage="generator")
    script.ask(10.0, range(5000, 5050), 1)
    script.ask(20.0, range(3), 200, session="a", stage="planner")
    script.ask(23.0, range(100, 142), 2, session="a", stage="generator")
    stages = {"planner": Stage(), "generator": Stage(after="planner", hold=10.0)}
    line = AdmissionOptions(settings=Admission(prefill_ahead=1e9), stages=stages)
    options = {"workers": 1, "slots": 4, "admission": line, **TIERS}
    plain = replay(script.workload, fleet(**options), "ttft")
    fetched = replay(script.workload, fleet(**options, residency=only(planner=True)), "ttft")
    assert plain.requests.device[-1] < 1000
    assert fetched.requests.device[-1] >= 3500
    assert fetched.hints["planner"]["useful"] == 1
