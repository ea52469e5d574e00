"""What the prefix map costs: look-ups, stores, removals, decoding and memory. Run as ``python -m bench.prefix``.

Times are CPU microseconds (`time.process_time`), the least of several rounds: other programs on the machine make a round
slower, never faster. Dynamo's RadixTree (PyPI ai-dynamo-runtime) is measured beside it, on the same sequences, where it can
be imported.
"""

import argparse
import gc
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from msgspec import msgpack

from gateway.prefix.events import decode
from gateway.prefix.holders import Holder, Tier
from gateway.prefix.map import PrefixMap
from gateway.prefix.mirror import Mirror
from gateway.prompt.blocks import Hasher, pack

ROUNDS: Final = 25
SEQUENCES: Final = 64
BLOCKS: Final = 512
SIZE: Final = 16
"""Tokens per block."""
VOCABULARY: Final = 150_000


@dataclass(frozen=True, slots=True)
class Row:
    """One result beside what the project set itself."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = True

    def __str__(self) -> str:
        if self.target is None:
            return f"{self.name:<72}{self.value:>12,.3f} {self.unit}"
        met = self.value <= self.target if self.at_most else self.value >= self.target
        sign = "<=" if self.at_most else ">="
        return (
            f"{self.name:<72}{self.value:>12,.3f} {self.unit}  ({sign} {self.target:,g}: {'met' if met else 'MISSED'})"
        )


def least(work: Callable[[], Any], rounds: int = ROUNDS, before: Callable[[], Any] | None = None) -> float:
    """CPU microseconds of the cheapest of `rounds` runs of `work`; `before` runs ahead of each, uncounted."""
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            if before is not None:
                before()
            start = time.process_time_ns()
            work()
            best = min(best, time.process_time_ns() - start)
    finally:
        gc.enable()
    return best / 1000


class Traffic:
    """64 sequences of 512 blocks in 4 families, and what becomes of them on a fleet.

    A family shares its first 64 blocks (a system prompt with tools). Each sequence is held whole by one worker, in part (a
    shorter conversation with the same beginning) by another, and its family's beginning by every third worker.
    """

    def __init__(self, workers: int) -> None:
        self.rng = random.Random(7)
        self.hasher = Hasher(seed=7)
        self.root = self.hasher.root("m")
        self.stems = [self.tokens(64) for _ in range(4)]
        self.prompts = [[*self.stems[n % 4], *self.tokens(BLOCKS - 64)] for n in range(SEQUENCES)]
        self.chains = [self.chain(prompt) for prompt in self.prompts]
        # What is asked: the next turn of a held conversation, a new one of a known family, and something new altogether.
        self.next_turns = [self.chain([*prompt[: -12 * SIZE], *self.tokens(12)]) for prompt in self.prompts]
        self.new_in_family = [self.chain([*self.stems[n % 4], *self.tokens(BLOCKS - 64)]) for n in range(SEQUENCES)]
        self.misses = [self.chain(self.tokens(BLOCKS)) for _ in range(SEQUENCES)]
        self.map = PrefixMap(SIZE)
        self.holders = [self.map.join(f"w{number}") for number in range(workers)]
        for holder, number, blocks in self.holdings(workers):
            self.map.store(self.holders[holder], self.chains[number][:blocks])

    def holdings(self, workers: int) -> Iterator[tuple[int, int, int]]:
        """Triples of worker, sequence and how many leading blocks it holds."""
        rng = random.Random(8)
        for number in range(SEQUENCES):
            yield number % workers, number, BLOCKS
            yield (number * 7 + 3) % workers, number, rng.randrange(64, BLOCKS)
        for worker in range(0, workers, 3):
            for family in range(4):
                yield worker, family, 64

    def tokens(self, blocks: int) -> list[int]:
        """New text."""
        return [self.rng.randrange(VOCABULARY) for _ in range(blocks * SIZE)]

    def chain(self, tokens: list[int]) -> list[int]:
        """Its hashes."""
        return self.hasher.chain(self.root, tokens, SIZE).hashes


def chains() -> Iterator[Row]:
    """Hashing."""
    hasher = Hasher(seed=7)
    root = hasher.root("m")
    rng = random.Random(7)
    for size in (16, 32):
        tokens = [rng.randrange(VOCABULARY) for _ in range(size * BLOCKS)]
        packed = pack(tokens)
        yield Row(
            f"chain of {BLOCKS} blocks of {size} tokens, packed ids: per block",
            least(lambda packed=packed, size=size: hasher.blocks(root, packed, size), 100) / BLOCKS,
            "us",
            0.35,
        )
        yield Row(f"  packing a list of ids: per block of {size}", least(lambda t=tokens: pack(t), 100) / BLOCKS, "us")


def match_us(prefix_map: PrefixMap, prompts: list[list[int]], *, spell_out: bool = False) -> float:
    """CPU microseconds of one look-up."""
    match = prefix_map.match
    if spell_out:
        return least(lambda: [match(each).held() for each in prompts], 40) / len(prompts)
    return least(lambda: [match(each) for each in prompts], 60) / len(prompts)


def look_ups() -> Iterator[Row]:
    """Matching."""
    for workers, target in ((8, 3.0), (256, 10.0), (1024, None)):
        traffic = Traffic(workers)
        kinds = {
            "held whole": traffic.chains,
            "next turn": traffic.next_turns,
            "new, known family": traffic.new_in_family,
            "miss": traffic.misses,
        }
        costs = {}
        for kind, prompts in kinds.items():
            costs[kind] = match_us(traffic.map, prompts)
            yield Row(f"match of {BLOCKS} blocks, {workers} workers: {kind}", costs[kind], "us")
        yield Row(f"match of {BLOCKS} blocks, {workers} workers: mean", sum(costs.values()) / len(costs), "us", target)
        spelled = match_us(traffic.map, traffic.next_turns, spell_out=True)
        yield Row(f"  next turn, and spelled out per worker ({workers})", spelled, "us")
    traffic = Traffic(8)
    for chain in traffic.chains:
        traffic.map.store(traffic.holders[0], chain, Tier.L1)
    yield Row(
        "  next turn, 8 workers, one with all of it in l1 only (walked, exact)",
        match_us(traffic.map, traffic.next_turns),
        "us",
    )


def updates() -> Iterator[Row]:
    """Storing and removing."""
    blocks = SEQUENCES * BLOCKS
    traffic = Traffic(8)
    new = [traffic.chain(traffic.tokens(BLOCKS)) for _ in range(SEQUENCES)]
    holder = traffic.holders[5]

    def store(chains: list[list[int]]) -> None:
        for chain in chains:
            traffic.map.store(holder, chain)

    def remove(chains: list[list[int]]) -> None:
        for chain in chains:
            traffic.map.remove(holder, chain)

    def remove_one_by_one() -> None:
        for chain in new:
            for block in chain:
                traffic.map.remove(holder, (block,))

    yield Row(
        "store, blocks nobody holds: per block",
        least(lambda: store(new), before=lambda: remove(new)) / blocks,
        "us",
        0.5,
    )
    yield Row(
        "store, blocks others hold: per block",
        least(lambda: store(traffic.chains), before=lambda: remove(traffic.chains)) / blocks,
        "us",
        0.5,
    )
    yield Row("remove: per block", least(lambda: remove(new), before=lambda: store(new)) / blocks, "us", 0.5)
    yield Row(
        "remove, one call a block: per block",
        least(remove_one_by_one, before=lambda: store(new)) / blocks,
        "us",
        0.5,
    )
    yield Row("clear of a worker with 32,768 blocks", least(lambda: traffic.map.clear(holder), 10), "us")


def payloads(traffic: Traffic, blocks_per_event: int) -> tuple[list[bytes], list[bytes]]:
    """What vLLM (map form) sends to store all prompts, and to remove all their blocks one by one, 22 a batch."""
    stored, removed = [], []
    for prompt in traffic.prompts:
        hashes = [traffic.rng.getrandbits(64) for _ in range(BLOCKS)]
        for start in range(0, BLOCKS, blocks_per_event):
            end = start + blocks_per_event
            event = {
                "type": "BlockStored",
                "block_hashes": hashes[start:end],
                "parent_block_hash": hashes[start - 1] if start else None,
                "token_ids": prompt[start * SIZE : end * SIZE],
                "block_size": SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * blocks_per_event,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
            stored.append(msgpack.encode([1.5, [event], 0]))
        backward = hashes[::-1]
        for start in range(0, BLOCKS, 22):
            events = [
                {"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU", "group_idx": 0}
                for each in backward[start : start + 22]
            ]
            removed.append(msgpack.encode([1.5, events, 0]))
    return stored, removed


def decoding() -> Iterator[Row]:
    """From a worker's bytes to the map."""
    blocks = SEQUENCES * BLOCKS
    for blocks_per_event in (512, 8, 1):
        traffic = Traffic(8)
        stored, removed = payloads(traffic, blocks_per_event)
        mirror = Mirror("w", "m", traffic.hasher, lambda _, m=traffic.map: m)

        def feed(messages: list[bytes], mirror: Mirror = mirror) -> None:
            for message in messages:
                mirror.apply(decode(message), 0.0)

        spent = least(lambda stored=stored: feed(stored), 8, before=mirror.forget)
        yield Row(
            f"decode and store, {blocks_per_event} blocks of {SIZE} tokens an event",
            blocks / spent * 1e6,
            "blocks/s",
            300_000 if blocks_per_event > 1 else None,
            at_most=False,
        )

        def again(mirror: Mirror = mirror, stored: list[bytes] = stored) -> None:
            mirror.forget()
            feed(stored, mirror)

        spent = least(lambda removed=removed: feed(removed), 8, before=again)
    yield Row(
        "decode and remove, one block an event, 22 a batch", blocks / spent * 1e6, "blocks/s", 300_000, at_most=False
    )


def memory() -> Iterator[Row]:
    """Bytes a block, of blocks that one worker holds, while a dict fills up from just grown to just before it grows."""
    hasher = Hasher(seed=7)
    root = hasher.root("m")
    rng = random.Random(7)

    def fill(count: int, *, mirrored: bool) -> float:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        prefix_map = PrefixMap(SIZE)
        mirror = Mirror("w", "m", hasher, lambda _: prefix_map)
        holder: Holder = prefix_map.join("w")
        for _ in range(count // BLOCKS):
            tokens = [rng.randrange(VOCABULARY) for _ in range(SIZE * BLOCKS)]
            if mirrored:
                hashes = [rng.getrandbits(64) for _ in range(BLOCKS)]
                event = ["BlockStored", hashes, None, tokens, SIZE]
                mirror.apply(decode(msgpack.encode([0.0, [event]])), 0.0)
            else:
                prefix_map.store(holder, hasher.chain(root, tokens, SIZE).hashes)
            tokens = hashes = event = None  # type: ignore[assignment]
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return taken / (count // BLOCKS * BLOCKS)

    counts = (90_000, 120_000, 170_000)
    alone = [fill(count, mirrored=False) for count in counts]
    with_mirror = [fill(count, mirrored=True) for count in counts]
    for count, value, mirrored in zip(counts, alone, with_mirror, strict=True):
        yield Row(f"map alone, {count:,} blocks: per block", value, "bytes")
        yield Row(f"  with the engine's hashes (mirror), {count:,} blocks: per block", mirrored, "bytes")
    yield Row("map alone, mean over a dict's fill: per block", sum(alone) / len(alone), "bytes", 90)
    yield Row("  with the engine's hashes (mirror), mean: per block", sum(with_mirror) / len(with_mirror), "bytes")


def dynamo() -> Iterator[Row]:
    """The same look-ups and stores with Dynamo's RadixTree, where it is installed."""
    try:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found]  # noqa: PLC0415
    except ImportError:
        return
    workers = 8
    traffic = Traffic(workers)
    events = []
    for number, (worker, sequence, blocks) in enumerate(traffic.holdings(workers)):
        chain = traffic.chains[sequence][:blocks]
        stored = {
            "parent_hash": None,
            "blocks": [{"block_hash": each, "tokens_hash": each} for each in chain],
        }
        event = {"event_id": number, "data": {"stored": stored}, "dp_rank": 0}
        events.append((worker, blocks, json.dumps(event).encode()))
    tree = RadixTree()

    def store() -> None:
        for worker, _, payload in events:
            tree.apply_event(worker, payload)
        tree.find_matches(traffic.misses[0])  # events are applied by a thread of its own: wait until it is through

    spent = least(store, 5)
    assert max(tree.find_matches(traffic.chains[0]).scores.values()) == BLOCKS
    yield Row("Dynamo RadixTree, store with its JSON: per block", spent / sum(each[1] for each in events), "us")
    for kind, prompts in (("held whole", traffic.chains), ("next turn", traffic.next_turns), ("miss", traffic.misses)):
        spent = least(lambda prompts=prompts: [tree.find_matches(each) for each in prompts])
        yield Row(f"Dynamo RadixTree, match of {BLOCKS} blocks, 8 workers: {kind}", spent / SEQUENCES, "us")


PARTS: Final = {
    "chains": chains,
    "match": look_ups,
    "updates": updates,
    "decoding": decoding,
    "memory": memory,
    "dynamo": dynamo,
}


def main() -> None:
    """Print all parts, or those named."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    for name in parser.parse_args().parts or PARTS:
        for row in PARTS[name]():
            print(row, flush=True)


if __name__ == "__main__":
    main()
