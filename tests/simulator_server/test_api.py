import asyncio
import dataclasses
import json

import pytest

from simulator.engine import profile_named

CHAT = "/v1/chat/completions"


async def test_the_answer_is_the_one_that_the_prompts_ids_give(start, http, chat):
    worker = await start()
    async with http.post(worker.url + CHAT, json=chat(max_tokens=9, return_token_ids=True)) as response:
        answer = await response.json()
    prompt = worker.tokenizer.encode(worker.tokenizer.render(chat()["messages"]))
    ids, text = worker.expected_output(prompt, 9)
    assert answer["prompt_token_ids"] == prompt
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["message"]["content"], choice["finish_reason"]) == (ids, text, "length")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 9


async def test_without_a_limit_it_ends_by_itself_after_16_to_64_tokens(start, http, chat):
    worker = await start()
    async with http.post(worker.url + CHAT, json=chat()) as response:
        answer = await response.json()
    prompt = worker.tokenizer.encode(worker.tokenizer.render(chat()["messages"]))
    assert answer["choices"][0]["message"]["content"] == worker.expected_output(prompt)[1]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert 16 <= answer["usage"]["completion_tokens"] <= 64


async def test_a_stream_says_what_the_whole_answer_says(start, http, chat, events_of):
    worker = await start()
    async with http.post(worker.url + CHAT, json=chat(max_tokens=12)) as response:
        whole = await response.json()
    body = chat(max_tokens=12, stream=True, return_token_ids=True, stream_options={"include_usage": True})
    async with http.post(worker.url + CHAT, json=body) as response:
        *chunks, usage, done = events_of(await response.text())
    assert done == "[DONE]"
    assert (
        "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        == whole["choices"][0]["message"]["content"]
    )
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks[1:]] == [1] * 12
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 12 + ["length"]
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    assert usage["usage"]["completion_tokens"] == 12


async def test_n_choices_differ_and_share_one_prompt(start, http, chat, events_of):
    worker = await start()
    prompt = worker.tokenizer.encode(worker.tokenizer.render(chat()["messages"]))
    expected = [worker.expected_output(prompt, 5, choice)[1] for choice in range(3)]
    async with http.post(worker.url + CHAT, json=chat(n=3, max_tokens=5)) as response:
        answer = await response.json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(prompt), 15)
    async with http.post(worker.url + CHAT, json=chat(n=3, max_tokens=5, stream=True)) as response:
        chunks = [chunk["choices"][0] for chunk in events_of(await response.text())[:-1]]
    texts = ["".join(chunk["delta"]["content"] for chunk in chunks if chunk["index"] == index) for index in range(3)]
    assert texts == expected


async def test_a_stop_string_ends_answer_and_stream_alike(start, http, chat, events_of):
    worker = await start()
    prompt = worker.tokenizer.encode(worker.tokenizer.render(chat()["messages"]))
    text = worker.expected_output(prompt, 20)[1]
    stop = text[len(text) // 2 :][:5]
    async with http.post(worker.url + CHAT, json=chat(max_tokens=20, stop=[stop])) as response:
        choice = (await response.json())["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    async with http.post(worker.url + CHAT, json=chat(max_tokens=20, stop=[stop], stream=True)) as response:
        chunks = events_of(await response.text())[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == choice["message"]["content"]


async def test_given_token_ids_take_the_place_of_the_messages(start, http, chat):
    worker = await start()
    body = chat(max_tokens=4, return_token_ids=True, kv_transfer_params={"prompt_token_ids": [5, 6, 7]})
    async with http.post(worker.url + CHAT, json=body) as response:
        answer = await response.json()
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["choices"][0]["token_ids"] == worker.expected_output([5, 6, 7], 4)[0]
    for ids in ([], "x", [1.5], [-1], [10**6], [True]):
        body["kv_transfer_params"] = {"prompt_token_ids": ids}
        async with http.post(worker.url + CHAT, json=body) as response:
            assert response.status == 400


async def test_a_repeated_prompt_is_cached_in_whole_blocks_and_a_salt_keeps_apart(start, http, chat):
    worker = await start(profile="h100-8b", block_size=16)
    long = "the same long prompt for all of them " * 12

    async def cached(**fields):
        async with http.post(worker.url + CHAT, json=chat(long, max_tokens=2, **fields)) as response:
            return (await response.json())["usage"]

    first, again, salted, salted_again = [
        await cached(**fields) for fields in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"})
    ]
    blocks = (first["prompt_tokens"] - 1) // 16 * 16
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, again, salted, salted_again)] == [
        0,
        blocks,
        0,
        blocks,
    ]
    assert first["prompt_tokens_details"]["created_cache_tokens"] == first["prompt_tokens"] // 16 * 16


async def test_the_next_turn_finds_the_generated_blocks_too(start, http, chat):
    worker = await start(profile="h100-8b", block_size=16)
    body = chat("a question " * 20, max_tokens=64)
    async with http.post(worker.url + CHAT, json=body) as response:
        answer = await response.json()
    body["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    async with http.post(worker.url + CHAT, json=body) as response:
        usage = (await response.json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["total_tokens"] // 16 * 16 - 16


async def test_the_request_id_comes_from_header_then_body(start, http, chat):
    worker = await start(request_id_headers=True)
    async with http.post(
        worker.url + CHAT, json=chat(max_tokens=1, request_id="b"), headers={"X-Request-Id": "h"}
    ) as response:
        assert (await response.json())["id"] == "chatcmpl-h"
        assert response.headers["X-Request-Id"] == "h"
    async with http.post(worker.url + CHAT, json=chat(max_tokens=1, request_id="b")) as response:
        assert (await response.json())["id"] == "chatcmpl-b"


async def test_the_key_guards_v1_and_nothing_else(start, http, chat):
    worker = await start(api_key="secret")
    async with http.post(worker.url + CHAT, json=chat(max_tokens=1)) as response:
        assert (response.status, await response.text()) == (401, '{"error":"Unauthorized"}')
    for header, status in (("Bearer secret", 200), ("bearer secret", 200), ("Bearer wrong", 401), ("secret", 401)):
        async with http.get(worker.url + "/v1/models", headers={"Authorization": header}) as response:
            assert response.status == status
    async with http.get(worker.url + "/health") as response:
        assert response.status == 200


async def test_while_it_warms_up_everything_is_503_and_then_it_serves(start, http, chat, eventually):
    worker = await start(warm_up=20.0, speed=0.001)
    for path in ("/health", "/v1/models"):
        async with http.get(worker.url + path) as response:
            assert response.status == 503
    async with http.post(worker.url + CHAT, json=chat(max_tokens=1)) as response:
        assert response.status == 503
    worker.clock.set_pace(10_000)
    await eventually(lambda: not worker.warming)
    async with http.get(worker.url + "/health") as response:
        assert response.status == 200


async def test_an_adapter_is_served_under_its_name_and_shares_no_blocks(start, http, chat):
    worker = await start(profile="h100-8b", lora_modules=("style",))
    async with http.get(worker.url + "/v1/models") as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("simulated", None), ("style", "simulated")]
    body = chat("word " * 200, max_tokens=1)
    cached = []
    for model in ("simulated", "style", "style"):
        async with http.post(worker.url + CHAT, json=body | {"model": model}) as response:
            cached.append((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


async def test_a_client_that_leaves_takes_its_request_out_of_the_engine(start, chat, eventually):
    worker = await start(speed=1.0)
    for stream in (False, True):
        body = json.dumps(chat(max_tokens=4000, stream=stream)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (CHAT.encode(), len(body))
            + body
        )
        await eventually(lambda: worker.stats().running)
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: not worker.stats().running and not len(worker.pump))
    assert worker.metrics.finished["abort"] == 2


async def test_completions_take_texts_and_ids_and_several_of_them(start, http):
    worker = await start()
    for prompt in ("one text", [1, 2, 3], ["two", "texts"], [[1, 2], [3, 4]]):
        async with http.post(
            worker.url + "/v1/completions", json={"prompt": prompt, "max_tokens": 3, "return_token_ids": True}
        ) as response:
            answer = await response.json()
        for choice in answer["choices"]:
            assert choice["token_ids"] == worker.expected_output(choice["prompt_token_ids"], 3)[0]
        assert len(answer["choices"]) == (2 if prompt in (["two", "texts"], [[1, 2], [3, 4]]) else 1)
        assert answer["usage"]["completion_tokens"] == 3 * len(answer["choices"])


async def test_a_completion_without_a_limit_has_16_tokens(start, http):
    worker = await start()
    async with http.post(worker.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 16


async def test_tokenize_and_detokenize_are_each_others_inverse(start, http, chat):
    worker = await start()
    async with http.post(worker.url + "/tokenize", json={"prompt": "any text at all"}) as response:
        tokens = (await response.json())["tokens"]
    async with http.post(worker.url + "/detokenize", json={"tokens": tokens}) as response:
        assert (await response.json())["prompt"] == "any text at all"
    async with http.post(worker.url + "/tokenize", json=chat()) as response:
        tokens = (await response.json())["tokens"]
    async with http.post(worker.url + CHAT, json=chat(max_tokens=1, return_token_ids=True)) as response:
        assert (await response.json())["prompt_token_ids"] == tokens


async def test_embeddings_are_unit_vectors_that_depend_on_the_input_alone(start, http):
    worker = await start()
    async with http.post(worker.url + "/v1/embeddings", json={"input": ["a", "b", "a"]}) as response:
        vectors = [item["embedding"] for item in (await response.json())["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert all(abs(sum(value * value for value in vector) - 1) < 1e-3 for vector in vectors)


async def test_load_counts_the_requests_in_flight(start, http, chat):
    worker = await start(speed=1.0)
    async with http.post(worker.url + CHAT, json=chat(max_tokens=500, stream=True)) as response:
        await response.content.readline()
        async with http.get(worker.url + "/load") as load:
            assert await load.json() == {"server_load": 1}


async def test_the_load_header_tells_of_the_queue_that_the_request_found(start, http, chat, eventually):
    worker = await start(speed=1.0, slots=1)
    body = chat(max_tokens=500, stream=True)

    async def asked(kind):
        headers = {"endpoint-load-metrics-format": kind}
        async with http.post(worker.url + CHAT, json=chat(max_tokens=1), headers=headers) as response:
            return response.headers["endpoint-load-metrics"]

    async def hurry():
        await eventually(lambda: worker.stats().waiting == 2)
        worker.clock.set_pace(1000)
        worker.pump.repace()

    async with http.post(worker.url + CHAT, json=body), http.post(worker.url + CHAT, json=body):
        await eventually(lambda: worker.stats().waiting == 1)
        report, _ = await asyncio.gather(asked("JSON"), hurry())
    kind, _, numbers = report.partition(" ")
    metrics = json.loads(numbers)["named_metrics"]
    assert (kind, metrics["num_requests_waiting"]) == ("JSON", 1.0)
    assert 0 < metrics["kv_cache_usage_perc"] < 1
    assert await asked("text") == "TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.0"


async def test_a_reset_forgets_the_cache_unless_something_runs(start, http, chat):
    worker = await start(profile="h100-8b")
    body = chat("word " * 200, max_tokens=1)
    async with http.post(worker.url + CHAT, json=body):
        pass
    async with http.post(worker.url + "/reset_prefix_cache") as response:
        assert await response.json() == {"success": True}
    async with http.post(worker.url + CHAT, json=body) as response:
        assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "second"}}])
async def test_a_required_tool_is_called_with_arguments_of_its_schema(start, http, chat, events_of, choice):
    worker = await start()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("first", "second")]
    name = "first" if choice == "required" else "second"
    async with http.post(worker.url + CHAT, json=chat(tools=tools, tool_choice=choice)) as response:
        whole = (await response.json())["choices"][0]
    call = whole["message"]["tool_calls"][0]["function"]
    assert call["name"] == name
    assert whole["message"]["content"] is None
    assert {key: type(value) for key, value in json.loads(call["arguments"]).items()} == {"city": str, "days": int}
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    async with http.post(worker.url + CHAT, json=chat(tools=tools, tool_choice=choice, stream=True)) as response:
        deltas = [chunk["choices"][0]["delta"] for chunk in events_of(await response.text())[:-1]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert parts[0] == {"name": name}
    assert "".join(part["arguments"] for part in parts[1:]) == call["arguments"]


async def test_an_engine_without_a_shape_for_the_prompt_answers_500(start, http, chat, events_of):
    small = dataclasses.replace(profile_named("trn1-8b"), segments=False, prefill_buckets=(64,), max_prefix_bucket=None)
    worker = await start(profile=small)
    async with http.post(worker.url + CHAT, json=chat("word " * 200, max_tokens=1)) as response:
        assert response.status == 500
        assert (await response.json())["error"]["type"] == "InternalServerError"
    async with http.post(worker.url + CHAT, json=chat("word " * 200, max_tokens=1, stream=True)) as response:
        error, done = events_of(await response.text())
    assert (error["error"]["code"], done) == (500, "[DONE]")
