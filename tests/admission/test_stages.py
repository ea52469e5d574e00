"""Which stage a request is of, when it is due, how urgent it is, which conversation it belongs to."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.stages import (
    DEADLINE_HEADER,
    PRIORITY_HEADER,
    SESSION_HEADER,
    STAGE_HEADER,
    Stages,
    asked_priority,
    deadline_of,
    session_of,
)
from gateway.config.load import loads
from gateway.config.problems import ConfigError
from gateway.config.schema import Stage, StageMatch
from gateway.errors import GatewayError

SECTIONS = {
    "planner": Stage(deadline=0.3, kind="completion", match=StageMatch(models=("plan",))),
    "shop": Stage(match=StageMatch(tenants=("shop",), headers={"X-Step": "answer"})),
    "batch": Stage(),
}


@pytest.fixture
def stages():
    return Stages(SECTIONS)


@pytest.mark.parametrize(
    ("model", "tenant", "headers", "found"),
    [
        ("plan", "", {}, "planner"),
        ("other", "shop", {"x-step": "answer"}, "shop"),
        ("other", "shop", {"x-step": "other"}, None),
        ("other", "shop", {}, None),
        ("other", "", {STAGE_HEADER: "batch"}, "batch"),
        ("plan", "", {STAGE_HEADER: "batch"}, "batch"),
        ("other", "", {}, None),
    ],
)
def test_a_stage_is_named_or_matched_by_all_that_it_asks_for(stages, model, tenant, headers, found):
    stage = stages.of(model, tenant, headers)
    assert (stage.name if stage else None) == found


def test_a_stage_that_does_not_exist_is_an_error_that_lists_those_that_do(stages):
    with pytest.raises(GatewayError, match="planner, shop, batch") as caught:
        stages.of("m", "", {STAGE_HEADER: "nosuch"})
    assert caught.value.status == 400


def test_without_stages_a_name_means_nothing():
    assert Stages({}).of("m", "", {STAGE_HEADER: "any"}) is None


def test_the_deadline_is_the_stages_or_the_requests_own(stages):
    planner = stages.by_name["planner"]
    assert deadline_of(planner, {}, 100.0) == pytest.approx(100.3)
    assert deadline_of(planner, {DEADLINE_HEADER: "50"}, 100.0) == pytest.approx(100.05)
    assert deadline_of(None, {DEADLINE_HEADER: "1e3"}, 100.0) == 101.0
    assert deadline_of(None, {}, 100.0) == deadline_of(stages.by_name["batch"], {}, 100.0) == inf


@given(text=st.text(max_size=12))
def test_any_text_is_a_deadline_in_the_future_or_an_error(text):
    try:
        due = deadline_of(None, {DEADLINE_HEADER: text}, 0.0)
    except GatewayError as error:
        assert error.status == 400  # noqa: PT017 - both ways are fine
    else:
        assert 0 < due <= 86_400


@pytest.mark.parametrize(
    ("headers", "body", "priority"),
    [
        ({}, {}, 0),
        ({}, {"priority": -3}, -3),
        ({PRIORITY_HEADER: "-4"}, {"priority": 7}, -4),
        ({}, {"priority": True}, 0),
        ({}, {"priority": "1"}, 0),
        ({}, {"priority": 1 << 40}, 0),
    ],
)
def test_the_header_field_goes_before_the_body(headers, body, priority):
    assert asked_priority(headers, body) == priority


@pytest.mark.parametrize("text", ["", "high", "1.5", "99999999999"])
def test_a_priority_that_is_no_integer_is_an_error(text):
    with pytest.raises(GatewayError):
        asked_priority({PRIORITY_HEADER: text}, {})


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({SESSION_HEADER: "a"}, {"prompt_cache_key": "b"}, "a"),
        ({}, {"metadata": {"session_id": "c"}, "prompt_cache_key": "b"}, "c"),
        ({}, {"metadata": {"session_id": 3}, "prompt_cache_key": "b"}, "b"),
        ({}, {"metadata": "x"}, ""),
        ({}, {}, ""),
    ],
)
def test_a_conversation_is_named_by_header_metadata_or_cache_key(headers, body, session):
    assert session_of(headers, body) == session


def test_what_was_learned_outlives_a_reload(stages):
    learned = stages.estimate("m", stages.by_name["planner"])
    again = Stages(SECTIONS, stages)
    assert again.estimate("m", again.by_name["planner"]) is learned
    assert again.estimate("m", None) is not learned


BASE = 'models: [{name: m, aliases: [alias], workers: [{url: "http://a:1"}, {url: "http://b", id: east}]}]\n'


def test_names_that_nobody_has_are_complained_about():
    text = BASE + (
        "stages:\n  a: {after: nosuch, workers: [a:1, east, west], match: {models: [m, x], tenants: [t], headers: {'b d': v}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        loads(text)
    for name in ("nosuch", '"west"', '"x"', '"t"', "header"):
        assert name in str(caught.value)
    assert len(caught.value.problems) == 5


def test_shares_that_add_up_to_more_than_all_are_complained_about():
    with pytest.raises(ConfigError, match="reserve more slots than there are"):
        loads(BASE + "stages: {a: {reserve: 0.6}, b: {reserve: 0.5}}\n")
    assert loads(BASE + "stages: {a: {reserve: 0.6}, b: {reserve: 0.4, after: a, workers: [east]}}\n")
