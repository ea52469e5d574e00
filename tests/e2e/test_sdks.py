"""The vendors' own client libraries, unchanged, through the gateway."""

import asyncio

import anthropic
import openai
import pytest

from simulator.server import expected_output

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture
async def client(fleet):
    gateway, _ = fleet
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="any", max_retries=0
    ) as client:
        yield client


@pytest.fixture
async def claude(fleet):
    gateway, _ = fleet
    async with anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{gateway.port}", api_key="any", max_retries=0
    ) as client:
        yield client


def ask(text):
    return [{"role": "user", "content": text}]


async def test_openai_gets_the_answer_that_the_worker_gives(client, tokenizer):
    answer = await client.chat.completions.create(
        model="gpt-4o-mini", messages=ask("Hello"), max_tokens=8, extra_body={"return_token_ids": True}
    )
    _, text = expected_output(tokenizer, answer.prompt_token_ids, 8)
    assert answer.choices[0].message.content == text
    assert answer.model == "sim"
    assert answer.usage.completion_tokens == 8


async def test_openai_streams_the_same_text(client):
    whole = await client.chat.completions.create(model="sim", messages=ask("Tell me"), max_tokens=12)
    stream = await client.chat.completions.create(
        model="sim",
        messages=ask("Tell me"),
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    async for event in stream:
        if event.choices:
            pieces.append(event.choices[0].delta.content or "")
        usage = event.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage.completion_tokens == 12


async def test_openai_calls_tools_streamed_and_whole(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    whole = await client.chat.completions.create(model="sim", messages=ask("Weather?"), tools=TOOLS, tool_choice=choice)
    call = whole.choices[0].message.tool_calls[0].function
    stream = await client.chat.completions.create(
        model="sim", messages=ask("Weather?"), tools=TOOLS, tool_choice=choice, stream=True
    )
    arguments = [
        part.function.arguments or ""
        async for event in stream
        for choice in event.choices
        for part in choice.delta.tool_calls or ()
    ]
    assert call.name == "get_weather"
    assert "".join(arguments) == call.arguments


async def test_fifty_conversations_at_once_each_get_their_own_answer(client, tokenizer):
    async def converse(number):
        stream = await client.chat.completions.create(
            model="sim",
            messages=ask(f"conversation {number}"),
            max_tokens=10,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        prompt, pieces = None, []
        async for event in stream:
            prompt = getattr(event, "prompt_token_ids", None) or prompt
            pieces += [choice.delta.content or "" for choice in event.choices]
        assert "".join(pieces) == expected_output(tokenizer, prompt, 10)[1]

    await asyncio.gather(*(converse(number) for number in range(50)))


async def test_openai_sees_models_embeddings_completions_and_typed_errors(client):
    assert [model.id async for model in client.models.list()] == ["sim", "gpt-4o-mini", "claude"]
    assert (await client.models.retrieve("claude")).id == "claude"
    completion = await client.completions.create(model="sim", prompt="Once upon", max_tokens=5)
    assert completion.usage.completion_tokens == 5
    vectors = await client.embeddings.create(model="sim", input=["a", "b"])
    assert len(vectors.data) == 2
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        await client.chat.completions.create(model="nope", messages=ask("x"))
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="sim", messages="x")


async def test_leaving_a_stream_stops_the_worker(client, fleet):
    gateway, workers = fleet
    stream = await client.chat.completions.create(model="sim", messages=ask("long"), max_tokens=4000, stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(2):
        while gateway.metrics.in_flight or any(worker.engine.stats.running for worker in workers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_anthropic_messages_whole_and_streamed(claude):
    whole = await claude.messages.create(model="claude", max_tokens=9, messages=ask("Hello"), system="Be brief.")
    async with claude.messages.stream(
        model="claude", max_tokens=9, messages=ask("Hello"), system="Be brief."
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert whole.content[0].text == text
    assert whole.usage.output_tokens == final.usage.output_tokens == 9
    count = await claude.messages.count_tokens(model="claude", messages=ask("Hello"), system="Be brief.")
    usage = whole.usage
    assert count.input_tokens == (
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )


async def test_anthropic_gets_typed_errors(claude):
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(model="nope", max_tokens=9, messages=ask("Hello"))
    assert caught.value.body["error"]["type"] == "not_found_error"
