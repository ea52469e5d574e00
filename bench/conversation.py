"""What a long conversation's turn costs, from the request's bytes to the decision and back to the books.

    python -m bench.conversation [--tokenizer DIRECTORY] [--words 80000] [--messages 100] [--workers 8]

A conversation that was seen before, an answer and a question of 200 tokens added to it: JSON is parsed, the prompt made and hashed, matched against
workers that follow events (the first holds all of it, the others less and less), and `kvaware` decides; then the request is counted and what was sent
is noted. CPU time of the process, the least of several runs. The second part is a document never seen before: how long the event loop is kept from anything else
while it is tokenized in a thread, hashed and matched. Qwen3's tokenizer and template.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import orjson
import uvloop

from bench.prompt import conversation, load, text
from gateway.config.schema import Capabilities, Config, Model
from gateway.config.schema import Worker as WorkerSection
from gateway.fleet.asking import open_session
from gateway.fleet.fleet import Fleets
from gateway.http.body import parse_json
from gateway.http.splice import with_token_ids
from gateway.prefix.hot import HotPrefixes
from gateway.prefix.index import PrefixIndex
from gateway.prefix.lookup import Lookup, Matcher
from gateway.prefix.map import Expectation
from gateway.prefix.mirror import Mirror
from gateway.prefix.truth import Truth
from gateway.prompt.blocks import Chain, Hasher
from gateway.prompt.chain_cache import ChainCache
from gateway.prompt.guard import GuardedPrompter
from gateway.prompt.parity import Parity
from gateway.prompt.passing import TokenPassing
from gateway.prompt.prompter import Prompter, PromptLimits
from gateway.prompt.tokenizer import PromptTokenizer
from policies.base import NO_MATCH, Match, RouteRequest
from policies.registry import Registry

if TYPE_CHECKING:
    from gateway.fleet.worker import Worker
    from gateway.prefix.feed import Feeds

CHAT: Final = "/v1/chat/completions"
MODEL: Final = "m"
BLOCK: Final = 16
ROUNDS: Final = 30
TARGET_MS: Final = 2.0
"""What the project set itself for the warm turn."""


class Followed(PrefixIndex):
    """Stands for `Feeds` over workers whose events have all come: the index itself, without sockets."""

    def sent(self, worker: str, chains: Mapping[int, Chain], held: Match = NO_MATCH, **_: Any) -> Expectation | None:
        """As `Feeds` does it with a prompt whose tokens are known."""
        return super().sent(worker, chains, held)


class Gate:
    """The parts of a gateway between a request's bytes and its decision."""

    def __init__(self, tokenizer: PromptTokenizer, workers: int, session: Any) -> None:
        sections = tuple(
            WorkerSection(url=f"http://10.0.0.{n}:8000", driver="vllm", capabilities=Capabilities(block_size=BLOCK))
            for n in range(workers)
        )
        config = Config(models=(Model(name=MODEL, policy="kvaware", workers=sections),))
        registry = Registry.default()
        fleets = Fleets.from_config(config, lambda name: registry.build(name, config.policies))
        (self.fleet,) = fleets
        for worker in self.fleet.workers:
            worker.routable = True
        self.index = Followed(Hasher(1))
        for worker in self.fleet.workers:
            self.index.follow(worker.id, MODEL, block_size=BLOCK)
        self.prompter = Prompter(tokenizer)
        self.patient = Prompter(tokenizer, limits=PromptLimits(inline_new=10**9, deadline=60.0))
        self.patient._cache = self.prompter._cache  # noqa: SLF001  # no public way to share a cache, and none needed but here
        parity = Parity(MODEL, self.prompter, session)
        self.matcher = Matcher(
            MODEL,
            GuardedPrompter(self.prompter, parity),
            parity=parity,
            passing=TokenPassing("off", parity, session),
            chains=ChainCache(self.index.hasher),
            feeds=cast("Feeds", self.index),
            truth=Truth(),
            hot=HotPrefixes(),
        )

    def hold(self, body: Mapping[str, Any]) -> None:
        """Let the first worker hold all of a prompt, the second all but an eighth, and so on."""
        prompt = self.patient.now(CHAT, body)
        assert prompt is not None
        root = self.index.hasher.root(MODEL)
        hashes = self.index.hasher.chains(root, prompt.ids, [BLOCK])[BLOCK].hashes
        workers = self.fleet.workers
        for at, worker in enumerate(workers):
            mirror = self.index.workers[worker.id]
            assert isinstance(mirror, Mirror)
            assert mirror.map is not None
            assert mirror.holder is not None
            mirror.map.store(mirror.holder, hashes[: len(hashes) * (len(workers) - at) // len(workers)])

    def decide(self, raw: bytes) -> Lookup:
        """As `gateway.http.proxy` does it."""
        parsed = parse_json(raw)
        lookup = self.matcher.now(CHAT, parsed, len(raw))
        assert lookup is not None, "a warm conversation must not need a thread"
        self.choose(parsed, lookup)
        return lookup

    def choose(self, parsed: Mapping[str, Any], lookup: Lookup) -> None:
        """Decide, count and note."""
        request = RouteRequest(model=MODEL, path=CHAT, body=parsed, now=1.0)
        request.prompt_tokens = lookup.prompt.token_count
        decision = self.fleet.policy.decide(request, lookup.candidates(self.fleet.candidates))
        assert decision is not None
        worker = cast("Worker", decision.chosen.worker)
        lease = worker.acquire(request.prompt_tokens, request.prompt_tokens - decision.chosen.match.tokens)
        self.matcher.sent(worker.id, lookup, 1.0)
        lease.release()


def warm(gate: Gate, words: int, messages: int) -> tuple[int, dict[str, float]]:
    """Tokens of the prompt; least seconds of the whole and of its parts."""
    rng = random.Random(1)
    turns = conversation(rng, messages + 1, words)
    gate.hold({"messages": turns})
    least: dict[str, float] = {}
    count = 0

    def took(part: str, since: float) -> None:
        least[part] = min(least.get(part, 1e9), time.process_time() - since)

    for number in range(ROUNDS):
        turn = [{"role": "assistant", "content": text(rng, 100)}, {"role": "user", "content": text(rng, 100)}]
        raw = orjson.dumps({"model": MODEL, "messages": [*turns, *turn]})
        if number < 2:  # the conversation's first requests: its chain and its shape are learnt
            gate.patient.now(CHAT, parse_json(raw), len(raw))
            gate.decide(raw)
            continue
        start = time.process_time()
        lookup = gate.decide(raw)
        took("all", start)
        count = lookup.prompt.token_count
        parts(gate, raw, lookup, took)
    return count, least


def parts(gate: Gate, raw: bytes, lookup: Lookup, took: Any) -> None:
    """The same again in pieces; what only the first time costs, encoding 200 tokens, is the rest."""
    start = time.process_time()
    parsed = parse_json(raw)
    took("JSON", start)
    start = time.process_time()
    prompt = gate.prompter.now(CHAT, parsed, len(raw))
    took("prompt, its tokens known", start)
    assert prompt is not None
    start = time.process_time()
    chains = gate.matcher._chains.chains(prompt, gate.index.hasher.root(MODEL), [BLOCK])  # noqa: SLF001
    took("chain, its segments known", start)
    start = time.process_time()
    gate.index.match(chains)
    took("match", start)
    start = time.process_time()
    gate.choose(parsed, lookup)
    took("decision and notes", start)
    start = time.process_time()
    with_token_ids(raw, parsed, prompt.json)
    took("not in it: ids put into the body", start)


async def cold(tokenizer: PromptTokenizer, words: int, workers: int, session: Any) -> tuple[float, float]:
    """Seconds until a new document is decided on, and the longest time that the loop let a timer wait; least of five."""
    rng = random.Random(3)
    results: list[tuple[float, float]] = []
    for _ in range(5):
        gate = Gate(tokenizer, workers, session)
        gate.prompter._limits = PromptLimits(deadline=60.0)  # noqa: SLF001  # other programs must not turn it approximate
        raw = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": text(rng, words)}]})
        results.append(await watched(gate, raw))
        gate.prompter.close()
    return min(wall for wall, _ in results), min(delay for _, delay in results)


async def watched(gate: Gate, raw: bytes) -> tuple[float, float]:
    """One cold request beside a timer."""
    done = asyncio.Event()
    delays: list[float] = []

    async def timer() -> None:
        while not done.is_set():
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            delays.append(time.perf_counter() - due)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(timer())
        await asyncio.sleep(0.01)
        start = time.perf_counter()
        parsed = parse_json(raw)
        assert gate.matcher.now(CHAT, parsed, len(raw)) is None
        gate.choose(parsed, await gate.matcher.lookup(CHAT, parsed, len(raw)))
        wall = time.perf_counter() - start
        done.set()
    return wall, max(delays)


def report(tokens: int, least: Mapping[str, float]) -> None:
    total = least["all"] * 1e3
    print(f"warm turn of 200 tokens, {tokens:,} in all: {total:.2f} ms CPU from bytes to decision (target {TARGET_MS})")
    for part, seconds in least.items():
        if part != "all":
            print(f"    {part:34} {seconds * 1e3:8.3f} ms")


async def run(arguments: argparse.Namespace) -> None:
    tokenizer = load(arguments.tokenizer)
    async with open_session() as session:
        sizes: Sequence[int] = arguments.messages or (20, 100, 400)
        for messages in sizes:
            gate = Gate(tokenizer, arguments.workers, session)
            print(f"{messages} messages, {arguments.workers} workers:")
            report(*warm(gate, arguments.words, messages))
            gate.prompter.close()
        wall, delay = await cold(tokenizer, arguments.words, arguments.workers, session)
        print(
            f"cold document of {arguments.words:,} words: decided after {wall * 1e3:.0f} ms, loop delayed {delay * 1e3:.1f} ms at most"
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokenizer", help="a model's directory; default: the Qwen3 tokenizer of the tests")
    made.add_argument("--words", type=int, default=80_000, help="of the conversation; some 100,000 tokens")
    made.add_argument("--messages", type=int, action="append", help="of the conversation; default: 20, 100 and 400")
    made.add_argument("--workers", type=int, default=8)
    return made


def main() -> None:
    """Print the figures."""
    uvloop.run(run(parser().parse_args()))


if __name__ == "__main__":
    main()
