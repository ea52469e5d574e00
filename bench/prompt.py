"""What a request's exact tokens cost: CPU from the parsed body to the ids, Qwen3's tokenizer and template.

    python -m bench.prompt [--tokenizer DIRECTORY]

CPU time of the process, the least of several runs. The loop's delay is what a task that sleeps 1 ms sees beyond that
while a hostile text is being made into a prompt.
"""

import argparse
import asyncio
import itertools
import lzma
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from gateway.prompt.prompter import Prompter, PromptLimits
from gateway.prompt.tokenizer import PromptTokenizer

FIXTURE = Path(__file__).parent.parent / "tests" / "prompt" / "fixtures" / "qwen3"
CHAT = "/v1/chat/completions"
WORDS = (
    "the",
    "cache",
    "of",
    "a",
    "worker",
    "holds",
    "blocks",
    "that",
    "were",
    "computed",
    "before",
    "and",
    "not",
    "needed",
)


def load(directory: str | None) -> PromptTokenizer:
    if directory:
        return PromptTokenizer.from_directory(directory)
    with tempfile.TemporaryDirectory() as unpacked:
        for path in sorted(FIXTURE.glob("tokenizer*")):
            data = path.read_bytes()
            target = Path(unpacked) / path.name.removesuffix(".xz")
            target.write_bytes(lzma.decompress(data) if path.suffix == ".xz" else data)
        return PromptTokenizer.from_directory(unpacked)


def text(rng: random.Random, tokens: int) -> str:
    """About `tokens` tokens of words, numbers and punctuation, unlike any other."""
    out = []
    while len(out) < tokens:
        out.extend((rng.choice(WORDS), rng.choice(WORDS), str(rng.randrange(10)), ","))
    return " ".join(out[:tokens])


def conversation(rng: random.Random, messages: int, tokens: int) -> list[dict[str, Any]]:
    turns = [{"role": "system", "content": text(rng, 500)}]
    roles = itertools.islice(itertools.cycle(("user", "assistant")), messages)
    return turns + [{"role": role, "content": text(rng, tokens // messages)} for role in roles]


def least(prepare: Callable[[], Any], run: Callable[[Any], Any], times: int) -> float:
    """Seconds of CPU that `run` takes at least."""
    costs = []
    for _ in range(times):
        given = prepare()
        start = time.process_time()
        run(given)
        costs.append(time.process_time() - start)
    return min(costs)


def warm_turn(tokenizer: PromptTokenizer, messages: int, *, shapes: bool) -> tuple[int, float]:
    """An answer and a question of 200 tokens, added to a conversation of 100k seen before: tokens in all, seconds.

    `shapes` false: as if no conversation of these roles had come before (`gateway.prompt.shapes`).
    """
    rng = random.Random(1)
    turns = conversation(rng, messages + 1, 100_000)
    before = Prompter(tokenizer, limits=PromptLimits(inline_new=10**9))
    before.now(CHAT, {"messages": turns})
    prompter = with_defaults(before, tokenizer)
    if not shapes:
        prompter._renderer.shapes = None  # noqa: SLF001  # nobody but this bench wants to do without
    counts: list[int] = []

    def prepare() -> tuple[Any, int]:
        turn = [{"role": "assistant", "content": text(rng, 100)}, {"role": "user", "content": text(rng, 100)}]
        raw = orjson.dumps({"messages": [*turns, *turn]})
        return orjson.loads(raw), len(raw)

    def run(given: tuple[Any, int]) -> None:
        prompt = prompter.now(CHAT, *given)
        assert prompt is not None, "a warm conversation must not need a thread"
        counts.append(prompt.token_count)

    seconds = least(prepare, run, 30)
    return counts[-1], seconds


def with_defaults(warm: Prompter, tokenizer: PromptTokenizer) -> Prompter:
    """A prompter with the default limits that has what `warm` has cached."""
    prompter = Prompter(tokenizer)
    prompter._cache = warm._cache  # noqa: SLF001  # no public way to share a cache, and none needed but here
    return prompter


def short_chat(tokenizer: PromptTokenizer) -> float:
    """A request as `bench/lua/chat.lua` makes them: 1.3 KB, a system prompt shared by all, the user's text its own."""
    prompter = Prompter(tokenizer)
    system = "You are a helpful assistant. " * 40
    about = " about the weather in the mountains and the price of tea, please answer in one sentence"
    numbers = itertools.count(1)

    def prepare() -> list[Any]:
        return [
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": f"question number {next(numbers)}{about}"},
                ],
                "stream": False,
            }
            for _ in range(300)
        ]

    def run(bodies: list[Any]) -> None:
        for body in bodies:
            assert prompter.now(CHAT, body, 1300) is not None

    run(prepare())
    return least(prepare, run, 9) / 300


def cold(tokenizer: PromptTokenizer) -> tuple[float, float, float]:
    """A document of 100k tokens never seen before: CPU, wall time, the loop's longest delay; seconds."""
    rng = random.Random(3)
    results = []
    for _ in range(3):
        body = {"messages": [{"role": "user", "content": text(rng, 100_000)}]}
        start = time.process_time()
        wall, lag = asyncio.run(probed(tokenizer, body))
        results.append((time.process_time() - start, wall, lag))
    return min(results)


async def probed(tokenizer: PromptTokenizer, body: Any) -> tuple[float, float]:
    """Seconds until the prompt was there, and the longest time beyond its due that the loop let a timer wait."""
    prompter = Prompter(tokenizer, limits=PromptLimits(deadline=60.0))
    size = len(orjson.dumps(body))
    worst = 0.0
    done = asyncio.Event()

    async def probe() -> None:
        nonlocal worst
        while not done.is_set():
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - due)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(probe())
        await asyncio.sleep(0.01)
        start = time.perf_counter()
        await prompter.prompt(CHAT, body, size)
        wall = time.perf_counter() - start
        done.set()
    prompter.close()
    return wall, worst


HOSTILE = {
    '"^" x 1e6': "^" * 1_000_000,
    '"a" x 1e6': "a" * 1_000_000,
    "1e6 emoji with ZWJ": "\U0001f469\u200d" * 500_000,
    "500k line feeds": "\n" * 500_000,
    "1e6 spaces": " " * 1_000_000,
    '"<|" x 500k': "<|" * 500_000,
    "100k special tokens": "<|im_end|>" * 100_000,
    '"</think>" x 120k': "</think>" * 120_000,
    "e + accent x 300k": "e\u0301" * 300_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a model's directory; default: the Qwen3 tokenizer of the tests")
    tokenizer = load(parser.parse_args().tokenizer)
    for messages in (20, 100, 200, 400):
        tokens, seconds = warm_turn(tokenizer, messages, shapes=False)
        _, again = warm_turn(tokenizer, messages, shapes=True)
        print(f"warm turn of 200, {messages:4} messages, {tokens:7} tokens {seconds * 1e3:9.2f} ms CPU, "
              f"{again * 1e3:.2f} ms once its shape is known")  # fmt: skip
    print(f"chat of 1.3 KB, shared system prompt             {short_chat(tokenizer) * 1e6:9.1f} us CPU")
    cpu, wall, lag = cold(tokenizer)
    print(f"cold document of 100k tokens                     {cpu * 1e3:9.1f} ms CPU, {wall * 1e3:.1f} ms, "
          f"loop delayed {lag * 1e3:.1f} ms at most")  # fmt: skip
    for name, content in HOSTILE.items():
        tries = [asyncio.run(probed(tokenizer, {"messages": [{"role": "user", "content": content}]})) for _ in range(3)]
        wall, lag = min(tries, key=lambda one: one[1])
        print(f"{name:24} {wall * 1e3:9.1f} ms, loop delayed {lag * 1e3:.1f} ms at most")


if __name__ == "__main__":
    main()
