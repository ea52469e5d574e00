"""How much better than LRU the gateway's model of keeping is, in one pooled cache of the fleet's size: ``python -m bench.keeping DIR``.

Token hit rates of LRU, of the same cache with the claims that `bench.keeping_model` makes inside requests and when answers have
ended, of Belady's optimum, which knows the future, of an LRU that is told what will never come back, and of an infinite cache. Blocks of
512 tokens, requests in the order of their arrival. Each for the whole of the traffic and for its second half. Time is the model's CPU time. `DIR` has the public traces; without it only the generated workloads are run.
"""

import argparse
import heapq
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.keeping_model.model import KeepingModel
from simulator.workloads import Workload, generate, load

BLOCK: Final = 512
ITL: Final = 0.02
NEVER: Final = float("inf")
Request = tuple[float, int, int, list[int]]
"""Arrival, prompt tokens, output tokens, chain."""
Worth = Callable[[int, Request, float], Sequence[float]]
TRACES: Final[Sequence[tuple[str, str, str, dict[str, Any]]]] = (
    ("synthetic", "synthetic_trace.jsonl", "mooncake", {}),
    ("conversation", "conversation_trace.jsonl", "mooncake", {}),
    ("Weka", "weka_claude_code_ranges.jsonl", "weka", {"loop": "open"}),
)
MADE: Final[Sequence[tuple[str, dict[str, Any], int]]] = (
    ("chat", {"users": 800, "rate": 1.0, "block_tokens": 512}, 1200),
    ("documents", {"readers": 600, "block_tokens": 512}, 600),
    ("groups", {"block_tokens": 512}, 900),
)
"""Generator, its numbers, and blocks of the cache."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    os.nice(10)
    print(
        "| traffic, blocks | LRU | ours | of the way | Belady | told what never returns | infinite | 2nd half: LRU | ours | Belady | us/request |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    if arguments.traces is not None:
        for name, file, kind, options in TRACES:
            if arguments.only in name:
                path = next(path for end in ("", ".gz") for path in sorted(arguments.traces.rglob(file + end)))
                requests = requests_of(load(path, kind, **options))
                for cap in (4800, 19200):
                    row(name, requests, cap)
    for name, numbers, cap in MADE:
        if arguments.only in name:
            row(name, requests_of(generate(name, **numbers)), cap)


def row(name: str, requests: Sequence[Request], cap: int) -> None:
    """One line of it."""
    lru = pooled(requests, cap, None)
    ours = pooled(requests, cap, KeepingModel(BLOCK, BLOCK * cap))
    nexts = next_uses(requests)
    best = oracle(requests, cap, lambda index: [-use for use in nexts[index]])
    told = oracle(requests, cap, lambda index: [index if use < NEVER else -1 for use in nexts[index]])
    infinite = pooled(requests, 1 << 40, None)
    way = (ours[0] - lru[0]) / max(1e-9, best[0] - lru[0]) if best[0] - lru[0] > 0.0005 else 0.0
    print(
        f"| {name}, {cap:,} | {lru[0]:.3f} | {ours[0]:.3f} | {way:.0%} | {best[0]:.3f} | {told[0]:.3f} | {infinite[0]:.3f} "
        f"| {lru[1]:.3f} | {ours[1]:.3f} | {best[1]:.3f} | {ours[2]:.1f} |",
        flush=True,
    )


def requests_of(workload: Workload) -> list[Request]:
    """Chains of whole blocks of 512 tokens."""
    each = max(1, BLOCK // workload.block_tokens)
    ids: dict[Any, int] = {}
    found: list[Request] = []
    ended: dict[str, float] = {}
    for request in workload.requests:
        # Closed loops: an answer takes as long as its tokens.
        begin = request.time if request.after is None else max(request.time, ended[request.after] + request.delay)
        ended[request.id] = begin + request.output_tokens * ITL
        blocks = list(request.blocks)
        chain: list[int] = []
        before = -1
        for index in range(min(request.prompt_tokens // BLOCK, len(blocks) // each)):
            before = ids.setdefault((before, *blocks[index * each : (index + 1) * each]), len(ids))
            chain.append(hash_of(before))
        found.append((begin, request.prompt_tokens, request.output_tokens, chain))
    found.sort(key=lambda request: request[0])
    return found


def hash_of(number: int) -> int:
    """Spread like a hash: which parts are learned from is decided by it."""
    return (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & ((1 << 62) - 1)


def next_uses(requests: Sequence[Request]) -> list[list[float]]:
    """For each block of each request, the number of the next request that has it."""
    last: dict[int, int] = {}
    found: list[list[float]] = []
    for index in range(len(requests) - 1, -1, -1):
        chain = requests[index][3]
        found.append([last.get(key, NEVER) for key in chain])
        last.update(dict.fromkeys(chain, index))
    found.reverse()
    return found


class Count:
    """Hits so far, and in the second half."""

    def __init__(self, total: int) -> None:
        self.middle = total // 2
        self.hits = [0, 0]
        self.tokens = [0, 0]

    def add(self, index: int, request: Request, cached: Any) -> None:
        """A request finds this in the cache."""
        limit = min(len(request[3]), (request[1] - 1) // BLOCK)
        held = next((number for number in range(limit) if request[3][number] not in cached), limit)
        for half in range(2 if index >= self.middle else 1):
            self.hits[half] += held * BLOCK
            self.tokens[half] += request[1]

    @property
    def rates(self) -> tuple[float, float]:
        """Cached tokens by prompt tokens: of all, and of the second half."""
        return self.hits[0] / self.tokens[0], self.hits[1] / max(1, self.tokens[1])


def oracle(requests: Sequence[Request], cap: int, worth: Callable[[int], Sequence[float]]) -> tuple[float, float]:
    """Evicts what is worth least, as of its latest use; a chain's beginning is worth what its end is at least."""
    cached: dict[int, tuple[float, int, int]] = {}
    heap: list[tuple[tuple[float, int, int], int]] = []
    count = Count(len(requests))
    for index, request in enumerate(requests):
        count.add(index, request, cached)
        best = -NEVER
        for place, (key, value) in enumerate(zip(reversed(request[3]), reversed(worth(index)), strict=True)):
            best = max(best, value)
            cached[key] = (best, index, place)
            heapq.heappush(heap, (cached[key], key))
        while len(cached) > cap:
            entry, key = heapq.heappop(heap)
            if cached.get(key) == entry:
                del cached[key]
    return count.rates


def pooled(requests: Sequence[Request], cap: int, model: KeepingModel | None) -> tuple[float, float, float]:
    """LRU, with the model's claims if there is one: rates as `Count`, and microseconds that the model took for a request.

    A claim holds from its request on until it lapses; what is unclaimed goes first, then least recently used. Claims said when an answer has
    ended take effect when it has.
    """
    cached: dict[int, tuple[int, int, int]] = {}
    heap: list[tuple[tuple[int, int, int], int]] = []
    lapses: list[tuple[float, int, int]] = []
    until: dict[int, float] = {}
    ends: list[tuple[float, int, Any]] = []
    count = Count(len(requests))
    spent = 0.0

    def put(key: int, entry: tuple[int, int, int]) -> None:
        cached[key] = entry
        heapq.heappush(heap, (entry, key))

    def claim(chain: Sequence[int], directives: Sequence[Any], now: float, number: int) -> None:
        for run in directives:
            for key in chain[run.start : run.stop]:
                if key in cached:
                    until[key] = now + run.ttl if run.priority > 50 else now
                    heapq.heappush(lapses, (until[key], number, key))
                    put(key, (run.priority, *cached[key][1:]))

    for index, request in enumerate(requests):
        now, _, output, chain = request
        while model is not None and ends and ends[0][0] <= now:
            end, number, kept = heapq.heappop(ends)
            begun = time.process_time()
            directives = model.answered(kept, requests[number][2], end)
            spent += time.process_time() - begun
            claim(requests[number][3], directives, end, number)
        while lapses and lapses[0][0] <= now:
            lapsed, _, key = heapq.heappop(lapses)
            if until.get(key) == lapsed and key in cached:
                del until[key]
                put(key, (50, *cached[key][1:]))
        count.add(index, request, cached)
        for place, key in enumerate(reversed(chain)):
            put(key, (cached[key][0] if key in cached else 50, index, place))
        if model is not None:
            begun = time.process_time()
            kept = model.asked(chain, now)
            spent += time.process_time() - begun
            claim(chain, kept.directives, now, index)
            heapq.heappush(ends, (now + output * ITL, index, kept))
        while len(cached) > cap:
            entry, key = heapq.heappop(heap)
            if cached.get(key) == entry:
                del cached[key]
                until.pop(key, None)
    return (*count.rates, spent / len(requests) * 1e6)


if __name__ == "__main__":
    main()
