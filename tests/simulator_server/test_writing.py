import json

from hypothesis import given
from hypothesis import strategies as st

from simulator.server.writing import (
    LONGEST,
    SHORTEST,
    Answer,
    FunctionCall,
    apply_stops,
    arguments_for,
    expected_output,
    natural_length,
    write,
    write_call,
)
from simulator.tokenizer import WorkerTokenizer

TOKENIZER = WorkerTokenizer()
PROMPTS = st.lists(st.integers(0, 6000), min_size=1, max_size=60)


@given(PROMPTS, st.integers(1, 40), st.integers(1, 40))
def test_a_longer_answer_begins_with_the_shorter_one(prompt, length, more):
    short, _ = expected_output(TOKENIZER, prompt, length)
    long, _ = expected_output(TOKENIZER, prompt, length + more)
    assert long[:length] == short


@given(PROMPTS)
def test_the_answers_text_is_its_ids_decoded(prompt):
    ids, text = expected_output(TOKENIZER, prompt)
    assert TOKENIZER.decode(ids) == text
    assert SHORTEST <= len(ids) <= LONGEST
    assert len(ids) == natural_length(prompt)


def test_another_prompt_or_another_choice_gets_another_answer():
    answers = {expected_output(TOKENIZER, prompt, 8, choice)[1] for prompt in ([1], [2], [1, 2]) for choice in (0, 1)}
    assert len(answers) == 6


@given(PROMPTS, st.integers(2, 30), st.data())
def test_a_stop_string_ends_the_answer_at_its_first_place(prompt, length, data):
    answer = write(TOKENIZER, prompt, length)
    text = answer.text()
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    stopped = apply_stops(answer, [stop], [], minimum=0, keep=False)
    assert stopped.text() == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.ids == answer.ids[: len(stopped.ids)]
    assert stop in answer.text(len(stopped.ids))
    assert stop not in answer.text(len(stopped.ids) - 1)
    assert apply_stops(answer, [stop], [], minimum=0, keep=True).text() == text[: text.index(stop) + len(stop)]


def test_nothing_stops_an_answer_before_the_minimum():
    answer = Answer([1, 2, 1, 2], ["a", "b", "a", "b"], "length")
    assert apply_stops(answer, ["b"], [], minimum=3, keep=False).text() == "aba"
    assert apply_stops(answer, [], [1], minimum=2, keep=False).ids == [1, 2, 1]


@given(st.text(max_size=30), st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=3))
def test_the_pieces_of_a_call_make_its_text(name, arguments):
    call = FunctionCall(name, json.dumps(arguments, ensure_ascii=False))
    answer = write_call(TOKENIZER, call)
    assert answer.text() == call.text
    assert json.loads(call.text.split("\n")[1]) == {"name": name, "arguments": arguments}


def test_arguments_fit_the_schema():
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 3},
            "exact": {"type": "boolean"},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
            "tags": {"type": "array", "items": {"type": "string"}},
            "either": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
    }
    value = json.loads(arguments_for(schema, 5))
    assert value["unit"] in ("C", "F")
    assert value["days"] >= 3
    assert [type(value[name]) for name in ("city", "exact", "where", "tags", "either")] == [
        str,
        bool,
        dict,
        list,
        type(None),
    ]
    assert isinstance(value["where"]["lat"], float)


def test_a_schema_that_is_none_gives_an_empty_object():
    assert arguments_for(None, 1) == arguments_for({}, 1) == arguments_for({"type": "string"}, 1) == "{}"
