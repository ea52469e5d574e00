"""The SDKs that people use, unchanged."""

import asyncio
import json

import anthropic
import openai
import pytest

TOOL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
MESSAGES = [{"role": "user", "content": "say hello"}]


@pytest.fixture
async def worker(start):
    return await start(speed=200.0, profile="h100-8b")


@pytest.fixture
async def client(worker):
    async with openai.AsyncOpenAI(base_url=worker.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(worker):
    async with anthropic.AsyncAnthropic(base_url=worker.url, api_key="x", max_retries=0) as client:
        yield client


def prompt_of(worker, messages=MESSAGES):
    return worker.tokenizer.encode(worker.tokenizer.render(messages))


async def test_openai_reads_an_answer(worker, client):
    answer = await client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=7)
    assert answer.choices[0].message.content == worker.expected_output(prompt_of(worker), 7)[1]
    assert answer.usage.completion_tokens == 7


async def test_openai_reads_a_stream(worker, client):
    stream = await client.chat.completions.create(
        model="simulated", messages=MESSAGES, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == worker.expected_output(prompt_of(worker), 7)[1]
    assert chunks[-1].usage.completion_tokens == 7


async def test_openai_reads_a_tool_call_whole_and_streamed(client):
    arguments = {
        "model": "simulated",
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}],
        "tool_choice": "required",
    }
    call = (await client.chat.completions.create(**arguments)).choices[0].message.tool_calls[0].function
    assert call.name == "weather"
    assert json.loads(call.arguments).keys() == {"city", "days"}
    async with client.chat.completions.stream(**arguments) as stream:
        final = await stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls[0].function
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert final.choices[0].finish_reason == "tool_calls"


async def test_openai_lists_models_completes_and_embeds(worker, client):
    assert [model.id async for model in client.models.list()] == ["simulated"]
    answer = await client.completions.create(model="simulated", prompt="hello", max_tokens=3)
    assert answer.choices[0].text == worker.expected_output(worker.tokenizer.encode("hello"), 3)[1]
    vectors = await client.embeddings.create(model="simulated", input="hello", encoding_format="float")
    assert len(vectors.data[0].embedding) == 32


async def test_openai_raises_its_own_error_for_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError, match="The model `nope` does not exist"):
        await client.chat.completions.create(model="nope", messages=MESSAGES)


async def test_fifty_openai_requests_at_once_get_each_its_own_answer(worker, client):
    conversations = [[{"role": "user", "content": f"question {number}"}] for number in range(50)]
    answers = await asyncio.gather(
        *(client.chat.completions.create(model="simulated", messages=messages) for messages in conversations)
    )
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [worker.expected_output(prompt_of(worker, messages))[1] for messages in conversations]


async def test_anthropic_reads_a_message_and_a_stream(worker, claude):
    message = await claude.messages.create(model="simulated", messages=MESSAGES, max_tokens=9)
    assert message.content[0].text == worker.expected_output(prompt_of(worker), 9)[1]
    assert message.stop_reason == "max_tokens"
    async with claude.messages.stream(model="simulated", messages=MESSAGES, max_tokens=9) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == message.content[0].text
    assert final.usage.output_tokens == 9


async def test_anthropic_uses_a_tool_and_goes_on_with_its_result(claude):
    tools = [{"name": "weather", "description": "w", "input_schema": TOOL}]
    arguments = {"model": "simulated", "max_tokens": 200, "tools": tools}
    first = await claude.messages.create(**arguments, messages=MESSAGES, tool_choice={"type": "any"})
    use = first.content[0]
    assert (first.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
    async with claude.messages.stream(
        **arguments, messages=MESSAGES, tool_choice={"type": "tool", "name": "weather"}
    ) as stream:
        streamed = await stream.get_final_message()
    assert streamed.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    conversation = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await claude.messages.create(**arguments, messages=conversation)
    assert second.content[0].type == "text"


async def test_anthropic_counts_what_the_message_then_has(claude):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    count = await claude.messages.count_tokens(model="simulated", messages=MESSAGES, system=system)
    message = await claude.messages.create(model="simulated", messages=MESSAGES, system=system, max_tokens=1)
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


async def test_anthropic_raises_its_own_error_for_an_unknown_model(claude):
    with pytest.raises(anthropic.NotFoundError, match="The model `nope` does not exist"):
        await claude.messages.create(model="nope", messages=MESSAGES, max_tokens=1)
