"""LoRA adapters: names of their own, on the workers that have them, with blocks of their own."""

import asyncio

ADAPTER = "sql-expert"


async def known(it, name):
    """Wait until the gateway has heard of an adapter."""
    async with asyncio.timeout(10):
        while True:
            async with it.http.get(f"{it.url}/v1/models") as response:
                names = {card["id"]: card for card in (await response.json())["data"]}
            if name in names:
                return names
            await asyncio.sleep(0.05)


async def test_an_adapters_name_is_listed_and_its_requests_go_to_a_worker_that_has_it(start, scene, text):
    plain, having = await start(), await start(lora_modules=(ADAPTER,))
    async with scene(plain, having) as it:
        names = await known(it, ADAPTER)
        assert names[ADAPTER]["parent"] == "sim"
        for _ in range(6):
            body = {"model": ADAPTER, "messages": [{"role": "user", "content": text(30)}], "max_tokens": 4}
            worker_id, answer = await it.post("/v1/chat/completions", body)
            assert having.url.endswith(worker_id)
            assert answer["model"] == ADAPTER


async def test_blocks_of_an_adapter_are_not_taken_for_those_of_the_model(start, scene, text):
    worker = await start(lora_modules=(ADAPTER,))
    async with scene(worker) as it:
        await known(it, ADAPTER)
        messages = [{"role": "user", "content": text(200)}]
        for model in ("sim", ADAPTER, "sim", ADAPTER):
            await it.post("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 4})
        # Each was cold once and warm once, and that is what was predicted.
        assert await it.metric("prediction_cached_tokens") > 0
        assert await it.metric("prediction_predicted_tokens") == await it.metric("prediction_cached_tokens")


async def test_a_name_that_nobody_has_is_unknown(start, scene):
    async with (
        scene(await start()) as it,
        it.http.post(f"{it.url}/v1/chat/completions", json={"model": ADAPTER, "messages": []}) as response,
    ):
        assert response.status == 404
