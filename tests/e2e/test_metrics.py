"""What requests through a real gateway leave in its metrics."""

import asyncio

CHAT = "/v1/chat/completions"


def asking(text, **options):
    return {"messages": [{"role": "user", "content": text * 40}], "max_tokens": 12, **options}


async def test_a_stream_is_counted_where_it_went_and_why(start, scene):
    worker = await start()
    other = await start()
    async with scene(worker, other) as it:
        for _ in range(2):
            await it.post(CHAT, asking("tell me about rivers ", stream=True))
        assert await it.metric("decisions") == 2
        assert await it.metric("decisions", reason="unmatched", model="sim") == 1
        assert await it.metric("decisions", reason="holds_most") == 1
        assert await it.metric("gateway_overhead_seconds", model="sim", le="+Inf") == 2
        prompts = await it.metric("worker_prompt_tokens")
        assert prompts > 200
        assert 0 < await it.metric("worker_cached_tokens") < prompts
        assert await it.metric("worker_output_tokens") == 24
        assert await it.metric("attempts", error_type="") == 2
        assert await it.metric("prediction_answers", model="sim") == 2


async def test_the_gateways_own_time_leaves_out_what_the_client_takes_to_send(start, scene):
    async def slowly():
        for part in (b'{"messages":[{"role":"user","content":"hi"}],', b'"model":"sim","max_tokens":2}'):
            yield part
            await asyncio.sleep(0.3)

    async with scene(await start()) as it:
        url = f"http://127.0.0.1:{it.gateway.port}{CHAT}"
        async with it.http.post(url, data=slowly(), headers={"content-type": "application/json"}) as response:
            assert response.status == 200
        (series,) = it.gateway.metrics.decisions.values()
        assert series.overhead.count == 1
        assert 0 < series.overhead.sum < 0.2
