import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import AddedToken

from gateway.prompt.chat import JsonMemory, RendererOptions, read_chat
from gateway.prompt.prompt import How
from gateway.prompt.prompter import Prompter
from gateway.prompt.shapes import Shape, Shapes, read_shape
from gateway.prompt.template import ChatTemplates
from gateway.prompt.tokenizer import PromptTokenizer

CHAT = "/v1/chat/completions"
FETCHED = os.environ.get("WARMROUTE_TOKENIZERS", "")

# In the manner of well-known ones: contents trimmed after a header; system prompts collected at the front, tokens without
# line feeds between; parts; contents at the very start; what is inside a literal token's beginning.
TEMPLATES = {
    "headers": "{% for m in messages %}{% set text = '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' %}"
    "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
    "collected": "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.system = ns.system + ('\n\n' if ns.system else '') + m.content %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}{{ '<|head|>' + m.content }}{% else %}"
    "{% set text = m.content %}{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|/head|>' + text + '<|eot|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|/head|>{% endif %}",
    "parts": "{% for m in messages %}<|head|>{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}<|eot|>\n{% endfor %}",
    "bare": "{% for m in messages %}{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}",
    "close": "{% for m in messages %}<|eo{{ m.content }}t|><|head|>{% endfor %}",
    "nearly": "{% for m in messages %}{{ '<|head|>' + m.role + '<|eot|' + m.content }}{% endfor %}",
    "switches": "{{ 'T' if thinking is defined and thinking is true else 'F' }}{{ thinking }}"
    "{% for m in messages %}<|head|>{{ m.content }}{% endfor %}",
}
TOKENS = ["<|head|>", "<|/head|>", "<|eot|>", "<|bos|>"]


@pytest.fixture(scope="session")
def tokenizers(qwen3, odd_tokenizer_shapes):
    """Tokenizers with templates, by name."""
    made = {"qwen3": qwen3}
    for name, source in TEMPLATES.items():
        tokenizer = odd_tokenizer_shapes["byte level"]()
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in TOKENS])
        made[name] = PromptTokenizer(tokenizer, ChatTemplates({"default": source}), {"bos_token": "<|bos|>"}, name)
    for name in ("llama3_1", "deepseek_v3") if FETCHED else ():
        made[name] = PromptTokenizer.from_directory(Path(FETCHED) / name)
    return made


@pytest.fixture(scope="session")
def prompters(tokenizers):
    """One prompter for each, which all examples teach."""
    return {name: Prompter(tokenizer) for name, tokenizer in tokenizers.items()}


PIECES = st.sampled_from(
    ["hello", " world", "\n\n", "  ", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "\n</think>\n\n", "\u6771", "'s", "12",
     "<tool_response>", "</tool_response>", "<|head|>", "<|eot|>", "t|>", ">", "<|", "<", "\r\n", "\t", "\x1c", "|>", "<|eot_id|>"]
)  # fmt: skip
CONTENT = st.lists(PIECES | st.text(max_size=3), max_size=5).map("".join)
ROLES = st.sampled_from(
    [("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"), ("assistant",)]
)  # fmt: skip
OPTIONS = st.sampled_from(
    [{}, {}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
BODY = st.builds(
    lambda roles, contents, options: {
        "messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)],
        **options,
    },
    ROLES,
    st.lists(CONTENT, min_size=4, max_size=4),
    OPTIONS,
)


def whole(prompter, body):
    """The ids of what the template itself renders, in one go, by the library alone."""
    (text,) = prompter.texts(CHAT, body)
    return prompter._tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


NAMES = ["qwen3", *TEMPLATES, *(("llama3_1", "deepseek_v3") if FETCHED else ())]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_shapes_have_the_ids_of_what_the_template_renders(prompters, name):
    prompter = prompters[name]

    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(BODY)
    def check(body):
        prompt = prompter.now(CHAT, body)
        assert prompt.how is How.EXACT
        assert prompt.ids.tolist() == whole(prompter, body)

    check()
    shapes = prompter._renderer.shapes
    assert shapes.differences == 0
    assert shapes.hits > 40, "most are of a shape that was seen before"


def chat(*contents, **options):
    roles = ("system", "user", "assistant", "user")
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)],
        **options,
    }


def asked(prompter, monkeypatch):
    """What counts how often the template was rendered."""
    counted = []
    template = prompter._tokenizer.templates.default
    render = type(template).render

    def counting(self, *args, **options):
        counted.append(1)
        return render(self, *args, **options)

    monkeypatch.setattr(type(template), "render", counting)
    return counted


def test_the_template_is_asked_twice_and_then_no_more(qwen3, monkeypatch):
    prompter = Prompter(qwen3)
    counted = asked(prompter, monkeypatch)
    for number in range(10):
        prompter.now(CHAT, chat("rules", f"question {number}"))
    assert len(counted) == 2
    assert prompter.stats["shape_hits"] == 8


def test_contents_that_the_template_treats_otherwise_get_a_trace_of_their_own(qwen3, monkeypatch):
    prompter = Prompter(qwen3)
    counted = asked(prompter, monkeypatch)
    bodies = [chat("s", "u", "plain", "u"), chat("s", "<tool_response>x</tool_response>", "plain", "u")] * 4
    for body in bodies:
        assert prompter.now(CHAT, body).ids.tolist() == whole(prompter, body)
    del counted[:]
    for body in bodies:
        prompter.now(CHAT, body)
    assert not counted


@pytest.mark.parametrize(
    "odd",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"documents": [{"text": "d"}]},
        {"chat_template_kwargs": {"enable_thinking": 1}},
        {"chat_template_kwargs": {"enable_thinking": 0.0}},
        {"chat_template_kwargs": {"x": [True]}},
        {"chat_template_kwargs": {"x": "long" * 100}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_what_a_template_can_tell_apart_by_more_than_contents_is_of_no_shape(odd):
    request = read_chat(chat("s", "u", **odd), JsonMemory(), RendererOptions())
    assert read_shape(request) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": "a", "name": "b"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "assistant", "content": "a", "reasoning": "b"},
        {"role": "tool", "content": "a"},
        {"role": "developer", "content": "a"},
        {"role": ["user"], "content": "a"},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nrest"},
        "no object",
    ],
)
def test_only_messages_of_a_role_and_a_text_are_of_a_shape(message):
    request = read_chat({"messages": [message]}, JsonMemory(), RendererOptions())
    assert read_shape(request) is None


def test_values_that_python_calls_equal_are_kept_apart(tokenizers):
    prompter = Prompter(tokenizers["switches"])
    for _ in range(4):
        for value in (True, 1, 1.0, False, 0, "x", ""):
            body = chat("s", "u", chat_template_kwargs={"thinking": value})
            assert prompter.now(CHAT, body).ids.tolist() == whole(prompter, body)


def test_one_prompt_in_so_many_is_checked_and_a_difference_ends_it_all(qwen3, monkeypatch):
    prompter = Prompter(qwen3)
    prompter._renderer.shapes = shapes = Shapes(qwen3.templates.default, qwen3.splitter, check_every=5)
    bodies = [chat("rules", f"question {number}") for number in range(40)]
    for body in bodies[:12]:
        prompter.now(CHAT, body)
    assert (shapes.hits, shapes.checks, shapes.differences) == (10, 3, 0)
    right = Shape.whole
    monkeypatch.setattr(Shape, "whole", lambda self, texts: right(self, texts) + "!")
    counted = asked(prompter, monkeypatch)
    with capture_logs() as logs:
        for body in bodies[12:]:
            prompter.now(CHAT, body)
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert prompter.stats["shape_differences"] == 1
    assert shapes.hits == 15
    assert len(counted) == 28 - 4, "all but those before the check were rendered in full"


def test_pieces_that_differ_end_it_as_well(qwen3, monkeypatch):
    prompter = Prompter(qwen3)
    monkeypatch.setattr(Shape, "pieces", lambda self, texts, _splitter: [self.whole(texts)])
    with capture_logs() as logs:
        for number in range(4):
            body = chat("rules", f"question {number}")
            assert prompter.now(CHAT, body).ids.tolist() == whole(prompter, body)
    assert len(logs) == prompter.stats["shape_differences"] == 1
    assert prompter.stats["shape_hits"] == 0


def test_a_template_that_prints_the_time_has_no_shapes(odd_tokenizer_shapes):
    tokenizer = odd_tokenizer_shapes["byte level"]()
    ticks = iter(range(1, 100))
    from datetime import datetime

    templates = ChatTemplates(
        {"default": "{{ strftime_now('%S') }}{{ messages[0].content }}"},
        lambda: datetime(2026, 12, 1, 8, 30, next(ticks)),  # noqa: DTZ001  # local, as templates get it
    )
    prompter = Prompter(PromptTokenizer(tokenizer, templates, {}))
    first = next(ticks)
    seen = {bytes(prompter.now(CHAT, chat("a")).ids) for _ in range(8)}
    assert len(seen) == 8
    assert next(ticks) == first + 9
    assert prompter.stats["shape_hits"] == 0


def test_no_number_of_shapes_takes_more_than_its_budget(qwen3):
    prompter = Prompter(qwen3)
    shapes = prompter._renderer.shapes
    for length in range(20, 220):
        body = {"messages": [{"role": "user", "content": "a"}] * length}
        for _ in range(2 + length // 64):
            prompter.now(CHAT, body)
    held = sum(len(key) * (1 + len(known.shapes)) for key, known in shapes._known.items())
    assert 8 * 1024 <= held <= 17 * 1024
    assert shapes.differences == 0


def test_long_conversations_are_traced_when_they_have_come_more_often(qwen3):
    prompter = Prompter(qwen3)
    body = {"messages": [{"role": "user", "content": "a"}] * 200}
    for _ in range(5):
        prompter.now(CHAT, body)
        assert prompter.stats["shape_hits"] == 0
    prompter.now(CHAT, body)
    assert prompter.stats["shape_hits"] == 1
    too_long = {"messages": [{"role": "user", "content": "a"}] * 513}
    for _ in range(12):
        prompter.now(CHAT, too_long)
    assert prompter.stats["shape_hits"] == 1
