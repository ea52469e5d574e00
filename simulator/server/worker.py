"""One simulated worker: an engine, its clock, an HTTP listener and the sockets for KV events."""

import asyncio
import random
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from simulator.engine import Cleared, Engine, EngineStats, FirstToken, Profile, Removed, Stored
from simulator.server.app import build_app
from simulator.server.clock import Clock
from simulator.server.events import Event, EventPublisher, cleared_event, removed_event, stored_event
from simulator.server.faults import Faults
from simulator.server.hashing import BlockHasher, extra_keys, wire_hash
from simulator.server.hints import Fetch, read_hints
from simulator.server.lmcache import LMCacheServer
from simulator.server.lmcache_coordinator import LMCacheCoordinator
from simulator.server.metrics import Metrics
from simulator.server.options import WorkerOptions
from simulator.server.parameters import Parameters
from simulator.server.pump import CacheChange, Choice, Generation, Observer, Pump
from simulator.server.shared import SharedMemory
from simulator.server.writing import Answer, expected_output
from simulator.tokenizer import WorkerTokenizer

KEEP_ALIVE = 5.0
"""Seconds that an idle connection is kept, as uvicorn does by default."""
SHUTDOWN = 0.1
"""Seconds that answers in flight get when the worker stops, before they are cancelled."""
BACKLOG = 2048


class BlockOrigin:
    """Where a block's tokens are, for events about blocks whose request is gone; and the tiers that hold it."""

    __slots__ = ("choice_ids", "index", "keys", "lora", "parent", "tiers")

    def __init__(
        self, ids: Sequence[int], index: int, parent: bytes | None, keys: list[str] | None, lora: tuple[int, str] | None
    ) -> None:
        self.choice_ids = ids
        self.index = index
        self.parent = parent
        self.keys = keys
        self.lora = lora
        self.tiers: set[tuple[int, str]] = set()


class SimulatedWorker(Observer):
    """A worker that can be embedded: ``await start()``, then talk to `url`, then ``await stop()``.

    Everything belongs to the event loop that `start` ran in. Not to be started twice.

    Attributes:
        options: as given.
        profile: with the options' own numbers.
        tokenizer: its tokenizer.
        engine, clock, metrics, publisher (None without KV events), faults: its parts, for tests to look at.
        shared: what it has in common with others.
        lmcache, lmcache_coordinator: LMCache's servers beside it; None: there are none.
    """

    def __init__(
        self,
        options: WorkerOptions | None = None,
        *,
        tokenizer: WorkerTokenizer | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        """A worker that is not started yet.

        Args:
            options: default: all defaults.
            tokenizer: one to share between workers, instead of the options' folder.
            shared: what it has in common with other workers of this process; its l2 takes the place of one of its own.

        Raises:
            ValueError: the profile or the tokenizer is wrong.
            OSError: the tokenizer's files can't be read.
        """
        self.options = options or WorkerOptions()
        self.profile: Profile = self.options.resolved_profile()
        self.tokenizer = tokenizer or WorkerTokenizer(self.options.tokenizer)
        self.faults: Faults = self.options.faults
        self.metrics = Metrics()
        self.shared = shared or SharedMemory(self.profile.l2_blocks)
        self.engine = Engine(self.profile, seed=self.options.seed, l2=self.shared.l2)
        self.hasher = BlockHasher(self.profile.block_size, self.tokenizer.vocabulary_size)
        self.publisher: EventPublisher | None = None
        self.requests = 0
        """HTTP requests in flight."""
        self.lmcache: LMCacheServer | None = None
        self.lmcache_coordinator: LMCacheCoordinator | None = None
        self._origins = self.shared.origins
        self._tiers = bool(self.profile.l1_blocks or self.shared.l2.capacity)
        self._submitted = 0
        self._random = random.Random(self.options.seed)
        self.fingerprint = f"vllm-{self.options.version}-{self._random.getrandbits(32):08x}"
        """What `system_fingerprint` says."""
        self._clock: Clock | None = None
        self._pump: Pump | None = None
        self._runner: web.AppRunner | None = None
        self._site: web.SockSite | None = None
        self._fault_lock = asyncio.Lock()
        self._port = self.options.port

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end."""
        host = "127.0.0.1" if self.options.host in ("0.0.0.0", "::", "") else self.options.host  # noqa: S104
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def clock(self) -> Clock:
        """The worker's time; there is none before `start`."""
        assert self._clock is not None, "not started"
        return self._clock

    @property
    def pump(self) -> Pump:
        """What drives the engine; there is none before `start`."""
        assert self._pump is not None, "not started"
        return self._pump

    @property
    def warming(self) -> bool:
        """Whether it is not ready yet."""
        return self.clock.now() < self.options.warm_up

    async def start(self) -> None:
        """Listen, and publish KV events if asked to.

        Raises:
            OSError: the port is in use or not allowed.
            zmq.ZMQError: the same for the addresses of KV events.
        """
        loop = asyncio.get_running_loop()
        self._clock = Clock(loop.time, self.options.speed / self.faults.slow_factor)
        self._pump = Pump(self.engine, self._clock, self, loop)
        self._runner = web.AppRunner(
            build_app(self),
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE,
            access_log=None,
            shutdown_timeout=SHUTDOWN,
        )
        await self._runner.setup()
        try:
            await self._listen()
            if self.options.kv_events is not None:
                topic = self.options.topic
                if topic is None:
                    topic = f"kv@{self.url.partition('://')[2]}@{self.options.served_names[0]}"
                self.publisher = EventPublisher(
                    self.options.kv_events,
                    self.options.kv_events_replay,
                    topic=topic,
                    as_arrays=self.options.kv_events_encoding == "array",
                    topic_in_replay=self.options.kv_events_replay_topic,
                    seed=self.options.seed,
                )
                await self.publisher.start()
            self.shared.workers[self.url.partition("://")[2]] = self
            await self._start_lmcache()
            await self._apply_faults()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop listening, cancel what is in flight, close everything. May be called twice."""
        self.shared.workers.pop(self.url.partition("://")[2], None)
        for server in (self.lmcache_coordinator, self.lmcache):
            if server is not None:
                await server.stop()
        if self._pump is not None:
            self._pump.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = self._site = None
        if self.publisher is not None:
            await self.publisher.stop()

    async def set_faults(self, faults: Faults) -> None:
        """Let other things go wrong from now on; all of them at once."""
        async with self._fault_lock:
            self.faults = faults
            await self._apply_faults()

    def stats(self) -> EngineStats:
        """The engine's load and counters now."""
        self.pump.advance()
        return self.engine.stats

    def expected_output(
        self, prompt_ids: Sequence[int], max_tokens: int | None = None, choice: int = 0
    ) -> tuple[list[int], str]:
        """The token ids and the text that this worker answers to a prompt, without stops or tools."""
        return expected_output(self.tokenizer, prompt_ids, max_tokens, choice)

    def new_id(self) -> str:
        """16 hexadecimal digits, different each time; the same ones again with the same seed."""
        return f"{self._random.getrandbits(64):016x}"

    def answer_headers(self, request: web.Request) -> dict[str, str]:
        """The headers that every answer has."""
        headers = {"Server": "uvicorn", "Vary": "Origin"}
        if self.options.request_id_headers:
            headers["X-Request-Id"] = request.headers.get("X-Request-Id") or self.new_id()
        return headers

    def fails(self) -> bool:
        """Whether a request that comes now gets an error instead of an answer, as the faults have it."""
        faults = self.faults
        if faults.times == 0 or faults.error_rate <= 0 or self._random.random() >= faults.error_rate:
            return False
        self.fault_struck()
        return True

    def fault_struck(self) -> None:
        """Count a fault that hit a request, where only some are to be hit."""
        if self.faults.times > 0:
            self.faults = msgspec.structs.replace(self.faults, times=self.faults.times - 1)

    def lora(self, name: str | None) -> tuple[int, str] | None:
        """Id (from 1) and name of an adapter that is served here; None for anything else."""
        names = self.options.lora_modules
        return (names.index(name) + 1, name) if name in names else None

    def generate(
        self, prompt_ids: Sequence[int], answers: Sequence[Answer], parameters: Parameters, generation: Generation
    ) -> None:
        """Send a prompt with its choices' answers to the engine, as a part of `generation`.

        Raises:
            ValueError: the engine could never run it, or what it says about caches is of the wrong shape.
        """
        salt, lora = generation.salt, generation.lora
        wishes = read_hints(
            parameters.kv_hints if self.options.kv_hints else None,
            parameters.kv_transfer_params,
            prompt_tokens=len(prompt_ids),
            block_size=self.profile.block_size,
        )
        for answer in answers:
            ids = [*prompt_ids, *answer.ids]
            self._submitted += 1
            choice = Choice(
                id=str(self._submitted),
                index=len(generation.choices),
                prompt_ids=prompt_ids,
                answer=answer,
                ids=ids,
                digests=self.hasher.chain(ids, salt=salt, lora=lora[1] if lora else None),
                generation=generation,
            )
            generation.choices.append(choice)
            generation.open += 1
            if self.lmcache is not None and lora is None:
                self.lmcache.names.note(ids, choice.digests, salt)
            wait = max((self._fetch(choice, fetch) for fetch in wishes.fetches), default=0.0)
            self.pump.submit(choice, parameters.priority, wishes, wait)
        if parameters.max_tokens is not None:
            self.metrics.request_max_tokens.observe(parameters.max_tokens)

    def _fetch(self, choice: Choice, fetch: Fetch) -> float:
        """Begin to take what a peer holds of a prompt. Returns how many seconds that takes."""
        peer = self.shared.workers.get(fetch.source)
        if peer is None or peer is self:
            return 0.0
        wanted = set(fetch.hashes)
        digests = choice.digests
        stop = next((at for at, digest in enumerate(digests) if wire_hash(digest) not in wanted), len(digests))
        peer.pump.advance()
        return self.pump.prefetch(digests, 0, stop, "l1", "device", peer=(fetch.source, peer.engine)) or 0.0

    async def _start_lmcache(self) -> None:
        """Start the servers beside it that were asked for."""
        options = self.options
        if options.lmcache_port is not None or options.lmcache_coordinator_port is not None:
            self.lmcache = LMCacheServer(self, options.lmcache_port or 0, options.lmcache_chunk)
            await self.lmcache.start()
        if options.lmcache_coordinator_port is not None:
            assert self.lmcache is not None
            self.lmcache_coordinator = LMCacheCoordinator(
                [self.lmcache], options.host, options.lmcache_coordinator_port
            )
            await self.lmcache_coordinator.start()

    def abort(self, generation: Generation) -> None:
        """Nobody waits for `generation` any more."""
        if generation.open:
            self.metrics.finished["abort"] += self.pump.abort(generation)

    def first_token(self, choice: Choice, output: FirstToken) -> None:
        """Count it."""
        self.metrics.first_token(choice, output)
        if self.profile.prefill_buckets:
            bucket = self.profile.chunks(output.computed_tokens)[-1]
            self.metrics.padded(bucket, output.padded_tokens - output.computed_tokens)

    def tokens(self, choice: Choice, time: float, count: int) -> None:
        """Count them."""
        self.metrics.tokens(choice, time, count)

    def finished(self, choice: Choice, time: float) -> None:
        """Count it."""
        self.metrics.end(choice, time)

    def cache_changed(self, changes: Sequence[tuple[CacheChange, Choice | None]]) -> None:
        """Publish one batch of KV events."""
        if self.publisher is None:
            return
        events: list[Event] = []
        left: list[bytes] = []
        for change, choice in changes:
            if isinstance(change, Stored):
                event = self._stored(change, choice)
                if event is not None:
                    events.append(event)
            elif isinstance(change, Removed):
                for key in change.keys:
                    assert isinstance(key, bytes)
                    events.append(removed_event(wire_hash(key), change.tier))
                    self._leave(key, change.tier, left)
            elif isinstance(change, Cleared):
                events.append(cleared_event())
                for key in list(self._origins):
                    self._leave(key, "device", left)
        for key in left:  # only now: a block that leaves one tier may come into the next one a moment later
            if key in self._origins and not self._origins[key].tiers:
                del self._origins[key]
        if events:
            self.publisher.publish(events)

    def _stored(self, change: Stored, choice: Choice | None) -> Event | None:
        """The event for blocks that came into a tier; None when nothing is known of them any more."""
        size = self.profile.block_size
        digests = [key for key in change.keys if isinstance(key, bytes)]
        hashes = [wire_hash(digest) for digest in digests]
        parent = wire_hash(change.parent) if isinstance(change.parent, bytes) else None
        if choice is not None and change.first_block is not None:
            start, generation = change.first_block, choice.generation
            lora = generation.lora
            name = lora[1] if lora else None
            keys = [extra_keys(name, generation.salt, first=start + at == 0) for at in range(len(digests))]
            if self._tiers:
                before = change.parent if isinstance(change.parent, bytes) else None
                for at, digest in enumerate(digests):
                    if digest not in self._origins:
                        self._origins[digest] = BlockOrigin(choice.ids, start + at, before, keys[at], lora)
                    self._origins[digest].tiers.add(self._place(change.tier))
                    before = digest
            ids = list(choice.ids[start * size : (start + len(digests)) * size])
            return stored_event(hashes, parent, ids, size, change.tier, keys, lora)
        origins = [self._origins.get(digest) for digest in digests]
        known = [origin for origin in origins if origin is not None]
        if len(known) < len(digests):
            return None
        for origin in known:
            origin.tiers.add(self._place(change.tier))
        ids = [
            token for origin in known for token in origin.choice_ids[origin.index * size : (origin.index + 1) * size]
        ]
        return stored_event(hashes, parent, ids, size, change.tier, [origin.keys for origin in known], known[0].lora)

    def _place(self, tier: str) -> tuple[int, str]:
        """A tier as one of all that share origins: the l2 is everybody's."""
        return (0 if tier == "l2" else id(self)), tier

    def _leave(self, digest: bytes, tier: str, left: list[bytes]) -> None:
        """Note that a tier does not hold a block any more, and in `left` that perhaps none does."""
        origin = self._origins.get(digest)
        if origin is not None:
            origin.tiers.discard(self._place(tier))
            left.append(digest)

    async def _listen(self) -> None:
        """Open the listening socket; the same port again after a refusal."""
        assert self._runner is not None
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self.options.host, self._port))
            self._port = sock.getsockname()[1]
            self._site = web.SockSite(self._runner, sock, backlog=BACKLOG)
            await self._site.start()
        except BaseException:
            sock.close()
            raise

    async def _apply_faults(self) -> None:
        """Bring the listener, the clock and the publisher in line with the faults."""
        faults = self.faults
        if faults.refuse and self._site is not None:
            await self._site.stop()  # closes the listener only; open connections stay
            self._site = None
        elif not faults.refuse and self._site is None:
            await self._listen()
        pace = self.options.speed / faults.slow_factor
        if self.clock.pace != pace:
            self.pump.advance()
            self.clock.set_pace(pace)
            self.pump.repace()
        if self.publisher is not None:
            self.publisher.drop_next += faults.drop_events
            self.faults = msgspec.structs.replace(faults, drop_events=0)  # passed on: not to be asked for twice
            self.publisher.drop_share = faults.drop_events_share

    def state(self) -> dict[str, Any]:
        """What ``GET /simulator/state`` tells: load, faults, events, as JSON values."""
        stats = self.stats()
        publisher = self.publisher
        return {
            "profile": self.profile.name,
            "warming": self.warming,
            "time": self.clock.now(),
            "speed": self.options.speed,
            "requests": self.requests,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": stats.kv_usage,
            "cached_blocks": stats.cached_blocks,
            "preemptions": stats.preemptions,
            "finished": dict(self.metrics.finished),
            "faults": self.faults,
            "kv_events": None
            if publisher is None
            else {"next_sequence": publisher.sequence, "dropped": publisher.dropped, "endpoint": publisher.endpoint},
        }
