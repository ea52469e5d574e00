"""The two ways to say hints inside a request: what they put into its body."""

import copy
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.hints.kv_hints import MAX_ACTIONS, KvHintsDriver
from backends.hints.kv_transfer_params import KvTransferParamsDriver
from backends.hints.model import Action
from backends.hints.ranges import directives
from gateway.http.splice import with_member


def actions_of(fields):
    return {action["action_type"]: action["payload"] for action in fields["kv_hints"]["actions"]}


def test_a_retain_hint_is_an_envelope_of_protocol_0_1_with_both_actions(make_hint, make_subject):
    hint = make_hint("retain", about=make_subject(100, session="s1"), priority=80, ttl=30.0)
    envelope = KvHintsDriver().fields([hint], {})["kv_hints"]
    assert envelope["protocol_version"] == "0.1"
    assert envelope["message_id"]
    assert [(a["action_type"], a["action_version"]) for a in envelope["actions"]] == [
        ("kv.retain", "1.0"),
        ("vllm.set_priority", "1.0"),
    ]
    retain, priority = (action["payload"] for action in envelope["actions"])
    assert retain == {"scope": "s1", "directives": [{"start": 0, "end": 100, "priority": 80, "duration": 30.0}]}
    assert priority == {
        "target": "request_cached",
        "location": "local_g1",
        "claim_id": "warmroute/s1",
        "revision": hint.id,
        "value": 30,
        "ttl_seconds": 30.0,
    }


def test_a_later_hint_about_the_same_session_is_a_later_revision_of_the_same_claim(make_hint, make_subject):
    about = make_subject(session="s1")
    first, second = (
        actions_of(KvHintsDriver().fields([make_hint("retain", about=about, priority=90)], {}))["vllm.set_priority"]
        for _ in range(2)
    )
    assert first["claim_id"] == second["claim_id"]
    assert first["revision"] < second["revision"]


def test_a_demoted_prompt_goes_before_those_of_which_nothing_was_said(make_hint):
    payloads = actions_of(KvHintsDriver().fields([make_hint("demote")], {}))
    assert payloads["kv.retain"]["directives"] == [{"start": 0, "end": 100, "priority": 0}]
    assert payloads["vllm.set_priority"]["value"] < 0


def test_one_number_for_the_whole_prompt_is_never_more_than_its_least_kept_part(make_hint, make_subject):
    about = make_subject(2000)
    hints = [
        make_hint("retain", about=about, stop=1000, priority=90),
        make_hint("demote", about=about, start=1000),
    ]
    assert actions_of(KvHintsDriver().fields(hints, {}))["vllm.set_priority"]["value"] == -50
    (only_head,) = KvHintsDriver().fields(hints[:1], {})["kv_hints"]["actions"]
    assert only_head["action_type"] == "kv.retain"


def test_the_clients_own_actions_stay_and_ours_come_behind_them(make_hint):
    theirs = {
        "protocol_version": "0.1",
        "message_id": "mine",
        "actions": [{"action_id": "a", "action_type": "x.y", "action_version": "9", "payload": {"deep": [1]}}],
        "extra": 1,
    }
    before = copy.deepcopy(theirs)
    merged = KvHintsDriver().fields([make_hint("retain", priority=70)], {"kv_hints": theirs})["kv_hints"]
    assert theirs == before
    assert merged["message_id"] == "mine"
    assert merged["extra"] == 1
    assert merged["actions"][0] == before["actions"][0]
    assert len(merged["actions"]) == 3


@pytest.mark.parametrize(
    "theirs",
    [
        "text",
        7,
        [],
        {},
        {"protocol_version": "0.2", "message_id": "", "actions": []},
        {"protocol_version": "0.1", "message_id": "", "actions": None},
        {"protocol_version": "0.1", "message_id": "", "actions": [{}] * MAX_ACTIONS},
    ],
)
def test_what_the_client_sent_in_another_shape_is_left_as_it_is(make_hint, theirs):
    assert KvHintsDriver().fields([make_hint("retain")], {"kv_hints": theirs}) == {}


def test_pins_and_prefetches_are_not_for_the_envelope_unless_peers_are_known(make_hint):
    driver = KvHintsDriver()
    assert not driver.inside(Action.PIN, None, "device")
    assert not driver.inside(Action.PREFETCH, "l2", "device")
    assert not driver.inside(Action.RETAIN, None, "l1")
    fetching = KvHintsDriver(peer_blocks=lambda _hint: ("tcp://10.0.0.7:25000", [1, 2]))
    assert fetching.inside(Action.PREFETCH, "l1", "device")
    fields = fetching.fields([make_hint("prefetch", source="l1", peer="other")], {})
    assert actions_of(fields) == {
        "kv.fetch": {"source_control_endpoint": "tcp://10.0.0.7:25000", "block_hashes": [1, 2]}
    }


_priorities = st.integers(-10, 110)
_ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 40), _priorities, st.sampled_from([0.0, 5.0]), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(_ranges, st.integers(1, 10))
def test_directives_never_overlap_and_never_rise_along_the_prompt(make_hint, ranges, most):
    hints = [
        make_hint("demote" if demoted else "retain", start=start, stop=start + length, priority=priority, ttl=ttl)
        for start, length, priority, ttl, demoted in ranges
    ]
    runs = directives(hints, most)
    assert 1 <= len(runs) <= most
    for one, two in pairwise(runs):
        assert one.stop <= two.start
        assert one.priority >= two.priority
    wished = {
        token: max(
            0 if hint.action is Action.DEMOTE else min(100, max(0, hint.priority))
            for hint in hints
            if hint.start <= token < hint.stop
        )
        for hint in hints
        for token in range(hint.start, hint.stop)
    }
    said = {token: run.priority for run in runs for token in range(run.start, run.stop)}
    assert said.keys() <= wished.keys()
    for token, priority in said.items():
        assert priority >= wished[token], "a wish was taken back"
    if len(runs) < most:
        assert said.keys() == wished.keys()
        for token, priority in said.items():
            assert priority == max(wished[other] for other in wished if other >= token)


def test_no_more_is_offloaded_from_where_a_prompt_is_demoted_on(make_hint):
    driver = KvTransferParamsDriver()
    assert driver.inside(Action.DEMOTE, None, "l1")
    assert driver.inside(Action.PREFETCH, "l2", "device")
    assert not driver.inside(Action.RETAIN, None, "device")
    hints = [
        make_hint("demote", start=64, target="l1"),
        make_hint("demote", start=32, target="l2"),
        make_hint("prefetch", source="l1"),
    ]
    assert driver.fields(hints, {}) == {
        "kv_transfer_params": {"max_offload_tokens": 32, "kv_load_tiers": [{"medium": "CPU"}]}
    }


def test_a_clients_own_transfer_parameters_are_kept_and_win(make_hint):
    driver = KvTransferParamsDriver()
    theirs = {"max_offload_tokens": 7, "do_remote_decode": True}
    hints = [make_hint("demote", start=64, target="l1"), make_hint("prefetch", source="l2")]
    merged = driver.fields(hints, {"kv_transfer_params": theirs})["kv_transfer_params"]
    assert merged == {**theirs, "kv_load_tiers": [{"medium": "STORAGE"}]}
    assert driver.fields(hints, {"kv_transfer_params": [1]}) == {}
    assert driver.fields([make_hint("demote", target="l1")], {"kv_transfer_params": theirs}) == {}


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["model", "messages", "kv_hints", "kv_transfer_params", "x"]), _json, max_size=5),
    st.sampled_from(["kv_hints", "kv_transfer_params"]),
    _json,
)
def test_a_spliced_member_changes_that_member_and_no_other(body, name, value):
    raw = orjson.dumps(body)
    assert orjson.loads(with_member(raw, body, name, orjson.dumps(value))) == {**body, name: value}


def test_a_real_vllm_took_bodies_with_both_fields_and_answered_as_without(recorded):
    for exchange in recorded["exchanges"]:
        plain, hinted, moved = (exchange[name] for name in ("plain", "with_kv_hints", "with_kv_transfer_params"))
        assert plain["status"] == hinted["status"] == moved["status"] == 200
        assert text_of(plain["answer"]) == text_of(hinted["answer"]) == text_of(moved["answer"]) != ""
        assert exchange["with_malformed_kv_hints"]["status"] == 200


def text_of(answer):
    if "choices" in answer:
        (choice,) = answer["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return parts[0]["text"]


def test_what_was_sent_to_the_real_vllm_is_what_the_driver_says(recorded, make_hint, make_subject):
    hint = make_hint("retain", about=make_subject(96, session="s1"), stop=96, priority=60, ttl=60.0)
    ours = KvHintsDriver().fields([hint], {})["kv_hints"]
    theirs = recorded["kv_hints"]
    assert ours.keys() == theirs.keys()
    sent = {action["action_type"]: action for action in theirs["actions"]}
    for action in ours["actions"]:
        assert action.keys() == sent[action["action_type"]].keys()
        assert action["payload"].keys() == sent[action["action_type"]]["payload"].keys()


def test_what_is_kept_with_its_answer_says_so_without_a_place_for_it(make_hint):
    hint = make_hint(priority=60, ttl=30.0, answer=True)
    (retain, *_) = KvHintsDriver().fields([hint], {})["kv_hints"]["actions"]
    assert retain["payload"]["directives"] == [
        {"start": hint.start, "end": hint.stop, "priority": 60, "duration": 30.0},
        {"priority": 60, "duration": 30.0, "covers_output": True},
    ]
