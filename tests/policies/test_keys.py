import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import RouteRequest
from policies.keys import prefix_key, session_key
from policies.scorers.session import Session

FIELDS = (("session_id",), ("metadata", "user_id"))


def key(headers=None, body=None, cookie="sid"):
    return session_key(RouteRequest(model="m", headers=headers or {}, body=body or {}), "x-session-id", FIELDS, cookie)


def prefix(length=10, **body):
    return prefix_key(RouteRequest(model="m", body=body), length)


def chat(*messages, **more):
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


def test_header_comes_before_body_and_body_before_cookie():
    headers = {"x-session-id": "h", "cookie": "sid=c"}
    assert key(headers, {"session_id": "b"}) == b"h"
    assert key({"cookie": "sid=c"}, {"session_id": "b"}) == b"b"
    assert key({"cookie": "sid=c"}) == b"c"
    assert key() is None


def test_a_session_has_the_same_key_wherever_it_is_written():
    assert key({"x-session-id": "7"}) == key(body={"session_id": "7"}) == key(body={"session_id": 7}) == b"7"
    assert key(body={"metadata": {"user_id": "7"}}) == key({"cookie": 'a=b; sid="7" ; c'}) == b"7"


@pytest.mark.parametrize("value", ["", None, True, 1.5, [], ["a"], {}, {"a": 1}])
def test_a_body_field_that_is_no_name_counts_as_absent(value):
    assert key(body={"session_id": value, "metadata": value}) is None


@pytest.mark.parametrize("cookies", ["", ";;", "sid", "sid=", "other=1", "xsid=1", "=sid"])
def test_a_cookie_header_without_the_cookie_has_no_key(cookies):
    assert key({"cookie": cookies}) is None


def test_the_preset_reads_the_body_fields_that_clients_use(fleet):
    scorer, candidates = Session(), fleet(16)
    expected = scorer.score(RouteRequest(model="m", headers={"x-session-id": "s"}), candidates)
    for field in ("session_id", "prompt_cache_key", "user"):
        assert scorer.score(RouteRequest(model="m", body={field: "s"}), candidates) == expected
    assert scorer.score(RouteRequest(model="m", headers={"cookie": "session_id=s"}), candidates) == expected


def test_the_turns_of_a_conversation_have_one_key_however_short_the_first_was():
    first = chat(("system", "be brief"), ("user", "hi"))
    later = chat(("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "tell me more about it"))
    assert prefix(**first) == prefix(**later)
    assert prefix(**first) is not None


def test_conversations_differ_by_their_first_user_message_and_by_their_system_prompt():
    keys = {
        prefix(**chat(("system", "be brief"), ("user", "one"))),
        prefix(**chat(("system", "be brief"), ("user", "two"))),
        prefix(**chat(("system", "be kind"), ("user", "one"))),
        prefix(**chat(("user", "be briefone"))),
    }
    assert len(keys) == 4


def test_only_the_first_characters_count():
    assert prefix(**chat(("system", "s" * 10 + "A"), ("user", "u" * 10 + "A"))) == prefix(
        **chat(("system", "s" * 10 + "B"), ("user", "u" * 10 + "B"))
    )
    assert prefix(prompt="0123456789A") == prefix(prompt="0123456789B") != prefix(prompt="012345678")


def test_each_api_s_shape_gives_the_same_conversation_the_same_key():
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    openai = prefix(**chat(("developer", "be brief"), ("user", "hi")))
    assert prefix(**chat(("system", [{"type": "text", "text": "be brief"}]), ("user", parts))) == openai
    assert prefix(**chat(("user", "hi"), system="be brief")) == openai
    assert prefix(input=[{"role": "user", "content": "hi"}], instructions="be brief") == openai
    assert prefix(input="hi", instructions="be brief") == openai


def test_prompts_may_be_text_token_ids_or_lists_of_them():
    assert prefix(prompt="abc") == prefix(prompt=["abc", "def"])
    assert prefix(prompt=[1, 2, 3]) == prefix(prompt=[[1, 2, 3], [4]])
    assert prefix(length=2, prompt=[1, 2, 3]) == prefix(length=2, prompt=[1, 2, 9]) != prefix(length=2, prompt=[1, 3])
    assert prefix(query="abc", documents=["d"]) == prefix(input="abc") == prefix(prompt="abc")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": [None, 3, {}]},
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [[]]},
        {"input": [{}]},
        {"prompt": [{}]},
        {"messages": "text"},
        chat(("user", None)),
        chat(("user", [{"type": "image_url"}])),
    ],
)
def test_a_body_without_text_has_no_key(body):
    assert prefix(**body) is None


json_values = st.recursive(
    st.sampled_from([None, True, 0, 7, 2**70, 0.5, "", "x", "system", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "text", "prompt", "input", "system", "user", "session_id"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(body=st.dictionaries(st.sampled_from(["messages", "prompt", "input", "system", "session_id"]), json_values))
def test_any_json_gives_a_key_or_none(body):
    assert isinstance(prefix(**body), bytes | None)
    assert isinstance(key(body=body), bytes | None)


def test_text_that_is_no_valid_unicode_still_has_a_key():
    lone = orjson.loads(b'"ok"') + "\ud800"
    assert prefix(prompt=lone)
    assert key({"x-session-id": "\udcff"})
    assert key(body={"session_id": lone})
