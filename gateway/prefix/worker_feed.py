"""How one worker's cache is known: by its events, by what it was sent, or not at all; and how well that goes."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from backends.kv_events import CacheFacts, EventSource
from gateway.config.schema import EventSocket
from gateway.fleet.worker import WorkerState
from gateway.prefix.discovery import Found, configured_source, discover
from gateway.prefix.feed_status import FeedStatus, say
from gateway.prefix.history import DEFAULT_BLOCKS, History
from gateway.prefix.holders import Tier
from gateway.prefix.mirror import MEMORY_TIERS, Mirror
from gateway.prefix.pump import Pump
from gateway.prefix.stream import Stream

if TYPE_CHECKING:
    import aiohttp
    import zmq

    from gateway.config.schema import Worker as WorkerSection
    from gateway.fleet.worker import Worker
    from gateway.prefix.index import PrefixIndex
    from gateway.prompt.blocks import Chain

DEFAULT_BLOCK_SIZE = 64
"""Tokens per block of workers that do not tell theirs: vLLM's own default. It only says in which steps we guess."""
RETRY = (0.5, 30.0)
"""Seconds until a worker that does not answer is asked again: at first, and (doubling, with jitter) at most."""
REFRESH = 60.0
"""Seconds after which a worker without events is asked whether it sends some now, and whether it was started again."""
LOG_EVERY = 5.0
"""Seconds between two log lines about one worker, at least."""
SILENT_AFTER = 10.0
"""Seconds without any event ..."""
SILENT_PROMPTS = 20
"""... and prompts sent there with blocks that must have been stored, before a worker is called silent."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What every feed needs and none owns."""

    index: "PrefixIndex"
    session: "aiohttp.ClientSession"
    context: "zmq.Context[zmq.Socket[bytes]]"
    pump: Pump
    clock: Callable[[], float]
    rng: random.Random


@dataclass(slots=True)
class Rank:
    """One data-parallel rank: its name in the index, its mirror and the streams that feed it."""

    name: str
    mirror: Mirror
    streams: list[Stream] = field(default_factory=list)


class WorkerFeed:
    """One worker of one fleet. `run` is its task; `tick` is called a few times a second; `close` ends it.

    Attributes:
        worker, fleet, section: who it is; `fleet` is the namespace of its blocks.
        id: the worker's id when this was made.
        names: under which it stands in the index, more than one with data parallelism.
    """

    def __init__(self, worker: "Worker", fleet: str, section: "WorkerSection", parts: Parts) -> None:
        self.worker = worker
        self.fleet = fleet
        self.section = section
        self.id = worker.id
        self.names: list[str] = []
        self._parts = parts
        self._again = asyncio.Event()
        self._was_ready = False
        self._found: Found | None = None
        self._away = ""
        self._ranks: list[Rank] = []
        self._history: History | None = None
        self._guesses: History | None = None
        self._status = "connecting"
        self._since = parts.clock()
        self._logged = ""
        self._logged_at = -LOG_EVERY
        self._unconfirmed = 0
        self._events = 0
        self._rated_at = parts.clock()
        self._rate = 0.0
        self._retired: Counter[str] = Counter()
        self._distrusted: int | None = None

    async def run(self) -> None:
        """Find out how the worker can be followed, again whenever that may have changed. Until cancelled."""
        first, longest = RETRY
        pause = first
        if isinstance(self.section.kv_events, EventSocket):
            # It may be up before its HTTP server is.
            self._follow(Found(sources=(configured_source(self.section.kv_events),), complete=False))
        while True:
            self._again.clear()
            found = await discover(self._parts.session, self.worker, self.section)
            if isinstance(found, Found):
                self._away = ""
                self._follow(found)
            else:
                self._away = found
            if self._away or not found.complete:  # type: ignore[union-attr]
                seconds: float | None = pause * self._parts.rng.uniform(0.75, 1.0)
                pause = min(longest, pause * 2)
            else:
                pause = first
                seconds = None if self._ranks else REFRESH * self._parts.rng.uniform(0.9, 1.1)
            try:
                async with asyncio.timeout(seconds):
                    await self._again.wait()
                pause = first
            except TimeoutError:
                pass

    def tick(self, now: float) -> None:
        """Time passes."""
        ready = self.worker.state is WorkerState.READY
        if ready and not self._was_ready:
            self._again.set()  # it may be another process than before
        self._was_ready = ready
        for rank in self._ranks:
            for stream in rank.streams:
                stream.tick(now)
        self._distrust()
        self._measure(now)
        self._observe(now)

    def close(self) -> None:
        """Close the sockets and forget the worker. Its task is ended by whoever holds that."""
        self._unfollow()

    def resync(self, now: float) -> None:
        """What is believed was shown to be wrong: forget it and ask for everything that can be replayed."""
        for rank in self._ranks:
            rank.mirror.forget()
            for stream in rank.streams:
                stream.resync(now)
        for history in (self._history, self._guesses):
            if history is not None:
                history.forget()

    def sent(self) -> None:
        """A prompt with blocks that the worker did not hold was sent there."""
        self._unconfirmed += 1

    @property
    def guesses(self) -> bool:
        """Whether prompts were sent there of which only the bytes are known, beside its events."""
        return self._guesses is not None

    @property
    def guess_name(self) -> str:
        """Under which it stands in the index for prompts whose tokens are not known. A space: no worker's id has one."""
        return f"{self.id} bytes"

    def remember(self, chains: "Mapping[int, Chain]") -> bool:
        """A prompt that is known by its bytes only was sent there. No event will ever speak of it, so it is remembered as for a worker without events.

        False if that has to be done elsewhere, because the worker sends none, or cannot be done yet.
        """
        size = next((rank.mirror.block_size for rank in self._ranks if rank.mirror.block_size is not None), None)
        chain = chains.get(size) if size is not None else None
        if size is None or chain is None:
            return False
        if self._guesses is None or self._guesses.block_size != size:
            self._guesses = self._parts.index.imagine(self.guess_name, size, self._facts.blocks or DEFAULT_BLOCKS)
        self._guesses.record(chain.hashes)
        return True

    def totals(self) -> Counter[str]:
        """What was counted over all streams since the start; see `Stream.counters`."""
        return sum((stream.totals() for rank in self._ranks for stream in rank.streams), self._retired.copy())

    def status(self, now: float) -> FeedStatus:
        """All there is to say about it."""
        streams = [stream for rank in self._ranks for stream in rank.streams]
        facts = self._facts
        problems: Counter[str] = Counter()
        for rank in self._ranks:
            problems.update(rank.mirror.problems)
            counters = rank.mirror.counters
            for name in ("misaligned", "unresolved", "lost_orphans", "other_block_size", "other_group", "overflowed"):
                if count := getattr(counters, name):
                    problems[name] += count
        totals = self.totals()
        if totals["garbage"]:
            problems["garbage"] += totals["garbage"]
        block_size, origin = self._block_size()
        lags = [stream.lag for stream in streams if stream.lag is not None]
        return FeedStatus(
            worker=self.id,
            fleet=self.fleet,
            status=self._status,
            since=now - self._since,
            reason=self._reason(),
            configured=self._is_configured,
            driver_knows=self.worker.driver.sources_path is not None,
            switched_off=self.section.kv_events == "off",
            endpoints=[stream.source.endpoint for stream in streams],
            replay=bool(streams) and all(stream.source.replay_endpoint for stream in streams),
            ranks=len(self._ranks),
            last_seq=max((stream.next - 1 for stream in streams), default=None),
            events_per_second=self._rate,
            lag=max(lags, default=None),
            counters=dict(totals),
            problems=dict(problems),
            orphans=sum(rank.mirror.orphans for rank in self._ranks),
            block_size=block_size,
            block_size_origin=origin,
            announced_block_size=facts.block_size,
            distrusted_block_size=self._distrusted,
            blocks=self._blocks(),
            capacity=facts.blocks,
            capacity_origin=facts.known("blocks"),
            silent=self._is_silent(now),
        )

    # -- what it follows --------------------------------------------------------------------------------------------

    @property
    def _facts(self) -> CacheFacts:
        return self._found.facts if self._found is not None else CacheFacts()

    @property
    def _is_configured(self) -> bool:
        return isinstance(self.section.kv_events, EventSocket)

    def _follow(self, found: Found) -> None:
        """Bring what is followed in line with what was found; nothing changes when nothing did."""
        before, self._found = self._found, found
        sources = found.sources if found.facts.prefix_caching is not False else ()
        lmcache = () if self.section.lmcache_events is None else (self.section.lmcache_events,)
        if sources or (lmcache and found.facts.prefix_caching is not False):
            size = None if found.facts.block_size == self._distrusted else found.facts.block_size
            same = before is not None and self._ranks and before.sources == found.sources
            if not same or (size is not None and not self._fits(size)):
                self._unfollow()
                self._open(sources or (None,), size)
        elif found.facts.prefix_caching is False:
            self._unfollow()
        else:
            self._imagine(before, found)
        self._observe(self._parts.clock())

    def _fits(self, block_size: int) -> bool:
        """Whether the mirrors can stay as they are with this block size."""
        sizes = {rank.mirror.block_size for rank in self._ranks} - {None}
        return sizes == {block_size} or (bool(sizes) and any(self._has_stored(rank) for rank in self._ranks))

    @staticmethod
    def _has_stored(rank: Rank) -> bool:
        return rank.mirror.counters.stored > 0

    def _open(self, sources: tuple[EventSource | None, ...], block_size: int | None) -> None:
        parts = self._parts
        ttl = {
            tier: seconds
            for tier, seconds in ((Tier.L1, self.section.forget_after.l1), (Tier.L2, self.section.forget_after.l2))
            if seconds is not None
        }
        for source in sources:
            several = len(sources) > 1 and source is not None
            # A space: no worker's id has one.
            name = f"{self.id} dp{source.rank}" if several and source is not None else self.id
            mirror = parts.index.follow(name, self.fleet, block_size=block_size, ttl=ttl)
            rank = Rank(name, mirror)
            self._ranks.append(rank)
            self.names.append(name)
            if source is not None:
                rank.streams.append(self._stream(source, rank, is_lmcache=False))
            if self.section.lmcache_events is not None:
                rank.streams.append(self._stream(configured_source(self.section.lmcache_events), rank, is_lmcache=True))
            for stream in rank.streams:
                stream.tick(parts.clock())

    def _stream(self, source: EventSource, rank: Rank, *, is_lmcache: bool) -> Stream:
        parts = self._parts

        def forget(cause: Stream) -> None:
            rank.mirror.forget()
            if self._guesses is not None:
                self._guesses.forget()
            for other in rank.streams:
                if other is not cause:
                    other.resync(parts.clock())

        return Stream(
            source,
            rank.mirror,
            context=parts.context,
            pump=parts.pump,
            clock=parts.clock,
            forget=forget,
            connected=self._again.set,
            is_lmcache=is_lmcache,
            rng=parts.rng,
        )

    def _imagine(self, before: Found | None, found: Found) -> None:
        block_size = found.facts.block_size or DEFAULT_BLOCK_SIZE
        blocks = found.facts.blocks or DEFAULT_BLOCKS
        history = self._history
        if history is None or history.block_size != block_size:
            self._unfollow()
            self._history = self._parts.index.imagine(self.id, block_size, blocks)
            self.names.append(self.id)
            return
        if history.capacity != blocks:
            history.resize(blocks)
        if before is not None and before.facts.started != found.facts.started:
            history.forget()

    def _unfollow(self) -> None:
        for rank in self._ranks:
            for stream in rank.streams:
                self._retired.update(stream.totals())
                stream.close()
        self._ranks.clear()
        self._history = self._guesses = None
        for name in (*self.names, self.guess_name):
            self._parts.index.remove(name)
        self.names.clear()

    def _distrust(self) -> None:
        """Events of another block size than the worker announced: believe the events."""
        announced = self._facts.block_size
        if announced is None or self._facts.known("block_size") == "configured" or announced == self._distrusted:
            return
        for rank in self._ranks:
            counters = rank.mirror.counters
            if counters.other_block_size and not counters.stored and rank.mirror.block_size == announced:
                self._distrusted = announced
                sources = tuple(self._found.sources) if self._found is not None else ()
                self._unfollow()
                self._open(sources or (None,), None)
                return

    # -- how well it goes -------------------------------------------------------------------------------------------

    def _measure(self, now: float) -> None:
        seconds = now - self._rated_at
        if seconds < 1.0:
            return
        events = self.totals()["events"]
        self._rate += 0.3 * (max(0, events - self._events) / seconds - self._rate)
        self._events = events
        self._rated_at = now

    def _observe(self, now: float) -> None:
        """Note a change of the status, and log it unless that was done a moment ago."""
        status = self._now(now)
        if status != self._status:
            self._status = status
            self._since = now
        if status == self._logged or now - self._logged_at < LOG_EVERY:
            return
        if status == "connecting" and not self._logged and now - self._since < LOG_EVERY:
            return  # it has only just begun
        was, self._logged, self._logged_at = self._logged, status, now
        log = _log.warning if status in ("gap", "connecting") else _log.info
        log(say(status), worker=self.id, model=self.fleet, was=was or None, reason=self._reason() or None)

    def _now(self, now: float) -> str:
        if self._ranks:
            states = {stream.state(now) for rank in self._ranks for stream in rank.streams}
            if any(rank.mirror.orphans for rank in self._ranks):
                states.add("gap")
            return next(state for state in ("connecting", "gap", "events") if state in states)
        if self._history is not None:
            return "history"
        return "connecting" if self._found is None else "none"

    def _reason(self) -> str:
        if self._status == "none":
            return f"prefix caching is off ({self._facts.known('prefix_caching')})"
        if self._ranks:
            down = [stream for rank in self._ranks for stream in rank.streams if not stream.connected]
            return f"no connection to {down[0].source.endpoint}" if down else ""
        return self._away if self._found is None else self._found.reason

    def _is_silent(self, now: float) -> bool:
        """Whether events that must have come did not; counting begins anew with each that comes."""
        streams = [stream for rank in self._ranks for stream in rank.streams]
        heard = max((stream.heard for stream in streams if stream.heard is not None), default=None)
        if heard is not None and now - heard < SILENT_AFTER:
            self._unconfirmed = 0
        return bool(streams) and self._unconfirmed >= SILENT_PROMPTS and now - self._since > SILENT_AFTER

    def _block_size(self) -> tuple[int | None, str]:
        if self._history is not None:
            return self._history.block_size, self._facts.known("block_size") or "default"
        for rank in self._ranks:
            if rank.mirror.block_size is not None:
                announced = rank.mirror.block_size == self._facts.block_size
                return rank.mirror.block_size, self._facts.known("block_size") if announced else "events"
        return None, ""

    def _blocks(self) -> dict[str, int]:
        if self._history is not None:
            return {"device": len(self._history), "l1": 0, "l2": 0}
        return {tier.name.lower(): sum(rank.mirror.blocks(tier) for rank in self._ranks) for tier in MEMORY_TIERS}
