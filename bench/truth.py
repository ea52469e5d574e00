"""Are predictions true? ``python -m bench.truth --worker URL --worker URL --tokenizer DIR --model NAME``.

Sends mixed requests (new conversations, follow-ups, a system prompt that many share, salts, completions) to real workers,
one after the other on each, and compares what the prefix index says just before a request with the `cached_tokens` that the
worker says afterwards. Between requests it waits until the request's own events have come, at most a tenth of a second:
what is measured is whether the index is right, not how fast it is. `--hurry` leaves the waiting out and believes what was sent
until two seconds after its answer, as the gateway does.

A token is predicted right when both say that it is cached or both say that it is not.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from gateway.config.schema import Config, Model
from gateway.config.schema import Worker as WorkerSection
from gateway.fleet.asking import open_session
from gateway.fleet.fleet import Fleets
from gateway.prefix.feed import Feeds
from gateway.prefix.index import PrefixIndex
from gateway.prompt.blocks import Hasher
from gateway.prompt.prompt import How
from gateway.prompt.prompter import Prompter
from gateway.prompt.tokenizer import PromptTokenizer
from policies.base import NO_MATCH

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WORDS = [
    "river",
    "stone",
    "morning",
    "letter",
    "engine",
    "garden",
    "window",
    "silver",
    "bridge",
    "market",
    "forest",
    "signal",
    "harbor",
    "candle",
    "thunder",
    "velvet",
    "compass",
    "island",
    "orchard",
    "lantern",
]
SETTLE = 0.1


@dataclass(slots=True)
class Tally:
    """What was compared."""

    requests: int = 0
    tokens: int = 0
    wrong: int = 0
    over: int = 0
    predicted: int = 0
    actual: int = 0
    inexact: int = 0
    misses: list[str] = field(default_factory=list)

    def add(self, kind: str, worker: str, prompt: int, predicted: int, actual: int) -> None:
        """Count one request: tokens in its prompt, predicted to be cached, and really cached."""
        self.requests += 1
        self.tokens += prompt
        self.predicted += predicted
        self.actual += actual
        self.wrong += abs(predicted - actual)
        self.over += max(0, predicted - actual)
        if predicted != actual:
            self.misses.append(f"{kind} at {worker}: {prompt} tokens, predicted {predicted}, cached {actual}")

    def __str__(self) -> str:
        right = 100 * (1 - self.wrong / self.tokens) if self.tokens else 100.0
        return (
            f"{self.requests} requests, {self.tokens:,} prompt tokens: {right:.3f} % predicted right; "
            f"predicted {self.predicted:,} cached, really {self.actual:,}, {len(self.misses)} requests wrong "
            f"({self.over:,} tokens too many), {self.inexact} prompts not exact"
        )


class Talk:
    """Makes requests that have something in common with earlier ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._systems = [self._text(count) for count in (60, 150, 300)]
        self._open: list[list[dict[str, str]]] = []

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(words))

    def request(self) -> tuple[str, str, dict[str, Any], list[dict[str, str]] | None]:
        """Kind, path, body, and the conversation that the answer belongs to."""
        rng = self._rng
        kind = rng.choices(("new", "follow-up", "shared", "salted", "completion", "again"), (25, 30, 20, 10, 10, 5))[0]
        if kind == "completion":
            return (
                kind,
                COMPLETIONS,
                {"prompt": rng.choice(self._systems)[:400] + self._text(rng.randrange(5, 80))},
                None,
            )
        if kind in ("follow-up", "again") and self._open:
            turns = rng.choice(self._open[-12:])
            if kind == "again":
                return (
                    kind,
                    CHAT,
                    {"messages": [turn for turn in turns if turn is not turns[-1] or turn["role"] == "user"]},
                    None,
                )
            turns.append({"role": "user", "content": self._text(rng.randrange(5, 60))})
        else:
            turns = [{"role": "user", "content": self._text(rng.randrange(20, 250))}]
            if kind in ("shared", "salted") or rng.random() < 0.3:
                turns.insert(0, {"role": "system", "content": rng.choice(self._systems)})
            self._open.append(turns)
        body: dict[str, Any] = {"messages": list(turns)}
        if kind == "salted":
            body["cache_salt"] = rng.choice(("tenant-a", "tenant-b"))
            return kind, CHAT, body, None
        return kind, CHAT, body, turns


class ReadsEvents:
    """A policy that says what it needs; nothing is decided here."""

    name = "truth"
    knowledge = "events"

    def decide(self, request: Any, candidates: Any) -> None:
        """Nothing."""


class Truth:
    """One run against some workers."""

    def __init__(self, arguments: argparse.Namespace, feeds: Feeds, prompter: Prompter, http: aiohttp.ClientSession):
        self._model = arguments.model
        self._hurry = arguments.hurry
        self._feeds = feeds
        self._prompter = prompter
        self._http = http
        self.tally = Tally()

    async def ask(self, worker: str, url: str, kind: str, path: str, body: dict[str, Any]) -> str | None:
        """Predict, send, compare; the answer's text."""
        prompt = await self._prompter.prompt(path, body, 0)
        if prompt.how is not How.EXACT:
            self.tally.inexact += 1
        root = self._feeds.index.hasher.root(self._model, None, body.get("cache_salt"))
        chains = self._feeds.index.hasher.chains(root, prompt.ids, self._feeds.block_sizes)
        match = self._feeds.match(chains).get(worker, NO_MATCH)
        before = self._seq(worker)
        expectation = self._feeds.sent(worker, chains, match) if self._hurry else None
        sent = {**body, "model": self._model, "max_tokens": 8, "temperature": 0.0}
        async with self._http.post(url + path, json=sent) as response:
            answer = await response.json()
            if response.status != 200:
                print(f"{kind} answered {response.status}: {str(answer)[:200]}")
                return None
        if expectation is not None:
            expectation.settle(time.monotonic())
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if usage["prompt_tokens"] != prompt.token_count:
            print(f"{kind}: {prompt.token_count} tokens here, {usage['prompt_tokens']} there")
        self.tally.add(kind, worker, usage["prompt_tokens"], match.tokens, cached)
        if not self._hurry:
            deadline = time.monotonic() + SETTLE
            while self._seq(worker) == before and time.monotonic() < deadline:  # noqa: ASYNC110 - it asks from outside
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)
        choice = answer["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]

    def _seq(self, worker: str) -> int | None:
        return next(row.last_seq for row in self._feeds.snapshot() if row.worker == worker)


async def drive(truth: Truth, worker: str, url: str, count: int, seed: int) -> None:
    talk = Talk(random.Random(seed))
    for _ in range(count):
        kind, path, body, turns = talk.request()
        try:
            text = await truth.ask(worker, url, kind, path, body)
        except aiohttp.ClientError as error:
            print(f"{worker}: {type(error).__name__}")
            return
        if turns is not None and text is not None:
            turns.append({"role": "assistant", "content": text})


async def run(arguments: argparse.Namespace) -> Tally:
    """Follow the workers, then ask all of them at once, each one request after the other."""
    sections = tuple(WorkerSection(url=url, driver=arguments.driver) for url in arguments.worker)
    fleets = Fleets.from_config(
        Config(models=(Model(name=arguments.model, workers=sections),)), lambda _: ReadsEvents()
    )
    prompter = Prompter(PromptTokenizer.from_directory(arguments.tokenizer))
    session = open_session()
    feeds = Feeds(PrefixIndex(Hasher(random.getrandbits(32))), fleets, session)
    feeds.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
            truth = Truth(arguments, feeds, prompter, http)
            deadline = time.monotonic() + 10
            while not all(row.status == "events" for row in feeds.snapshot()) and time.monotonic() < deadline:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
            for row in feeds.snapshot():
                print(
                    f"{row.worker}: {row.status}, block size {row.block_size} ({row.block_size_origin}), {row.capacity} blocks"
                )
            share = arguments.requests // len(sections)
            workers = [worker for fleet in fleets for worker in fleet.workers]
            await asyncio.gather(
                *(drive(truth, each.id, each.url, share, arguments.seed + at) for at, each in enumerate(workers))
            )
            for row in feeds.snapshot():
                print(
                    f"{row.worker}: {row.status}, blocks {row.blocks}, counters {row.counters}, problems {row.problems}"
                )
            for sentence in feeds.degraded(arguments.model):
                print(f"degraded: {sentence}")
            return truth.tally
    finally:
        await feeds.stop()
        prompter.close()
        await session.close()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--worker", action="append", default=[], metavar="URL", help="repeatable")
    made.add_argument("--tokenizer", type=Path, metavar="DIR", help="the workers' own")
    made.add_argument("--model", help="as the workers call it")
    made.add_argument("--driver", default="vllm")
    made.add_argument("--requests", type=int, default=500)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--hurry", action="store_true", help="do not wait for a request's events before the next one")
    return made


def main() -> None:
    """Print the figures, and the first requests that were predicted wrong."""
    arguments = parser().parse_args()
    if not (arguments.worker and arguments.tokenizer and arguments.model):
        print("needs real workers: --worker URL --tokenizer DIR --model NAME")  # so `make bench` has nothing to do here
        return
    tally = uvloop.run(run(arguments))
    for miss in tally.misses[:10]:
        print("  ", miss)
    print(tally)


if __name__ == "__main__":
    main()
