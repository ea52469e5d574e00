"""The same requests that a real vLLM was asked, and answers of the same shape."""

import json
from typing import Any

import pytest

from simulator.engine import profile_named

# Different on purpose: what vLLM says there depends on its own model or names every alternative of a union.
SHAPES_DIFFER = {"chat_tool_required_stream", "chat_tool_named_stream", "msg_tool_stream"}


def shape(value: Any) -> Any:
    """Keys and types, in order; of a list the first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def shapes_of_stream(text: str) -> list[str]:
    """Each different line of a stream once, in order: names of events, shapes of data."""
    lines = [line for line in text.split("\n") if line]
    return list(
        dict.fromkeys(
            json.dumps(shape(json.loads(line.removeprefix("data: ")))) if line.startswith("data: {") else line
            for line in lines
        )
    )


@pytest.fixture
async def twin(start):
    """A worker set up like the recorded one."""
    return await start(
        profile="h100-8b",
        model="/models/qwen3-tiny",
        served_model_names=("qwen3-tiny",),
        max_model_len=4096,
        block_size=32,
        kv_events="tcp://127.0.0.1:*",
        kv_events_replay="tcp://127.0.0.1:*",
    )


async def test_every_answer_has_the_recorded_status_headers_and_shape(twin, http, recorded):
    vocabulary = twin.tokenizer.vocabulary_size
    wrong = []
    for exchange in recorded:
        if exchange["name"] == "detok":
            exchange["body"]["json"]["tokens"] = [token % vocabulary for token in exchange["body"]["json"]["tokens"]]
        body = exchange["body"] or {}
        data = body["raw"].encode() if "raw" in body else json.dumps(body["json"]) if "json" in body else None
        headers = (
            {"Content-Type": "application/json", **exchange["headers"]} if data is not None else exchange["headers"]
        )
        async with http.request(
            exchange["method"], twin.url + exchange["path"], data=data, headers=headers
        ) as response:
            text = await response.text()
            got = {name.lower(): value for name, value in response.headers.items()}
        for name in ("date", "content-length"):
            got.pop(name, None)
        expected = exchange["answer"]
        if response.status != exchange["status"] or got != exchange["answer_headers"]:
            wrong.append((exchange["name"], response.status, got))
        elif response.status != 200:
            if text != expected:
                wrong.append((exchange["name"], expected, text))
        elif expected.startswith(("data:", "event:")):
            if exchange["name"] not in SHAPES_DIFFER and shapes_of_stream(text) != shapes_of_stream(expected):
                wrong.append((exchange["name"], shapes_of_stream(expected), shapes_of_stream(text)))
        elif expected and json.dumps(shape(json.loads(text))) != json.dumps(shape(json.loads(expected))):
            wrong.append((exchange["name"], expected, text))
    assert len(recorded) > 60
    assert wrong == []


async def test_a_streamed_tool_call_has_the_recorded_events(twin, http, recorded):
    exchange = next(item for item in recorded if item["name"] == "chat_tool_required_stream")
    async with http.post(twin.url + exchange["path"], json=exchange["body"]["json"]) as response:
        shapes = shapes_of_stream(await response.text())
    # The recorded model never came to an end of its arguments, so its last event still has some.
    assert shapes[:3] == shapes_of_stream(exchange["answer"])[:3]
    assert shapes[-1] == "data: [DONE]"


async def test_its_metrics_have_the_recorded_names_and_types(twin, http, fixtures):
    async with http.get(twin.url + "/metrics") as response:
        text = await response.text()
    mine = {line.removeprefix("# TYPE ") for line in text.split("\n") if line.startswith("# TYPE vllm:")}
    recorded = set((fixtures / "metric_families.txt").read_text().splitlines())
    assert mine <= recorded
    left_out = {line.split()[0] for line in recorded - mine}
    assert left_out == {
        "vllm:admission_rejections_total",
        "vllm:estimated_flops_per_gpu_total",
        "vllm:estimated_read_bytes_per_gpu_total",
        "vllm:estimated_write_bytes_per_gpu_total",
        "vllm:iteration_tokens_total",
        "vllm:mm_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_num_preemptions",
        "vllm:tool_call_parser_invocations_total",
    }


async def test_a_prompt_that_is_too_long_is_refused_in_vllms_words(twin, http, chat):
    async with http.post(twin.url + "/v1/chat/completions", json=chat("word " * 5000, model="qwen3-tiny")) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["message"] == (
        "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        "(parameter=input_tokens, value=4097)"
    )
    assert profile_named("h100-8b").max_model_len != 4096
