import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.tokenizer import DATA, TemplateError, WorkerTokenizer

SHIPPED = WorkerTokenizer()


@given(st.text(max_size=200))
def test_every_text_comes_back_from_its_ids(text):
    assert SHIPPED.decode(SHIPPED.encode(text)) == text


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40))
def test_text_made_of_its_words_tokenizes_back_to_the_same_ids(numbers):
    first = SHIPPED.first_words[numbers[0] % len(SHIPPED.first_words)]
    chosen = [first, *(SHIPPED.words[number % len(SHIPPED.words)] for number in numbers[1:])]
    assert SHIPPED.encode("".join(text for _, text in chosen)) == [token for token, _ in chosen]


def test_special_tokens_split_text_exactly(tokenizer):
    assert tokenizer.token_strings(tokenizer.encode("<|im_start|>user\nhi<|im_end|>"))[0] == "<|im_start|>"
    inner = tokenizer.encode("user\nhi")
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>")[1:-1] == inner


def test_the_shipped_files_are_smaller_than_a_megabyte():
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 1_000_000


def test_the_template_in_the_configuration_is_the_one_in_its_own_file():
    configuration = json.loads((DATA / "tokenizer_config.json").read_text())
    assert configuration["chat_template"] == (DATA / "chat_template.jinja").read_text()


def test_a_conversation_renders_as_chatml(tokenizer):
    text = tokenizer.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_and_calls_and_results_render(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    text = tokenizer.render(
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "2"},
        ],
        [tool],
    )
    assert json.dumps(tool) in text
    assert text.count('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>') == 2
    assert "<tool_response>\n2\n</tool_response>" in text


def test_a_longer_conversation_begins_with_the_shorter_one(tokenizer):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    short = tokenizer.render(messages[:1], add_generation_prompt=False)
    assert tokenizer.render(messages).startswith(short)


def test_a_final_message_can_be_continued(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    assert tokenizer.render(messages, continue_final_message=True).endswith("<|im_start|>assistant\nHel")


def test_the_cache_stays_within_its_bound(monkeypatch):
    monkeypatch.setattr("simulator.tokenizer.CACHED_CHARACTERS", 100)
    small = WorkerTokenizer()
    texts = [f"text {number} " * 5 for number in range(50)]
    ids = [list(small.encode(text)) for text in texts]
    assert sum(map(len, small._cache)) <= 100
    assert [small.encode(text) for text in texts] == ids


def test_a_template_that_refuses_says_why(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ raise_exception('no system') }}"}))
    with pytest.raises(TemplateError, match="no system"):
        WorkerTokenizer(tmp_path).render([{"role": "system", "content": "x"}])


def test_a_folder_without_a_template_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no chat template"):
        WorkerTokenizer(tmp_path)
