"""The command `warmroute check`, and that the example and the reference are right and complete."""

import argparse
import inspect
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gateway.cli import check
from gateway.config import reference, schema
from gateway.config.load import load, loads
from gateway.config.residency import HotPrefixRule, ResidencyRules, Retain
from gateway.config.schema import PROFILES, Config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "config.yaml"


@pytest.fixture
def run():
    parser = argparse.ArgumentParser()
    check.add_parser(parser.add_subparsers())

    def run(*arguments):
        parsed = parser.parse_args(["check", *arguments])
        return parsed.run(parsed)

    return run


def test_a_right_file_gets_a_table_and_status_0(run, capsys):
    assert run("--config", str(EXAMPLE)) == 0
    out, err = capsys.readouterr()
    assert "1 model, 4 workers" in out
    assert re.search(r"^sim +gpt-4o-mini, claude +ttft +4 +neuron$", out, re.MULTILINE)
    assert err == ""


def test_a_wrong_file_gets_all_problems_on_standard_error_and_status_2(run, capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("models: []\ngrace: x\n")
    assert run("--config", str(path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}:1:9: models: empty" in err
    assert f"{path}:2:8: grace: expected a duration" in err
    assert err.endswith(f"2 problems in {path}\n")


def test_the_printed_configuration_is_complete_loads_again_and_has_no_secrets(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "sk-12345678")
    path = tmp_path / "c.yaml"
    path.write_text('models: [{name: m, workers: [{url: http://a, api_key: "${KEY}"}]}]\n')
    assert run("--config", str(path), "--print") == 0
    out = capsys.readouterr().out
    assert "12345678" not in out
    assert "first_byte: 5m" in out
    assert loads(out).timeouts == schema.Timeouts()


def test_the_installed_command_checks_the_example():
    command = [sys.executable, "-c", "import sys; from gateway.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "check", "--config", "config.yaml"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_example_loads_strictly_and_shows_the_defaults():
    config = load(EXAMPLE, environ={})
    assert config == Config(models=config.models)
    assert [worker.url for worker in config.models[0].workers] == [
        f"http://127.0.0.1:{port}" for port in range(9001, 9005)
    ]
    assert {worker.driver for worker in config.models[0].workers} == {"neuron"}


def test_what_the_example_has_in_comments_is_right_too():
    text = EXAMPLE.read_text()
    text = text.replace("policies: {}\n", "policies:\n").replace("tenants: {}\n", "tenants:\n")
    text = text.replace("stages: {}\n", "stages:\n").replace("residency: null\n", "residency:\n")
    text = re.sub(r"^# ( sticky| mine|   )", r"\1", text.replace("\n#  ", "\n  "), flags=re.MULTILINE)
    text = re.sub(r"^( +)# ((?:-|  [a-z_]+:|    [a-z_]+:) ?.*)$", r"\1\2", text, flags=re.MULTILINE)
    text = re.sub(r"^    # (tokenizer|l2|admission|timeouts|retries|health):", r"    \1:", text, flags=re.MULTILINE)
    config = loads(text, environ={"EAST_API_KEY": "k", "LMCACHE_KEY": "l", "SHOP_KEY": "k" * 20, "SHOP_SALT": "s" * 8})
    east = config.models[0].workers[-1]
    assert (east.id, east.api_key, east.capabilities.slots) == ("east-1", "k", 8)
    assert config.models[0].timeouts == schema.Timeouts(first_byte=600.0)
    assert config.policies["sticky"].parameters == {"header": "x-session-id"}
    assert len(config.policies["mine"].scorers) == 2
    assert config.tenants["shop"].may_set == ("stage", "deadline")
    assert config.stages["generator"].after == "planner"
    assert config.models[0].admission == schema.Admission()
    assert config.models[0].l2 == schema.L2(
        url="http://10.0.0.2:9300", model="meta-llama/Llama-3.1-70B", world_size=8, chunk=256, api_key="l"
    )
    assert (east.hints.driver, east.hints.api_key, east.hints.priority) == ("auto", "l", 100)
    assert config.residency == schema.ResidencyConfig(rules=ResidencyRules(retain=Retain(), hot_prefix=HotPrefixRule()))


def structs():
    return [
        kind
        for _, kind in inspect.getmembers(schema, inspect.isclass)
        if issubclass(kind, schema.Struct) and kind is not schema.Struct
    ]


def test_the_example_names_every_key():
    text = EXAMPLE.read_text()
    missing = {
        name
        for kind in structs()
        for name in kind.__struct_fields__
        if not re.search(rf"\b{name}:", text) and name != "name"
    }
    assert missing == set()


def test_the_reference_is_what_the_schema_says():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == reference.rewrite(text), "run: python -m gateway.config.reference docs/configuration.md"


def test_the_reference_has_every_key_with_a_meaning():
    text = reference.reference()
    for kind in structs():
        for field in msgspec.structs.fields(kind):
            rows = re.findall(rf"^\| `{field.encode_name}` \| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
            assert rows, (kind, field.name)
            assert all(len(meaning) > 3 for _, _, meaning in rows)


def test_each_profile_of_the_schema_has_an_engine_in_the_simulator():
    from simulator.engine import PROFILES as ENGINES

    assert set(ENGINES) == set(PROFILES)
