import json
from pathlib import Path

import pytest

from gateway.prompt.prompt import How
from gateway.prompt.prompter import Prompter

CASES = [json.loads(line) for line in (Path(__file__).parent / "fixtures/qwen3_parity.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def prompter(qwen3):
    return Prompter(qwen3)


def test_there_are_52_cases():
    assert len(CASES) == 52


@pytest.mark.parametrize("case", CASES, ids=[f"{case['path']} {case['case']}" for case in CASES])
def test_the_ids_are_those_that_the_engine_made(prompter, case):
    before = json.dumps(case["request"])
    prompt = prompter.now(case["path"], case["request"])
    assert prompt.how is How.EXACT, prompt.reason
    ids = [one.ids.tolist() for one in (prompt, *prompt.also)]
    wanted = case["token_ids"]
    assert ids == (wanted if isinstance(wanted[0], list) else [wanted])
    assert prompt.token_count == len(ids[0])
    assert json.loads(prompt.json) == ids[0]
    assert json.dumps(case["request"]) == before, "the body must not be changed"


def test_the_recorded_engine_has_the_template_of_the_fixture(qwen3):
    template = qwen3.templates.select(None)
    assert (template.content_format, template.knows_developer, template.reads_clock) == ("string", False, False)
    assert qwen3.special_tokens["eos_token"] == "<|im_end|>"
    assert qwen3.splitter is not None
