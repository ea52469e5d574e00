import asyncio
import json
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.prompt.chat import RendererOptions
from gateway.prompt.prompt import How
from gateway.prompt.prompter import Prompter, PromptLimits
from gateway.prompt.tokenizer import PromptTokenizer
from gateway.tasks import TaskGroup

CHAT = "/v1/chat/completions"
MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def chat(*texts):
    return {
        "messages": [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    }


async def until(condition):
    """Wait for a thread, which sets no event of this loop."""
    while not condition():  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.001)


@pytest.fixture
async def tasks():
    tasks = TaskGroup("test")
    yield tasks
    await tasks.cancel()


class Gate:
    """A tokenizer's `encode` that waits with big texts until it is let through, and remembers them."""

    def __init__(self, tokenizer, monkeypatch):
        self.open = threading.Event()
        self.texts = []
        encode = PromptTokenizer.encode

        def gated(this, text):
            if this is tokenizer and len(text) > 10_000:
                self.texts.append(text)
                assert self.open.wait(20)
            return encode(this, text)

        monkeypatch.setattr(PromptTokenizer, "encode", gated)


@pytest.fixture
def gate(qwen3, monkeypatch):
    gate = Gate(qwen3, monkeypatch)
    yield gate
    gate.open.set()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "function", "name", "id", "arguments", "input", "user", "tool_use"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
FIELDS = [
    "messages", "prompt", "input", "system", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "documents", "suffix",
    "add_special_tokens", "truncate_prompt_tokens", "continue_final_message", "instructions", "reasoning", "thinking", "output_config",
]  # fmt: skip
PATHS = [
    CHAT,
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/invocations",
    "/v1/embeddings",
    "",
    "*",
]
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name", "reasoning"]),
        JSON | st.sampled_from(["user", "assistant"]),
        max_size=4,
    )
    | JSON,
    max_size=4,
)


@MANY
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4) | JSON, MESSAGES | st.none())
def test_no_body_makes_it_raise_and_each_one_has_a_reason_or_ids(qwen3, path, body, messages):
    if isinstance(body, dict) and messages is not None:
        body["messages"] = messages
    before = json.dumps(body)
    prompter = Prompter(qwen3)
    prompt = prompter.now(path, body)
    assert prompt is not None
    assert (prompt.how is How.EXACT) == (prompt.reason == "")
    assert (prompt.how is How.NONE) == (prompt.token_count == 0 and prompt.reason != "")
    assert prompt.reason != "failed", "each shape has a reason of its own"
    assert json.dumps(body) == before
    assert sum(prompter.counts.values()) == 1


async def test_a_failure_of_our_own_is_counted_logged_once_and_goes_on(qwen3, monkeypatch, capsys):
    monkeypatch.setattr(PromptTokenizer, "encode", lambda *_: 1 / 0)
    prompter = Prompter(qwen3)
    for _ in range(3):
        assert (await prompter.prompt(CHAT, chat("hi"))).how is How.APPROXIMATE
    assert prompter.counts == {("approximate", "failed"): 3}
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("further failures are only counted") == 1


async def test_a_big_new_text_is_encoded_in_a_thread_and_then_known(qwen3):
    prompter = Prompter(qwen3)
    body = chat("one two three " * 5000)
    assert prompter.now(CHAT, body) is None
    prompt = await prompter.prompt(CHAT, body)
    assert prompt.how is How.EXACT
    assert prompt.off_loop
    assert prompt.new_tokens == prompt.token_count > 15_000
    again = prompter.now(CHAT, body)
    assert again.ids == prompt.ids
    assert again.new_tokens == 0
    prompter.close()


async def test_the_loop_goes_on_while_a_big_text_is_encoded(qwen3, gate, tasks):
    prompter = Prompter(qwen3)
    waiting = tasks.spawn("prompt", prompter.prompt(CHAT, chat("word " * 10_000)))
    await until(lambda: gate.texts)
    assert not waiting.done()
    assert prompter.stats["pending"] > 40_000
    gate.open.set()
    assert (await waiting).how is How.EXACT
    assert prompter.stats["pending"] == 0


async def test_a_burst_of_siblings_encodes_their_document_once(qwen3, gate, tasks):
    prompter = Prompter(qwen3)
    document = "word " * 10_000
    bodies = [
        {"messages": [{"role": "system", "content": document}, {"role": "user", "content": f"question {i}"}]}
        for i in range(32)
    ]
    waiting = [tasks.spawn("prompt", prompter.prompt(CHAT, body)) for body in bodies]
    await until(lambda: gate.texts)
    gate.open.set()
    prompts = await asyncio.gather(*waiting)
    assert sum(document.strip() in text for text in gate.texts) == 1
    assert len({id(prompt.segments[0]) for prompt in prompts}) == 1
    assert len({bytes(prompt.ids) for prompt in prompts}) == 32


async def test_a_text_that_is_not_ready_in_time_is_approximate_and_kept_for_the_next_request(qwen3, gate):
    prompter = Prompter(qwen3, limits=PromptLimits(deadline=0.05))
    body = chat("word " * 10_000)
    late = await prompter.prompt(CHAT, body)
    assert (late.how, late.reason) == (How.APPROXIMATE, "deadline")
    gate.open.set()
    await until(lambda: not prompter.stats["pending"])
    assert prompter.now(CHAT, body).how is How.EXACT


async def test_a_client_that_leaves_takes_the_text_from_nobody_else(qwen3, gate, tasks):
    prompter = Prompter(qwen3)
    body = chat("word " * 10_000)
    leaving, staying = (tasks.spawn("prompt", prompter.prompt(CHAT, body)) for _ in range(2))
    await until(lambda: gate.texts)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.open.set()
    assert (await staying).how is How.EXACT


async def test_what_is_too_big_or_too_much_at_once_is_approximate(qwen3, gate, tasks):
    limits = PromptLimits(text=100_000, body=200_000, pending=60_000)
    prompter = Prompter(qwen3, limits=limits)
    assert (await prompter.prompt(CHAT, chat("x" * 100_001))).reason == "too big"
    assert (await prompter.prompt(CHAT, chat("é" * 50_001))).reason == "too big", "bytes count, not characters"
    assert (await prompter.prompt(CHAT, chat("x"), size=200_001)).reason == "too big"
    first = tasks.spawn("prompt", prompter.prompt(CHAT, chat("word " * 10_000)))
    await until(lambda: gate.texts)
    assert (await prompter.prompt(CHAT, chat("else " * 10_000))).reason == "busy"
    gate.open.set()
    assert (await first).how is How.EXACT


async def test_a_body_of_many_messages_is_rendered_in_a_thread(qwen3):
    prompter = Prompter(qwen3, limits=PromptLimits(inline_items=20))
    body = chat(*(f"message {i}" for i in range(21)))
    assert prompter.now(CHAT, body) is None
    prompt = await prompter.prompt(CHAT, body)
    assert prompt.off_loop
    assert prompt.ids == Prompter(qwen3).now(CHAT, body).ids
    refused = {"messages": [{"role": "user"}] * 20 + [{"role": "user", "content": [{"type": "image_url"}]}]}
    assert (await prompter.prompt(CHAT, refused)).reason == "content part: other than text"


async def test_after_the_end_what_waits_is_approximate(qwen3, gate, tasks):
    prompter = Prompter(qwen3, limits=PromptLimits(threads=1))
    running, waiting = (
        tasks.spawn("prompt", prompter.prompt(CHAT, chat(word * 10_000))) for word in ("some ", "other ")
    )
    await until(lambda: gate.texts)
    prompter.close()
    assert (await waiting).reason == "closed"
    gate.open.set()
    assert (await running).how is How.EXACT


HOSTILE = {
    "circumflex": "^" * 1_000_000,
    "a": "a" * 1_000_000,
    "zwj": "\U0001f469\u200d" * 250_000,
    "lines": "\n" * 500_000,
    "openings": "<|" * 500_000,
    "specials": "<|im_end|>" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_texts_take_the_loop_no_long_stretch(qwen3, name, tasks):
    # CPU time of the loop's own thread between two of its turns: what it did itself, however busy the machine is.
    # How long others kept it from the lock is measured by `python -m bench.prompt`.
    prompter = Prompter(qwen3, limits=PromptLimits(deadline=30.0))
    worst = 0.0
    done = asyncio.Event()

    async def probe():
        nonlocal worst
        while not done.is_set():
            start = time.thread_time()
            await asyncio.sleep(0)
            worst = max(worst, time.thread_time() - start)
            await asyncio.sleep(0.001)

    probing = tasks.spawn("prompt", probe())
    body = chat(HOSTILE[name])
    prompt = await prompter.prompt(CHAT, body, len(json.dumps(body)))
    done.set()
    await probing
    assert prompt.how is How.EXACT, prompt.reason
    assert worst < 0.05
    prompter.close()


async def test_without_a_tokenizer_prompts_are_approximate_but_ids_are_ids():
    prompter = Prompter(None)
    assert (await prompter.prompt(CHAT, chat("hi"))).reason == "no tokenizer"
    assert prompter.now("/v1/completions", {"prompt": "hi"}).reason == "no tokenizer"
    ids = prompter.now("/v1/completions", {"prompt": [[1, 2], [3]]})
    assert ids.how is How.EXACT
    assert [one.ids.tolist() for one in (ids, *ids.also)] == [[1, 2], [3]]


def test_paths_without_a_cacheable_prompt_have_none(qwen3):
    prompter = Prompter(qwen3)
    assert prompter.now("/v1/embeddings", {"input": "x"}).how is How.NONE
    assert prompter.now(CHAT, [1]).how is How.NONE


def test_sagemakers_path_takes_either_body(qwen3):
    prompter = Prompter(qwen3)
    assert prompter.now("/invocations", chat("hi")).ids == prompter.now(CHAT, chat("hi")).ids
    assert prompter.now("/invocations", {"prompt": "hi"}).ids == prompter.now("/v1/completions", {"prompt": "hi"}).ids


def test_truncation_keeps_the_end_or_the_beginning(qwen3):
    prompter = Prompter(qwen3)
    whole = prompter.now(CHAT, chat("a b c d e")).ids
    for side, kept in ((None, whole[-5:]), ("left", whole[-5:]), ("right", whole[:5])):
        prompt = prompter.now(CHAT, {**chat("a b c d e"), "truncate_prompt_tokens": 5, "truncation_side": side})
        assert prompt.ids == kept
        assert prompt.token_count == 5
    assert prompter.now("/v1/completions", {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}).ids.tolist() == [2, 3]


def test_special_tokens_are_added_where_the_request_lets_the_tokenizer_add_them():
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    from gateway.prompt.template import ChatTemplates

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    loaded = PromptTokenizer(
        tokenizer, ChatTemplates({"default": "{{ bos_token }}{{ messages[0].content }}"}), {"bos_token": "<s>"}
    )
    prompter = Prompter(loaded)
    assert prompter.now("/v1/completions", {"prompt": "a"}).ids.tolist() == [256, *loaded.encode("a"), 257]
    assert prompter.now("/v1/completions", {"prompt": "a", "add_special_tokens": False}).ids == loaded.encode("a")
    assert prompter.now(CHAT, chat("a")).ids.tolist() == [256, *loaded.encode("a")]
    assert prompter.now(CHAT, {**chat("a"), "add_special_tokens": True}).ids.tolist() == [
        256,
        256,
        *loaded.encode("a"),
        257,
    ]
    truncated = prompter.now("/v1/completions", {"prompt": "abc", "truncate_prompt_tokens": 2})
    assert truncated.reason == "truncate_prompt_tokens: with special tokens"


def test_the_servers_own_settings_count(qwen3):
    options = RendererOptions(template_kwargs={"enable_thinking": False})
    plain, thoughtless = Prompter(qwen3), Prompter(qwen3, options=options)
    switched = {**chat("hi"), "chat_template_kwargs": {"enable_thinking": False}}
    assert thoughtless.now(CHAT, chat("hi")).ids == plain.now(CHAT, switched).ids != plain.now(CHAT, chat("hi")).ids


def test_a_template_that_refuses_makes_it_approximate(qwen3):
    prompter = Prompter(qwen3)
    assert prompter.now(CHAT, {"messages": []}).reason == "template"
    both = {**chat("hi"), "continue_final_message": True}
    assert prompter.now(CHAT, both).reason == "template"
