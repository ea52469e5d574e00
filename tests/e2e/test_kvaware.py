"""Requests go where their prefix is, through a whole gateway: to the worker, from its events, and back."""

import asyncio
from collections import Counter

import pytest
import structlog


def user(content):
    return {"role": "user", "content": content}


def said(text):
    return {"role": "assistant", "content": text}


def turns(texts):
    return [(user, said)[at % 2](text) for at, text in enumerate(texts)]


async def chat(it, texts):
    return (await it.post("/v1/chat/completions", {"messages": turns(texts), "max_tokens": 8}))[0]


async def streamed_chat(it, texts):
    return (await it.post("/v1/chat/completions", {"messages": turns(texts), "max_tokens": 8, "stream": True}))[0]


async def completion(it, texts):
    return (await it.post("/v1/completions", {"prompt": "\n".join(texts), "max_tokens": 8}))[0]


async def streamed_completion(it, texts):
    return (await it.post("/v1/completions", {"prompt": "\n".join(texts), "max_tokens": 8, "stream": True}))[0]


async def message(it, texts):
    return (await it.post("/v1/messages", {"messages": turns(texts), "system": "Be brief.", "max_tokens": 8}))[0]


async def streamed_message(it, texts):
    body = {"messages": turns(texts), "system": "Be brief.", "max_tokens": 8, "stream": True}
    return (await it.post("/v1/messages", body))[0]


KINDS = [chat, streamed_chat, completion, streamed_completion, message, streamed_message]


@pytest.mark.parametrize("ask", KINDS)
async def test_a_follow_up_question_reaches_the_worker_that_holds_the_conversation(ask, start, scene, text):
    workers = [await start() for _ in range(4)]
    async with scene(*workers) as it:
        conversations = [[text(60)] for _ in range(12)]
        homes = [await ask(it, conversation) for conversation in conversations]
        assert len(set(homes)) > 1
        for _ in range(2):
            for conversation, home in zip(conversations, homes, strict=True):
                conversation += [text(10), text(20)]
                assert await ask(it, conversation) == home
        assert await it.metric("prediction_cached_tokens") > 0.5 * await it.metric("prediction_prompt_tokens")


async def test_a_burst_of_identical_new_prompts_lands_on_few_workers_and_is_computed_few_times(start, scene, text):
    workers = [await start() for _ in range(8)]
    async with scene(*workers) as it:
        messages = [user(text(1000))]
        answers = await asyncio.gather(*(it.chat(messages) for _ in range(32)))
        tokens = answers[0][2]
        assert len({worker_id for worker_id, *_ in answers}) <= 3
        assert sum(prompt - cached for _, _, prompt, cached in answers) <= 3 * tokens + 32 * 16


async def test_one_huge_shared_prefix_uses_all_workers_under_load(start, scene, text):
    workers = [await start(slots=8, speed=10.0) for _ in range(4)]
    async with scene(*workers, fields=", capabilities: {slots: 8}") as it:
        shared = {"role": "system", "content": text(500)}
        await it.chat([shared, user(text(5))])
        slots = asyncio.Semaphore(40)

        async def ask(question):
            async with slots:
                return await it.chat([shared, question], max_tokens=40)

        answers = await asyncio.gather(*(ask(user(text(5))) for _ in range(160)))
        sent = Counter(worker_id for worker_id, *_ in answers)
        assert len(sent) == 4
        assert max(sent.values()) <= 80
        assert sum(cached for *_, cached in answers) > 0.9 * sum(prompt for _, _, prompt, _ in answers)


async def test_traffic_without_reuse_is_spread_as_evenly_as_by_least_load(start, scene, text):
    async def spread(policy):
        workers = [await start(speed=20.0) for _ in range(4)]
        slots = asyncio.Semaphore(16)
        async with scene(*workers, policy=policy, ready=policy == "kvaware") as it:

            async def ask(messages):
                async with slots:
                    return (await it.chat(messages, max_tokens=20))[0]

            sent = Counter(await asyncio.gather(*(ask([user(text(30))]) for _ in range(200))))
            return max(sent.values()) - min(sent[worker.url.rpartition("/")[2]] for worker in workers)

    assert await spread("kvaware") <= await spread("leastload") + 20


async def test_a_cache_salt_separates(start, scene, text):
    workers = [await start() for _ in range(3)]
    async with scene(*workers) as it:
        messages = [user(text(100))]
        home, _, _, cached = await it.chat(messages, cache_salt="a")
        assert cached == 0
        await it.until(lambda: it.predicted(messages, cache_salt="a") == it.held(messages, "a"))
        assert it.predicted(messages, cache_salt="a").keys() == {home}
        assert it.predicted(messages, cache_salt="b") == it.predicted(messages) == {}
        assert (await it.chat(messages, cache_salt="a"))[::3] == (home, it.held(messages, "a")[home])
        assert (await it.chat(messages, cache_salt="b"))[3] == 0
        assert (await it.chat(messages))[3] == 0


async def test_predictions_are_right_within_2_seconds_after_a_workers_restart_on_the_same_port(
    start, restarted, scene, text
):
    workers = [await start() for _ in range(2)]
    async with scene(*workers) as it:
        prompts = [[user(text(80))] for _ in range(10)]
        homes = [(await it.chat(messages))[0] for messages in prompts]
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) for messages in prompts))
        assert len(set(homes)) == 2
        gone = workers[0].url.rpartition("/")[2]
        it.workers[0] = await restarted(workers[0])
        await it.until(lambda: not any(gone in it.predicted(messages) for messages in prompts))
        for messages in prompts[:4]:
            await it.chat(messages, it.workers[0].url)  # behind the gateway's back: only events can tell
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) for messages in prompts))
        assert all(gone in it.predicted(messages) for messages in prompts[:4])


async def test_a_gateway_that_starts_learns_by_replay_what_its_workers_hold(start, scene, text):
    workers = [await start() for _ in range(3)]
    prompts = [[user(text(80))] for _ in range(12)]
    async with scene(*workers) as it:
        for messages in prompts:
            await it.chat(messages)
    async with scene(*workers) as it:
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) for messages in prompts))
        for messages in prompts:
            home, _, _, cached = await it.chat(messages)
            assert cached == it.held(messages)[home] > 0


async def test_lost_events_are_made_up_for_within_2_seconds(start, scene, text):
    worker, other = await start(), await start()
    async with scene(worker, other) as it:
        prompts = [[user(text(80))] for _ in range(6)]
        worker.publisher.drop_next = 2
        for messages in prompts:
            await it.chat(messages, worker.url)
        assert worker.publisher.dropped == 2
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) for messages in prompts))
        assert all(it.predicted(messages) for messages in prompts)
        assert await it.metric("feed_troubles", worker=worker.url.rpartition("/")[2], kind="gaps") >= 1


async def test_nothing_is_credited_2_seconds_after_reset_prefix_cache(start, scene, text):
    workers = [await start() for _ in range(2)]
    async with scene(*workers) as it:
        prompts = [[user(text(80))] for _ in range(8)]
        for messages in prompts:
            await it.chat(messages)
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) != {} for messages in prompts))
        for worker in workers:
            await it.post("/reset_prefix_cache", {}, worker.url)
        await it.until(lambda: not any(map(it.predicted, prompts)))
        assert (await it.chat(prompts[0]))[3] == 0


async def test_what_was_sent_is_believed_until_the_events_come_and_no_longer_than_2_seconds(start, scene, text):
    worker, other = await start(), await start()
    async with scene(worker, other) as it:
        messages = [user(text(80))]
        for each in (worker, other):
            each.publisher.drop_next = 1_000_000
        home, *_ = await it.chat(messages)
        assert it.predicted(messages).keys() == {home}
        await it.until(lambda: not it.predicted(messages), 2.6)
        for each in (worker, other):
            each.publisher.drop_next = 0


async def test_small_caches_that_evict_are_still_predicted_right(start, scene, text, rng):
    workers = [await start(kv_blocks=64, max_model_len=512) for _ in range(2)]
    async with scene(*workers) as it:
        prompts = [[user(text(rng.randrange(10, 60)))] for _ in range(30)]
        for _ in range(100):
            await it.chat(rng.choice(prompts))
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) for messages in prompts), 3.0)
        assert any(map(it.held, prompts))
        assert not all(map(it.held, prompts))


async def test_a_worker_without_events_is_guessed_and_that_is_said(start, scene, text):
    with structlog.testing.capture_logs() as lines:
        silent, loud = await start(kv_events=None), await start()
        name = silent.url.rpartition("/")[2]
        async with scene(silent, loud, ready=False) as it:
            await it.until(lambda: it.statuses() == {name: "history", loud.url.rpartition("/")[2]: "events"})
            prompts = [[user(text(80))] for _ in range(12)]
            homes = [(await it.chat(messages))[0] for messages in prompts]
            assert set(homes) == set(it.statuses())
            assert [(await it.chat(messages))[0] for messages in prompts] == homes
            assert "1 of 2 workers send no KV events, what they hold is guessed: " + name in (await it.degraded())[0]
            assert await it.metric("feed_status", worker=name, status="history") == 1
    said_so = [line for line in lines if "no KV events" in line["event"]]
    assert [line["worker"] for line in said_so] == [name]


async def test_a_tokenizer_that_disagrees_is_said_and_conversations_stay_on_their_workers(
    start, scene, text, changed_model
):
    workers = [await start() for _ in range(3)]
    directory = changed_model("<|im_start|>", "<|im_start|> ")
    with structlog.testing.capture_logs() as lines:
        async with scene(*workers, model=f"tokenizer: {directory}") as it:
            await it.until(lambda: not it.matcher.parity.trusted, 5.0)
            assert any("tokenizer disagrees" in sentence for sentence in await it.degraded())
            conversations = [[user(text(80))] for _ in range(8)]
            homes = [(await it.chat(messages))[0] for messages in conversations]
            assert len(set(homes)) > 1
            await asyncio.sleep(2.3)  # longer than what was sent is believed without events
            for messages, home in zip(conversations, homes, strict=True):
                worker_id, *_, cached = await it.chat([*messages, said("yes"), user(text(10))])
                assert worker_id == home
                assert cached > 0
            assert await it.metric("prediction_answers") == 0
    assert sum("tokens differ from the worker's" in line["event"] for line in lines) <= 3


async def test_workers_with_different_block_sizes_are_each_matched_in_their_own(start, scene, text):
    small, large = await start(block_size=16), await start(block_size=64)
    async with scene(small, large) as it:
        prompts = [[user(text(100))] for _ in range(12)]
        homes = [(await it.chat(messages))[0] for messages in prompts]
        assert len(set(homes)) == 2
        await it.until(lambda: all(it.predicted(messages) == it.held(messages) for messages in prompts))
        for messages, home in zip(prompts, homes, strict=True):
            worker_id, _, tokens, cached = await it.chat(messages)
            assert (worker_id, cached) == (home, it.held(messages)[home])
            size = it.worker(home).profile.block_size
            assert cached == (tokens - 1) // size * size
