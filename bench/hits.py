"""Do two caches behind the gateway hit like one of twice the size?

    python -m bench.hits --gateway URL --admin URL --worker URL --worker URL --reference URL --model NAME

Sends the same chat requests in the same order to the gateway, whose workers it names with `--worker`, and to one worker (`--reference`) that has
as many blocks as those together. There are `--open` conversations at any time, each with one of a few system prompts and of several turns; what
the assistant says in the next turn's history is written in advance, so that the requests do not depend on who answers them. At most `--concurrency`
requests run at once, and a turn waits for the one before. All caches are emptied first (``/reset_prefix_cache``, needs VLLM_SERVER_DEV_MODE=1).

The hit rate is the share of prompt tokens that the answers' usage calls cached. Of the gateway's predictions, a token is right when it was predicted to be
cached and was, or neither; `warmroute_prediction_*` adds them up request by request.
"""

import argparse
import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop

from bench.truth import WORDS

_SAMPLE = re.compile(r"^warmroute_prediction_(\w+)_total\{[^}]*\} (\S+)$", re.MULTILINE)
_SETTLE = 1.0
_ANSWER = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: which conversation it belongs to, and its messages."""

    conversation: int
    messages: list[dict[str, str]]


@dataclass(slots=True)
class Hits:
    """What the answers said."""

    requests: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    workers: Counter[str] = field(default_factory=Counter)

    def add(self, status: int, answer: dict[str, Any]) -> bool:
        """Count an answer; False for one that is an error, which is shown."""
        self.requests += 1
        if status != 200:
            self.failed += 1
            print(f"answered {status}: {str(answer)[:200]}")
            return False
        usage = answer["usage"]
        self.prompt += usage["prompt_tokens"]
        self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return True

    @property
    def rate(self) -> float:
        """Cached tokens of all prompt tokens."""
        return self.cached / self.prompt if self.prompt else 0.0

    def __str__(self) -> str:
        where = ", ".join(f"{name} {count}" for name, count in sorted(self.workers.items()))
        return (
            f"{self.requests} requests, {self.failed} failed, {self.prompt:,} prompt tokens, {self.cached:,} cached: "
            f"hit rate {self.rate:.4f}" + (f" ({where})" if where else "")
        )


def written(seed: int, count: int, open_at_once: int, longest: int) -> list[Request]:
    """`count` turns of conversations that overlap, of which none grows beyond `longest` words."""
    rng = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    systems = [text(words) for words in (80, 160, 240)]
    numbers = iter(range(count))
    going: list[tuple[int, int, list[dict[str, str]]]] = []
    requests: list[Request] = []
    while len(requests) < count:
        while len(going) < open_at_once:
            system = {"role": "system", "content": rng.choice(systems)}
            going.append((next(numbers), rng.randrange(2, 9), [system]))
        at = rng.randrange(len(going))
        number, left, messages = going[at]
        messages.append({"role": "user", "content": text(rng.randrange(10, 120))})
        requests.append(Request(number, list(messages)))
        messages.append({"role": "assistant", "content": text(rng.randrange(5, 60))})
        words = sum(len(message["content"].split()) for message in messages)
        if left == 1 or words + 120 > longest:
            del going[at]
        else:
            going[at] = number, left - 1, messages
    return requests


async def send(
    http: aiohttp.ClientSession, url: str, model: str, requests: Sequence[Request], concurrency: int
) -> Hits:
    """All requests in their order, `concurrency` at a time."""
    hits = Hits()
    slots = asyncio.Semaphore(concurrency)
    before: dict[int, asyncio.Task[None]] = {}

    async def one(request: Request) -> None:
        body = {"model": model, "messages": request.messages, "max_tokens": _ANSWER, "temperature": 0.0}
        try:
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                answer: dict[str, Any] = await response.json()
                if hits.add(response.status, answer) and (worker := response.headers.get("x-warmroute-worker")):
                    hits.workers[worker] += 1
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            if (turn := before.get(request.conversation)) is not None:
                await turn
            await slots.acquire()
            before[request.conversation] = tasks.create_task(one(request))
    return hits


async def predictions(http: aiohttp.ClientSession, admin: str) -> Counter[str]:
    """The gateway's `warmroute_prediction_*` counters, all workers together."""
    async with http.get(f"{admin}/metrics") as response:
        sums: Counter[str] = Counter()
        for name, value in _SAMPLE.findall(await response.text()):
            sums[name] += int(float(value))
        return sums


async def empty(http: aiohttp.ClientSession, workers: Sequence[str], model: str) -> None:
    """Empty the caches. A worker tells of it with its next event, so each gets a request that makes it store a block."""
    for url in workers:
        async with http.post(f"{url}/reset_prefix_cache") as response:
            if response.status != 200:
                print(f"{url} answers {response.status} to /reset_prefix_cache: its cache may be warm")
        body = {"model": model, "prompt": random.choices(range(1000, 2000), k=100), "max_tokens": 1}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            await response.read()
    await asyncio.sleep(_SETTLE)


async def run(arguments: argparse.Namespace) -> None:
    """Both runs, and what there is to say about them."""
    requests = written(arguments.seed, arguments.requests, arguments.open, arguments.longest)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        reference: Hits | None = None
        if arguments.reference:
            await empty(http, [arguments.reference], arguments.model)
            reference = await send(http, arguments.reference, arguments.model, requests, arguments.concurrency)
            print(f"one worker: {reference}")
        if not arguments.gateway:
            return
        await empty(http, arguments.worker, arguments.model)
        before = await predictions(http, arguments.admin) if arguments.admin else Counter()
        start = time.monotonic()
        hits = await send(http, arguments.gateway, arguments.model, requests, arguments.concurrency)
        seconds = time.monotonic() - start
        print(f"gateway:    {hits}, {seconds:.1f} s")
        if reference is not None and reference.rate:
            print(f"{hits.rate / reference.rate:.4f} of the one worker's hit rate")
        if arguments.admin:
            await asyncio.sleep(_SETTLE)
            report(await predictions(http, arguments.admin) - before, hits)


def report(told: Counter[str], hits: Hits) -> None:
    """Predictions against the answers."""
    if not told["answers"]:
        print("no predictions: the policy reads no matches, or the prompts are not exact")
        return
    wrong = told["over_tokens"] + told["under_tokens"]
    print(
        f"predictions: {told['answers']} answers, {told['prompt_tokens']:,} tokens, "
        f"{100 * (1 - wrong / told['prompt_tokens']):.3f} % right "
        f"({told['over_tokens']:,} too many, {told['under_tokens']:,} too few), {told['resyncs']} resyncs"
    )
    if (told["answers"], told["prompt_tokens"], told["cached_tokens"]) != (
        hits.requests - hits.failed,
        hits.prompt,
        hits.cached,
    ):
        print(f"the gateway's sums are not the answers': {dict(told)}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--gateway", metavar="URL", help="its data listener")
    made.add_argument("--admin", metavar="URL", help="its admin listener")
    made.add_argument("--worker", action="append", default=[], metavar="URL", help="of the gateway; repeatable")
    made.add_argument("--reference", metavar="URL", help="one worker with the sum of the caches")
    made.add_argument("--model", help="as gateway and workers call it")
    made.add_argument("--requests", type=int, default=500)
    made.add_argument("--concurrency", type=int, default=8)
    made.add_argument("--open", type=int, default=24, metavar="N", help="conversations at any time")
    made.add_argument("--longest", type=int, default=1200, metavar="WORDS", help="of one conversation")
    made.add_argument("--seed", type=int, default=1)
    return made


def main() -> None:
    """Print the figures."""
    arguments = parser().parse_args()
    if not (arguments.model and (arguments.gateway or arguments.reference)):
        print("needs real workers: --gateway URL --admin URL --worker URL --reference URL --model NAME")
        return
    uvloop.run(run(arguments))


if __name__ == "__main__":
    main()
