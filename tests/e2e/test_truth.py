"""What answers say of their cost: compared with predictions, asked for where clients do not, and taken out again there."""

import asyncio
import random

import openai
import orjson
import pytest

from simulator.server.events import encode_batch

STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "tell me about rivers " * 20}]},
    "/v1/completions": {"prompt": "Once upon a time there was a river " * 20},
}


def user(content):
    return {"role": "user", "content": content}


def events_of(answer):
    """The events of a stream, without what differs from answer to answer."""
    found = []
    for line in answer.split("\n\n"):
        data = line.removeprefix("data: ")
        if data in ("", "[DONE]"):
            found.append(data)
            continue
        event = orjson.loads(data)
        for name in ("id", "created", "system_fingerprint"):
            event.pop(name, None)
        found.append(event)
    return found


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_a_client_that_did_not_ask_for_usage_gets_what_the_worker_alone_gives(path, options, start, scene):
    worker = await start()
    async with scene(worker) as it:
        body = {**STREAMS[path], **options, "stream": True, "max_tokens": 12}
        _, alone = await it.post(path, body, worker.url)
        _, through = await it.post(path, body)
        assert events_of(through) == events_of(alone)
        assert "usage" not in through
        assert len(events_of(through)) > 12
        assert await it.metric("prediction_answers") == 1


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(
    "options",
    [
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": False, "continuous_usage_stats": True},
    ],
)
async def test_a_client_that_asked_gets_its_usage_as_the_worker_alone_gives_it(path, options, start, scene):
    worker = await start()
    async with scene(worker) as it:
        body = {**STREAMS[path], "stream_options": options, "stream": True, "max_tokens": 12}
        await it.post(path, body, worker.url)  # both of the next find the prompt cached
        _, alone = await it.post(path, body, worker.url)
        _, through = await it.post(path, body)
        assert events_of(through) == events_of(alone)
        assert ("usage" in through) is options["include_usage"] or "usage" in alone


async def test_the_openai_client_gets_usage_if_and_only_if_it_asks(start, scene):
    worker = await start()
    async with scene(worker) as it, openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none") as client:

        async def stream(**options):
            answer = await client.chat.completions.create(
                model="sim", messages=[user("hello " * 50)], max_tokens=6, stream=True, **options
            )
            return [event async for event in answer]

        asked = await stream(stream_options={"include_usage": True})
        assert [event.usage is not None for event in asked] == [False] * (len(asked) - 1) + [True]
        assert asked[-1].choices == []
        assert asked[-1].usage.completion_tokens == 6
        silent = await stream()
        assert len(silent) == len(asked) - 1
        assert not any(event.usage for event in silent)
        assert all(event.choices for event in silent)


async def test_the_metrics_about_predictions_say_what_the_answers_say(start, scene, text, rng):
    workers = [await start() for _ in range(2)]
    async with scene(*workers) as it:
        told = {worker.url.rpartition("/")[2]: [0, 0, 0] for worker in workers}

        def count(worker_id, usage):
            told[worker_id][0] += 1
            told[worker_id][1] += usage["prompt_tokens"]
            told[worker_id][2] += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0

        conversations = [[user(text(60))] for _ in range(6)]
        for number in range(36):
            conversation = conversations[number % 6]
            body = {"messages": conversation, "max_tokens": 5}
            if number % 2:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                worker_id, answer = await it.post("/v1/chat/completions", body)
                usage = events_of(answer)[-3]["usage"]
            else:
                worker_id, answer = await it.post("/v1/chat/completions", body)
                usage = answer["usage"]
            count(worker_id, usage)
            conversation += [{"role": "assistant", "content": "yes"}, user(text(rng.randrange(5, 40)))]
        await it.post("/v1/embeddings", {"input": "not a prompt with a cache"})
        for worker_id, sums in told.items():
            names = ("prediction_answers", "prediction_prompt_tokens", "prediction_cached_tokens")
            assert [await it.metric(name, worker=worker_id) for name in names] == sums
        assert await it.metric("prediction_cached_tokens") > 0
        # One request after the other, and caches that evict nothing: every prediction is right.
        assert await it.metric("prediction_predicted_tokens") == await it.metric("prediction_cached_tokens")
        assert await it.metric("prediction_over_tokens") == await it.metric("prediction_under_tokens") == 0


async def test_prompts_that_come_at_once_are_predicted_nearly_right(start, scene, text):
    workers = [await start(kv_blocks=4000) for _ in range(3)]
    rng = random.Random(5)
    async with scene(*workers) as it:
        shared = [{"role": "system", "content": text(80)} for _ in range(3)]

        async def converse():
            messages = [rng.choice(shared)]
            for _ in range(4):
                messages.append(user(text(rng.randrange(5, 60))))
                _, answer, *_ = await it.chat(list(messages))
                messages.append({"role": "assistant", "content": answer["content"]})

        await asyncio.gather(*(converse() for _ in range(24)))
        over, under = await it.metric("prediction_over_tokens"), await it.metric("prediction_under_tokens")
        prompts = await it.metric("prediction_prompt_tokens")
        # Of two that come together the worker may begin with the second: what one was predicted, the other has.
        assert over + under <= 0.03 * prompts
        assert abs(over - under) <= 0.01 * prompts
        assert await it.metric("prediction_cached_tokens") > 0.5 * prompts


async def test_a_worker_whose_events_lie_is_followed_anew(start, scene, text):
    """It does not tell of removals; what it would repeat is right."""
    worker = await start(kv_blocks=64, max_model_len=512)
    publisher = worker.publisher
    publish, lying = publisher.publish, True

    def lie(events):
        publish([event for event in events if event["type"] != "BlockRemoved"] if lying else events)
        number, _ = publisher._buffer.pop()
        publisher._buffer.append((number, encode_batch(events, as_arrays=publisher.as_arrays, timestamp=1.0)))

    publisher.publish = lie
    async with scene(worker) as it:
        prompts = [[user(text(60))] for _ in range(8)]
        for messages in prompts * 4:
            await it.chat(messages)
            if await it.metric("prediction_resyncs"):
                break
        assert await it.metric("prediction_resyncs") == 1
        lying = False
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) for messages in prompts))
        assert await it.metric("feed_troubles", kind="resyncs") == 1
        assert any(map(it.held, prompts))
        assert not all(map(it.held, prompts))


async def test_a_reload_to_another_policy_and_back_harms_no_request_under_way(start, scene, text):
    worker = await start(speed=20.0)
    async with scene(worker) as it:
        for policy, matched in (("leastload", False), ("kvaware", True)):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(it.chat([user(text(30))], max_tokens=300))
                await it.until(lambda: worker.engine.stats.running == 1)
                await it.reload(policy)
                assert ("sim" in it.gateway.proxy.matchers) is matched
            await it.chat([user(text(30))])
        await it.until(lambda: it.gateway.metrics.in_flight == 0)
