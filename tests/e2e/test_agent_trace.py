"""Real prompts: every answer through the gateway equals what the worker alone gives."""

import asyncio
import gzip
from pathlib import Path

import aiohttp
import orjson

TRACE = Path(__file__).parent / "fixtures" / "miniswe.jsonl.gz"


async def test_an_agents_requests_are_all_answered_and_equal_the_workers_own_answers(fleet):
    gateway, workers = fleet
    with gzip.open(TRACE) as lines:
        prompts = [orjson.loads(line)["input"] for line in lines]

    async def answer(session, url, prompt):
        body = {"model": "sim", "messages": [{"role": "user", "content": prompt[:8000]}], "max_tokens": 20}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            return (await response.json())["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession() as session:
        through = await asyncio.gather(
            *(answer(session, f"http://127.0.0.1:{gateway.port}", prompt) for prompt in prompts)
        )
        alone = await asyncio.gather(*(answer(session, workers[0].url, prompt) for prompt in prompts))
    assert through == alone
    assert len(set(through)) > 1
