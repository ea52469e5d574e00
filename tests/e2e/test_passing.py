"""Token ids that go along with requests: nobody can tell from the answer, and only where a worker uses them."""

import pytest

import gateway.prompt.passing
from simulator.server import service

CHAT = "/v1/chat/completions"


def user(content):
    return {"role": "user", "content": content}


@pytest.fixture
def passed(monkeypatch):
    """The lists of ids that workers were given, in order."""
    lists = []
    take = service.prompt_from_transfer

    def taken(body):
        ids = take(body)
        if ids is not None:
            lists.append(ids)
        return ids

    monkeypatch.setattr(service, "prompt_from_transfer", taken)
    return lists


@pytest.fixture
def ignored(monkeypatch):
    """Workers that read `kv_transfer_params` and use no ids; the lists that they were given."""
    lists = []

    def ignored(body):
        ids = (body.get("kv_transfer_params") or {}).pop("prompt_token_ids", None)
        if ids is not None:
            lists.append(ids)

    monkeypatch.setattr(service, "prompt_from_transfer", ignored)
    return lists


def model(mode):
    return f"tokenizer: {service.__file__.rpartition('/server/')[0]}/data\n    pass_token_ids: {mode}"


async def proven(it):
    await it.until(lambda: all(row.proven for row in it.matcher.parity.snapshot()), 10.0)


async def passing(it, messages, passed):
    """Ask until ids go along: the worker's answer to the question may be on its way. The worker's id."""
    for _ in range(50):
        worker_id, *_ = await it.chat(messages)
        if passed and len(passed[-1]) > 8:
            return worker_id
    pytest.fail("ids never went along")


def comparable(answer):
    return {name: value for name, value in answer.items() if name not in ("id", "created", "usage")}


BODIES = {
    "chat": {"messages": [user("hello")]},
    "conversation": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            user("Grüße, 你好 \U0001f469\u200d\U0001f680 <|im_end|> <b>\n\n\ttabs"),
            {"role": "assistant", "content": "Yes?"},
            user("And now?"),
        ]
    },
    "tools": {
        "messages": [user("weather in Oslo?")],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    },
    "parts": {"messages": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]},
    "transfer": {"messages": [user("hello")], "kv_transfer_params": {"max_offload_tokens": 0}},
    "salted": {"messages": [user("hello " * 40)], "cache_salt": "a"},
}


async def test_answers_are_the_same_with_and_without_ids(start, scene, passed):
    worker = await start()
    answers = {}
    for mode in ("off", "on"):
        async with scene(worker, model=model(mode)) as it:
            await proven(it)
            for name, body in BODIES.items():
                passed.clear()
                asked = {**body, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
                answers[mode, name] = (await it.post(CHAT, asked))[1]
                assert passed == ([answers[mode, name]["prompt_token_ids"]] if mode == "on" else []), name
    for name in BODIES:
        assert comparable(answers["off", name]) == comparable(answers["on", name]), name
    assert (
        len({str(answers["on", name]["choices"]) for name in BODIES}) == len(BODIES) - 1
    )  # two have the same messages


async def test_streams_are_the_same_with_and_without_ids(start, scene, passed):
    worker = await start()
    texts = []
    for mode in ("off", "on"):
        async with scene(worker, model=model(mode)) as it:
            body = {"messages": [user("hello")], "max_tokens": 12, "stream": True, "return_token_ids": True}
            _, answer = await it.post(CHAT, body)
            texts.append([line.partition('"choices"')[2] for line in answer.split("\n\n")])
    assert texts[0] == texts[1]
    assert len(passed) == 1


async def test_auto_passes_long_prompts_on_once_the_worker_was_seen_to_use_them(start, scene, text, passed):
    workers = [await start() for _ in range(2)]
    async with scene(*workers, model=model("auto")) as it:
        await proven(it)
        long = [user(text(1000))]
        await it.chat([user("short")])
        assert passed == []
        home, _, tokens, _ = await it.chat(long)
        assert tokens > gateway.prompt.passing.LONG
        await it.until(lambda: len(passed) == 1)  # the question whether it uses them: eight ids
        assert len(passed[0]) == 8
        assert await passing(it, long, passed) == home
        assert [len(ids) for ids in passed] == [8, tokens]
        await it.chat([user("short")])
        assert len(passed) == 2


async def test_a_worker_that_ignores_ids_is_found_out(start, scene, text, ignored):
    worker = await start()
    async with scene(worker, model=model("auto")) as it:
        await proven(it)
        long = [user(text(1000))]
        await it.chat(long)
        await it.until(lambda: len(ignored) == 1)
        for _ in range(3):
            await it.chat(long)
        assert [len(ids) for ids in ignored] == [8]


async def test_a_worker_that_could_not_answer_is_asked_again(start, scene, text, passed, monkeypatch):
    monkeypatch.setattr(gateway.prompt.passing, "PROBE_AGAIN", 0.05)
    worker = await start()
    async with scene(worker, model=model("auto")) as it:
        await proven(it)
        long = [user(text(1000))]
        faults = worker.faults
        await worker.set_faults(faults.changed({"error_rate": 1.0, "error_status": 500, "times": 2}))
        async with it.http.post(f"{it.url}{CHAT}", json={"model": "sim", "messages": long}) as response:
            assert response.status == 500
        await it.until(lambda: worker.faults.times == 0)  # the question failed, too
        await passing(it, long, passed)
        assert [len(ids) for ids in passed[:-1]] == [8]


async def test_a_worker_that_was_started_again_is_asked_again(start, restarted, scene, text, passed):
    worker = await start()
    async with scene(worker, model=model("auto")) as it:
        await proven(it)
        long = [user(text(1000))]
        await passing(it, long, passed)
        since = it.matcher.parity.proven_since(worker.url.rpartition("/")[2])
        await worker.stop()
        await it.until(lambda: not any(row.proven for row in it.matcher.parity.snapshot()), 10.0)
        await restarted(worker)
        await proven(it)
        assert it.matcher.parity.proven_since(worker.url.rpartition("/")[2]) > since
        passed.clear()
        await it.chat(long)
        await it.until(lambda: [len(ids) for ids in passed] == [8])


NEVER = {
    "an image": {"messages": [user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}])]},
    "continue_final_message": {
        "messages": [user("hello"), {"role": "assistant", "content": "Well"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "echo": {"messages": [user("hello")], "echo": True},
    "truncate_prompt_tokens": {"messages": [user("hello " * 30)], "truncate_prompt_tokens": 5},
    "add_special_tokens": {"messages": [user("hello")], "add_special_tokens": True},
    "documents": {"messages": [user("hello")], "documents": [{"title": "a", "text": "b"}]},
    "chat_template": {"messages": [user("hello")], "chat_template": "{{ messages[0].content }}"},
    "ids of the client's": {"messages": [user("hello")], "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}},
    "odd parameters": {"messages": [user("hello")], "kv_transfer_params": [1]},
}


async def test_requests_whose_text_the_worker_needs_never_get_ids(start, scene, passed):
    worker = await start()
    async with scene(worker, model=model("on")) as it:
        await proven(it)
        for name, fields in NEVER.items():
            passed.clear()
            async with it.http.post(f"{it.url}{CHAT}", json={"model": "sim", "max_tokens": 2, **fields}) as response:
                await response.read()
                assert response.status in (200, 400), name
            assert passed == ([[5, 6, 7]] if name == "ids of the client's" else []), name


async def test_only_chats_get_ids(start, scene, passed):
    worker = await start()
    async with scene(worker, model=model("on")) as it:
        await proven(it)
        for path, body in OTHERS:
            passed.clear()
            await it.post(path, {**body, "max_tokens": 2})
            assert passed == [], path
        await it.post(CHAT, {"messages": [user("hello")], "max_tokens": 2})
        assert len(passed) == 1


OTHERS = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": ["hello", "world"]}),
    ("/v1/completions", {"prompt": [5, 6, 7]}),
    ("/v1/messages", {"messages": [user("hello")]}),
]
