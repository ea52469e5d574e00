"""The gateway in front of real LMCache 0.5.6 servers and real vLLM workers on the CPU, and what comes of its hints there.

``python -m bench.lmcache_live ENGINE`` (see `bench.lmcache_stack`; five minutes) prints figures as JSON. Exit status 1 if one of these does not hold:

* `tiers`: after conversations that evict each other, the map has every chunk of every prompt in the tiers that the coordinator names;
* `killed`: ten turns on worker A, A is killed; the next turn waits for its turn at B, its history is prefetched meanwhile, and
  `cached_tokens` covers all of its whole blocks;
* `loads`: the first token of a follow-up question with its history in l1, against the same with the history in l2 (no hint);
* `pins`: pinned chunks stay where a quota evicts the others, and go when they are unpinned;
* `controller`: the older controller's lookup, copy, pin and clear, with fake workers.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from backends.hints import chunks
from backends.hints.base import HintDriver
from backends.hints.lmcache import LMCacheDriver
from backends.hints.lmcache_common import Place, drop_quota, set_quota
from backends.hints.lmcache_coordinator import Held, LMCacheCoordinatorDriver, lookup, placements
from backends.hints.model import Action, Hint, Subject
from bench.lmcache_controller import controller
from bench.lmcache_stack import CHUNK, Stack
from gateway.app import Gateway
from gateway.config.load import loads
from gateway.fleet.asking import open_session
from gateway.prefix.holders import Tier
from gateway.prefix.index import PrefixIndex
from gateway.residency.calls import Said, make

FLUSH: Final = 2.5
"""Seconds until what a server did shows in the directory: it reports once a second."""
SETTLE: Final = 150.0
"""Seconds within which the map must agree: a chunk of which nothing changes is asked about every 64."""
TURNS: Final = 10
HISTORY: Final = 40 * CHUNK
"""Tokens: what a server of 2 MB can always take in at once, as it keeps a fifth of its 262 chunks free."""
TALKS: Final = 26
"""Conversations, together more than both servers' memory."""
NOTED: Final = ("rule", "worker", "start", "stop", "source", "target", "driver", "fate", "detail")
"""What is shown of a hint."""


class Live:
    """A stack, a gateway before it, and ways to ask both."""

    def __init__(self, stack: Stack, gateway: Gateway, session: aiohttp.ClientSession, rounds: int) -> None:
        """`rounds`: questions of each kind that are compared."""
        self.rounds = rounds
        self.stack = stack
        self.gateway = gateway
        self.session = session
        self.random = random.Random(7)
        self.place = Place(model=stack.model, chunk=CHUNK)

    @property
    def index(self) -> PrefixIndex:
        """What the gateway knows."""
        feeds = self.gateway._matching.feeds  # noqa: SLF001 - what is measured is inside
        assert feeds is not None
        return feeds.index

    def tokens(self, count: int) -> list[int]:
        """Ids of no meaning."""
        return [self.random.randrange(1000, 100_000) for _ in range(count)]

    async def complete(self, url: str, prompt: Sequence[int], *, output: int = 8, **extra: Any) -> "Answered":
        """A completion, streamed; the ids of its answer are asked for."""
        body = {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **extra,
        }
        started = time.monotonic()
        first = None
        said: list[int] = []
        usage: dict[str, Any] = {}
        async with self.session.post(
            url + "/v1/completions", json=body, timeout=aiohttp.ClientTimeout(120)
        ) as response:
            headers = dict(response.headers)
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if first is None and event.get("choices"):
                    first = time.monotonic() - started
                for choice in event.get("choices", ()):
                    said += choice.get("token_ids") or ()
                usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Answered(first or 0.0, details.get("cached_tokens") or 0, said, headers)

    async def routed(self, prompt: Sequence[int], **extra: Any) -> "Answered":
        """The same through the gateway."""
        return await self.complete(f"http://127.0.0.1:{self.gateway.port}", prompt, **extra)

    async def where(self, prompt: Sequence[int], salt: str | None = None) -> list[Held]:
        """What the coordinator says of a prompt."""
        call = lookup(subject(prompt, salt), len(prompt), self.place)
        assert call is not None
        said = await make(self.session, call, self.stack.coordinator, {}, 10)
        found = placements(said.body)
        assert found is not None, said
        return found

    async def say(self, driver: HintDriver, hint: Hint, url: str) -> dict[str, Any]:
        """Say a hint and wait for its end."""
        call = driver.call(hint)
        assert call is not None
        started = time.monotonic()
        while True:
            said: Said = await make(self.session, call, url, {}, 10)
            answer = driver.read(hint, said.status, said.body)
            if answer.then is None:
                return {
                    "verdict": answer.verdict,
                    "detail": answer.detail or said.error,
                    "seconds": round(time.monotonic() - started, 4),
                }
            if answer.verdict == "pending":
                await asyncio.sleep(0.005)
            call = answer.then


class Answered:
    """What came of a completion: seconds to its first token, `cached_tokens`, the ids of the answer."""

    def __init__(self, first: float, cached: int, ids: list[int], headers: dict[str, str]) -> None:
        self.first = first
        self.cached = cached
        self.ids = ids
        self.headers = headers


def subject(prompt: Sequence[int], salt: str | None = None) -> Subject:
    """A prompt that hints can be about."""
    ids = array("I", prompt)
    return Subject("m", len(ids), {}, lambda: ids, salt)


def hint(action: Action, about: Subject, stop: int | None = None, **fields: Any) -> Hint:
    """About all of it, unless `stop` says less."""
    return Hint(id=1, action=action, rule="bench", worker="", subject=about, stop=stop or about.tokens, **fields)


def configuration(stack: Stack) -> str:
    """Both workers, one request at a time each, the coordinator asked about storage, residency on."""
    lines = [
        "listen: {port: 0}",
        "admin: {port: 0}",
        "residency: {rules: {queued-next: {min_tokens: 64}}}",
        "health: {interval: 1s}",
        "models:",
        "  - name: m",
        f"    tokenizer: {stack.engine / 'model'}",
        f"    l2: {{url: '{stack.coordinator}'}}",
        "    admission: {}",
        "    workers:",
    ]
    for site in stack.sites:
        events = f"tcp://127.0.0.1:{site.events}"
        replay = f"tcp://127.0.0.1:{site.events + 10}"
        hints = f"{{driver: lmcache, url: '{site.hints}', model: '{stack.model}', chunk: {CHUNK}}}"
        lines.append(
            f"      - {{url: '{site.worker}', driver: vllm, kv_events: {{endpoint: '{events}', replay_endpoint: '{replay}'}}, "
            f"limits: {{max_concurrent: 1}}, hints: {hints}}}"
        )
    return "\n".join(lines)


# -- (a) ----------------------------------------------------------------------------------------------------------------


async def tiers(live: Live) -> dict[str, Any]:
    """Conversations on both workers until they evict each other; then the map against the coordinator, chunk by chunk."""
    system = live.tokens(200)
    talks = [system + live.tokens(300) for _ in range(TALKS)]
    cached = 0
    for _ in range(2):
        for number, talk in enumerate(talks):
            answered = await live.routed(talk)
            cached += answered.cached
            talks[number] = talk + answered.ids + live.tokens(40)
    salted = live.tokens(300)
    await live.routed(salted, cache_salt="tenant-1")
    await asyncio.sleep(FLUSH)
    ended = time.monotonic()
    first: dict[str, Any] | None = None
    while True:
        found = await compared(live, [*[(talk, None) for talk in talks], (salted, "tenant-1"), (salted, None)])
        first = first or found
        after = time.monotonic() - ended
        if not found["different"] or after > SETTLE:
            break
        await asyncio.sleep(2.0)
    return {
        "prompts": len(talks) + 2,
        "cached_tokens": cached,
        "at_once": first,
        "in_the_end": found,
        "after_seconds": round(after, 1),
        "ok": not found["different"] and found["l1"] > 0 and found["l2"] > found["l1"],
    }


async def compared(live: Live, prompts: Sequence[tuple[list[int], str | None]]) -> dict[str, Any]:
    """How many (chunk, worker, tier) the map and the coordinator both name, or only one of them; chunks of several prompts count once."""
    same = {"l1": 0, "l2": 0}
    different: dict[str, int] = {}
    seen: set[tuple[str, str | None]] = set()
    index = live.index
    (prefix_map,) = [each for each in index.maps.values() if each.block_size == CHUNK]
    for prompt, salt in prompts:
        chain = index.hasher.chains(index.hasher.root("m", None, salt), array("I", prompt), [CHUNK])[CHUNK]
        for held, block in zip(await live.where(prompt, salt), chain.hashes, strict=False):
            if (held.key.chunk_hash_hex, salt) in seen:
                continue
            seen.add((held.key.chunk_hash_hex, salt))
            matches = prefix_map.match([block], 1).held()
            for site in live.stack.sites:
                worker = f"127.0.0.1:{site.vllm}"
                placed = index.placed(worker)
                near = placed is not None and Tier.L1 in prefix_map.tiers(placed[1], block)
                says = any(each.tier == "l1" and each.instance_id == site.instance for each in held.placements)
                tally(same, different, "l1", near, says)
                match = matches.get(worker)
                far = placed is not None and in_pool(index, prefix_map, block)
                tally(same, different, "l2", far, any(each.tier == "l2" for each in held.placements))
                if says and (match is None or not match.tokens):
                    different["a match is missing"] = different.get("a match is missing", 0) + 1
    return {"chunks": len(seen), **same, "different": different}


def in_pool(index: PrefixIndex, prefix_map: Any, block: int) -> bool:
    """Whether shared storage has a block, by the map."""
    watcher: Any = index.watchers.get("m")
    directory = watcher.directory if watcher is not None else None
    pools = directory._pools if directory is not None else {}  # noqa: SLF001 - what is measured is inside
    return any(Tier.L2 in prefix_map.tiers(pool, block) for pool in pools.values())


def tally(same: dict[str, int], different: dict[str, int], tier: str, ours: bool, theirs: bool) -> None:
    """Count one."""
    if ours and theirs:
        same[tier] += 1
    elif ours != theirs:
        name = f"{tier} only in {'the map' if ours else 'the directory'}"
        different[name] = different.get(name, 0) + 1


# -- (b) ----------------------------------------------------------------------------------------------------------------


async def loads_sooner(live: Live) -> dict[str, Any]:
    """Follow-up questions at B to histories that A computed: with the history prefetched, and without."""
    a, b = live.stack.sites
    rounds = live.rounds
    driver = LMCacheDriver(live.place)
    seconds: dict[str, list[float]] = {"hint": [], "none": []}
    prefetches: list[float] = []
    short = 0
    histories = [live.tokens(HISTORY) for _ in range(2 * rounds)]
    for history in histories:
        await live.complete(a.worker, history, output=1)
        await asyncio.sleep(1.0)  # it makes room once in a while
    await asyncio.sleep(FLUSH)
    await live.complete(b.worker, live.tokens(400), output=1)  # the first request of a process is slow
    for number, history in enumerate(histories):
        how = "hint" if number % 2 == 0 else "none"
        if how == "hint":
            said = await live.say(driver, hint(Action.PREFETCH, subject(history), source="l2", target="l1"), b.hints)
            if said["verdict"] != "accepted":
                raise RuntimeError(f"prefetch: {said}")
            prefetches.append(said["seconds"])
        answered = await live.complete(b.worker, history + live.tokens(20), output=1)
        seconds[how].append(answered.first)
        short += answered.cached < len(history)
    fresh = []
    for _ in range(rounds):
        answered = await live.complete(b.worker, live.tokens(HISTORY + 20), output=1)
        fresh.append(answered.first)
    medians = {how: round(1000 * statistics.median(each), 1) for how, each in seconds.items()}
    return {
        "history_tokens": HISTORY,
        "questions_each": rounds,
        "ttft_ms": {**medians, "recomputed": round(1000 * statistics.median(fresh), 1)},
        "prefetch_ms": round(1000 * statistics.median(prefetches), 1),
        "not_covered": short,
        "ok": short == 0 and medians["hint"] <= medians["none"] * 1.1,
    }


async def killed(live: Live) -> dict[str, Any]:
    """Ten turns of one conversation, its worker is killed, and the next turn goes to the other one."""
    talk = live.tokens(400)
    workers = []
    a, site = live.stack.sites
    health = live.gateway._health  # noqa: SLF001 - as an operator would by the admin API, but without its hints
    health.drain(f"127.0.0.1:{site.vllm}")
    for _ in range(TURNS):
        answered = await live.routed(talk, session_id="kill")
        workers.append(answered.headers.get("x-warmroute-worker", ""))
        talk += answered.ids + live.tokens(40)
    await asyncio.sleep(FLUSH)
    history = talk[:-40]
    health.undrain(f"127.0.0.1:{site.vllm}")
    before = {each.instance_id for held in await live.where(history) for each in held.placements if each.tier == "l1"}
    for name in ("worker-0", "server-0"):
        live.stack.kill(name)
    await asyncio.sleep(4.0)
    moved = None
    async with asyncio.TaskGroup() as tasks:
        # B is busy: the turn has to wait for it.
        tasks.create_task(live.routed(live.tokens(100), output=300))
        await asyncio.sleep(1.0)
        started = time.monotonic()
        turn = tasks.create_task(live.routed(talk, session_id="kill"))
        while not turn.done():
            held = await live.where(history)
            near = sum(any(e.tier == "l1" and e.instance_id == site.instance for e in each.placements) for each in held)
            if near == len(held) and moved is None:
                moved = time.monotonic() - started
            await asyncio.sleep(0.1)
        waited = time.monotonic() - started
    answered = turn.result()
    covered = len(history) // CHUNK * CHUNK
    notes = [
        {name: said[name] for name in NOTED}
        for record in live.gateway.decisions.recent(4)
        for note in record.hints
        if (said := note.document(0.0))["action"] == "prefetch"
    ]
    return {
        "turns": TURNS,
        "workers": sorted(set(workers)),
        "killed": a.instance,
        "l1_before": sorted(before),
        "history_tokens": len(history),
        "whole_blocks": covered,
        "cached_tokens": answered.cached,
        "in_l1_of_the_other_after_s": None if moved is None else round(moved, 2),
        "answered_after_s": round(waited, 2),
        "hints": notes,
        "ok": answered.cached >= covered and bool(notes) and len(set(workers)) == 1,
    }


# -- (c) ----------------------------------------------------------------------------------------------------------------


async def pins(live: Live) -> dict[str, Any]:
    """Seven chunks of a tenant, three of them pinned, then a quota of nothing; then they are unpinned.

    The folder is the witness, not the directory: the coordinator lets any of the servers delete the files of all, and the one that does
    reports them gone from itself, not from the one that had stored them.
    """
    site = live.stack.sites[1]
    salt, prompt = "tenant-pins", live.tokens(CHUNK * 7 + 9)
    await live.complete(site.worker, prompt, output=1, cache_salt=salt)
    await asyncio.sleep(FLUSH)
    driver = LMCacheCoordinatorDriver(live.place)
    about, url = subject(prompt, salt), live.stack.coordinator
    stored = files(live, prompt, salt)
    pinned = await live.say(driver, hint(Action.PIN, about, 3 * CHUNK, target="l2"), url)
    await make(live.session, set_quota(salt, 0), url, {}, 10)
    left, evicting = await until(live, prompt, salt, 3)
    await asyncio.sleep(11.0)  # two more sweeps
    held = files(live, prompt, salt)
    unpinned = await live.say(driver, hint(Action.UNPIN, about, 3 * CHUNK, target="l2"), url)
    released, releasing = await until(live, prompt, salt, 0)
    await asyncio.sleep(FLUSH)
    in_directory = await far(live, prompt, salt)
    await make(live.session, drop_quota(salt), url, {}, 10)
    return {
        "chunks": stored,
        "pin": pinned,
        "left_by_the_quota": left,
        "after_s": round(evicting, 1),
        "still_held": held,
        "unpin": unpinned,
        "left_after_unpin": released,
        "unpinned_after_s": round(releasing, 1),
        "left_in_the_directory": in_directory,
        "ok": (len(stored), left, held, released) == (7, [0, 1, 2], [0, 1, 2], []),
    }


async def far(live: Live, prompt: Sequence[int], salt: str) -> list[int]:
    """Which chunks storage has, by the directory."""
    held = await live.where(prompt, salt)
    return [place for place, each in enumerate(held) if any(one.tier == "l2" for one in each.placements)]


def files(live: Live, prompt: Sequence[int], salt: str) -> list[int]:
    """The same by its folder."""
    there = [each.name for each in (live.stack.work / "l2").iterdir()]
    names = [name.hex() for name in chunks.names(prompt, CHUNK)]
    return [place for place, name in enumerate(names) if any(f"@{name}@{salt}." in each for each in there)]


async def until(live: Live, prompt: Sequence[int], salt: str, count: int) -> tuple[list[int], float]:
    """Wait until there are no more than `count` of its files, or a minute has passed."""
    started = time.monotonic()
    while True:
        found = files(live, prompt, salt)
        if len(found) <= count or time.monotonic() - started > 60.0:
            return found, time.monotonic() - started
        await asyncio.sleep(0.5)


# -- all of it ----------------------------------------------------------------------------------------------------------


async def measured(stack: Stack, parts: Sequence[str], rounds: int) -> dict[str, Any]:
    """The figures of `parts`, in an order that leaves the worker that is killed for last."""
    figures: dict[str, Any] = {}
    gateway = Gateway(loads(configuration(stack)))
    await gateway.start()
    session = open_session()
    try:
        if not await gateway.wait_ready(30):
            raise RuntimeError("no worker is ready")
        await asyncio.sleep(3.0)
        live = Live(stack, gateway, session, rounds)
        for name, part in (("loads", loads_sooner), ("tiers", tiers), ("pins", pins), ("killed", killed)):
            if name in parts:
                figures[name] = await part(live)
                print(json.dumps({name: figures[name]}), file=sys.stderr, flush=True)
        figures["directory"] = gateway._directories.document()  # noqa: SLF001 - what is measured is inside
    finally:
        await session.close()
        await gateway.stop(1)
    return figures


def main() -> None:
    """Run, print, and exit with 1 if something does not hold."""
    every = ("tiers", "killed", "loads", "pins", "controller")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="folder with venv and model")
    parser.add_argument("--base", type=int, default=19320, help="first of a hundred free ports (default: 19320)")
    parser.add_argument("--parts", nargs="*", choices=every, default=every, help="default: all")
    parser.add_argument("--rounds", type=int, default=10, help="questions with and without a hint each (default: 10)")
    parser.add_argument("--logs", type=Path, help="keep the logs here (default: a folder that is removed)")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="warmroute-lmcache-") as folder:
        work = arguments.logs or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        with Stack(arguments.engine.resolve(), work, arguments.base) as stack:
            if "controller" in arguments.parts:
                figures["controller"] = asyncio.run(controller(stack))
            if set(arguments.parts) - {"controller"}:
                stack.start()
                figures |= asyncio.run(measured(stack, arguments.parts, arguments.rounds))
    print(json.dumps(figures, indent=1))
    sys.exit(0 if all(part.get("ok", True) for part in figures.values() if isinstance(part, dict)) else 1)


if __name__ == "__main__":
    main()
