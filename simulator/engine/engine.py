"""The engine: requests in, tokens and cache events out, in the caller's time.

The device is always busy with one *work*: a prefill (exclusive mode), a step that mixes decodes with chunks of prompts
(chunked mode), or a run of equal decode steps. A run lasts until the first step after which something but the count of
tokens changes: a request ends, fills a block, needs a block, or outgrows a context bucket; an arrival or an abort cuts it at
the end of the step under way. So the engine jumps from change to change, however many tokens lie between, and since a run's
steps are timed from its start, it does not matter at which moments it is asked.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Final

from backends.profiles.profile import Profile
from simulator.engine.cache import Tier
from simulator.engine.claims import LOWEST
from simulator.engine.counters import Counters
from simulator.engine.memory import Admission, KvMemory
from simulator.engine.outputs import (
    BlockKey,
    EngineRequest,
    EngineStats,
    Finished,
    FirstToken,
    Output,
    TierName,
    TokenOut,
)
from simulator.engine.pins import Pins
from simulator.engine.prefetcher import Prefetcher
from simulator.engine.request import THOUSAND, ActiveRequest
from simulator.engine.work import PrefillChunk, Work, prefill_work

PIN_SHARE: Final = 0.25
"""Of a memory: what may be pinned unless it is said otherwise."""


class Engine:
    """One inference worker without clock, I/O or threads.

    `now` is in seconds on the caller's clock. A `now` before an earlier one counts as the earlier one.

    Args:
        profile: what the worker is.
        seed: of the differences between streams in parallel decoding; nothing else is random.
        emit_tokens: whether `TokenOut` is wanted. Without, `advance` costs nothing per token, and all else is the same.
        l2: a tier shared with other engines, in place of one of the profile's size.
        pin_share: share of each memory that may be pinned at most, below 1.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        seed: int = 0,
        emit_tokens: bool = True,
        l2: Tier | None = None,
        pin_share: float = PIN_SHARE,
    ) -> None:
        self.profile = profile
        self._emit_tokens = emit_tokens
        self._outputs: list[Output] = []
        self.memory = KvMemory(profile, self._outputs, l2)
        self.pins = Pins(self.memory, pin_share)
        self.prefetcher = Prefetcher(profile, self.memory)
        self._counters = Counters()
        self._random = Random(seed)
        self._pace = round(profile.tokens_per_step * THOUSAND)
        self._slots = profile.effective_slots
        self._exclusive = profile.prefill == "exclusive"
        self._by_priority = profile.order == "priority"
        self._now = float("-inf")
        self._step = 0
        self._submitted = 0
        self._work: Work | None = None
        self._requests: dict[str, ActiveRequest] = {}
        self._waiting: list[tuple[int, int, ActiveRequest]] = []
        self._queued: dict[str, ActiveRequest] = {}
        self._prefilling: dict[str, ActiveRequest] = {}
        self._decoding: dict[str, ActiveRequest] = {}
        self._wakes: list[tuple[int, int, ActiveRequest]] = []

    @property
    def stats(self) -> EngineStats:
        """Load and counters at the latest `now`."""
        device = self.memory.device
        live = sum(request.generated(self._step) for request in self._requests.values())
        return self._counters.snapshot(
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._queued),
            kv_blocks=device.total,
            kv_usage=device.in_use / device.total,
            cached_blocks=len(device),
            live_tokens=live,
            stored_blocks=self.memory.stored,
            removed_blocks=self.memory.removed,
        )

    def check(self, request: EngineRequest) -> None:
        """See whether it could be submitted.

        Raises:
            ValueError: see `submit`.
        """
        profile = self.profile
        tokens = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("prompt_tokens and output_tokens must be at least 1")
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in use")
        if tokens > profile.max_model_len:
            raise ValueError(f"{tokens} tokens are more than max_model_len, {profile.max_model_len}")
        if profile.blocks_for(tokens) > profile.kv_blocks:
            raise ValueError(f"{tokens} tokens are more than the {profile.kv_blocks} blocks hold")
        if profile.prefix_caching and len(request.blocks) != tokens // profile.block_size:
            raise ValueError(
                f"{len(request.blocks)} block keys for {tokens} tokens, not {tokens // profile.block_size}"
            )

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request; it starts at once on an idle worker.

        Raises:
            ValueError: its numbers make no sense, its id is in use, or it could never run here.
        """
        now = self._catch_up(now)
        self.check(request)
        phase = self._random.randrange(THOUSAND) if self._pace != THOUSAND else 0
        active = ActiveRequest(request, sequence=self._submitted, now=now, pace=self._pace, phase=phase)
        if not self.profile.prefix_caching:
            active.keys = ()
        self._submitted += 1
        self._requests[request.id] = active
        self._enqueue(active)
        if self._work is None:
            self._plan(now, ())
        elif len(self._decoding) + len(self._prefilling) < self._slots:
            self._work.cut(self._step)

    def abort(self, request_id: str, now: float) -> None:
        """The client is gone: free the request's slot and blocks at once. Nothing happens for an unknown id.

        What the device is doing cannot be taken back: the decode step or the prefill's chunk under way goes on to its end.
        """
        now = self._catch_up(now)
        active = self._requests.get(request_id)
        if active is None:
            return
        self._leave(active)
        work = self._work
        if work is not None:
            work.drop(active, now)
            work.cut(self._step)

    def next_time(self) -> float | None:
        """When `advance` next has something to say; None when nothing runs.

        It may have nothing to say then after all, where only a change of plan falls due.
        """
        if self._outputs:
            return self._outputs[0].time
        due = self.prefetcher.transfers.next_due()
        time = self._next_work_time()
        return due if time is None or (due is not None and due < time) else time

    def _next_work_time(self) -> float | None:
        work = self._work
        if work is None:
            return None
        if self._emit_tokens and work.decodes and self._decoding:
            return work.time(self._step - work.first_step + 1)
        return work.end

    def advance(self, now: float) -> list[Output]:
        """Everything that happened up to and including `now` and was not told yet, in time order."""
        self._catch_up(now)
        outputs = self._outputs.copy()
        self._outputs.clear()
        return outputs

    def reset_prefix_cache(self, now: float, *, offloaded: bool = False) -> bool:
        """Empty the device's prefix cache, as vLLM does: only when no request holds a block. Returns whether it did.

        The tiers below keep what they have, but for the worker's own l1 with `offloaded`. Pins there end, and nothing more comes.
        """
        now = self._catch_up(now)
        tiers: list[TierName] = ["device", "l1"] if offloaded else ["device"]
        for tier in tiers:
            self.pins.clear(tier)
            self.prefetcher.transfers.clear(tier)
        return self.memory.clear(now, offloaded=offloaded)

    def retain(self, keys: Sequence[BlockKey], start: int, stop: int, priority: int, until: float, now: float) -> int:
        """What the device holds of ``keys[start:stop]`` is worth `priority` (0 to 100) until a time. Returns how many keys that are."""
        self._catch_up(now)
        return self.memory.device.claim(keys, start, stop, priority, until)

    def demote(self, keys: Sequence[BlockKey], start: int, stop: int, now: float, until: float = float("inf")) -> int:
        """What the device holds of ``keys[start:stop]`` goes before all else. Returns how many keys that are."""
        return self.retain(keys, start, stop, LOWEST, until, now)

    def prefetch(
        self,
        keys: Sequence[BlockKey],
        start: int,
        stop: int,
        source: TierName,
        target: TierName,
        now: float,
        *,
        peer: "tuple[str, Engine] | None" = None,
    ) -> float | None:
        """Bring ``keys[start:stop]`` nearer, ahead of a request: from l2 to l1, from either to the device, or from another worker.

        It takes the slower memory's bandwidth, as does what requests load, which goes first; a network to a peer is as fast as l2. Nothing
        is computed, and the device computes on meanwhile. Blocks arrive in pieces, told as `Stored` without a request. On the device
        they take what is free or worth no more than a block of which nothing was said; what finds no room does not come.

        Args:
            keys: of the prompt.
            start: of the first block; to the device, what is missing before it comes, too, for it would be of no use without.
            stop: behind the last one.
            source: where they are: ``l1`` or ``l2``.
            target: ``l1`` or ``device``.
            now: seconds.
            peer: another worker, with a name for it, from whose device or l1 they are to come.

        Returns:
            Seconds until all is there if nothing comes in between; None when there is nothing to bring.
        """
        now = self._catch_up(now)
        named = None if peer is None else (f"peer {peer[0]}", peer[1].memory)
        return self.prefetcher.prefetch(keys, start, stop, source, target, now, named)

    def pin(self, keys: Sequence[BlockKey], start: int, stop: int, tier: TierName, until: float, now: float) -> int:
        """Never evict what `tier` holds of ``keys[start:stop]`` until a time, or until it is unpinned.

        On the device all before it is pinned, too. Nothing is when that would be more than the share of the memory that may be. A pin on the
        device ends before a running request would lose its blocks to it, or none could start.

        Returns:
            How many blocks are pinned by it.
        """
        self._catch_up(now)
        return self.pins.pin(keys, start, stop, tier, until)

    def unpin(self, keys: Sequence[BlockKey], start: int, stop: int, tier: TierName, now: float) -> int:
        """Take back the pins in `tier` that lie within ``keys[start:stop]``. Returns how many blocks that are."""
        self._catch_up(now)
        return self.pins.unpin(keys, start, stop, tier)

    def drop(self, keys: Sequence[BlockKey], tier: TierName, now: float) -> int:
        """Let go of these blocks in l1 or l2, but for those that are pinned. Returns how many went."""
        return self.memory.drop(keys, tier, self._catch_up(now))

    def _catch_up(self, now: float) -> float:
        """Let everything up to `now` happen; returns `now`, or the latest one if that was later."""
        self._now = now = max(now, self._now)
        prefetcher = self.prefetcher
        while (due := prefetcher.transfers.next_due()) is not None and due <= now:
            self._work_on(due)
            prefetcher.land(due)
        self._work_on(now)
        return now

    def _work_on(self, now: float) -> None:
        """What the device does up to `now`."""
        while (work := self._work) is not None:
            done = work.done(now)
            if work.decodes:
                self._count_steps(work, done)
            if done < work.steps:
                break
            if self.pins:
                self.pins.expire(work.end)
            self._end(work)
        if self.pins:
            self.pins.expire(now)

    def _count_steps(self, work: Work, done: int) -> None:
        """Move on to the work's decode step `done`, and tell the tokens on the way."""
        last = work.first_step + done
        steps = last - self._step
        if not steps:
            return
        if self._emit_tokens:
            for step in range(self._step + 1, last + 1):
                time = work.time(step - work.first_step)
                for request in self._decoding.values():
                    self._send(request, request.generated(step), time)
        self._step = last
        self._counters.decode_steps(steps, self.profile.decode_batch(work.streams), work.streams)

    def _send(self, request: ActiveRequest, generated: int, time: float) -> None:
        count = generated - request.sent
        if count and self._emit_tokens:
            self._outputs.append(TokenOut(time, request.id, request.sent, count))
            request.sent = generated

    def _end(self, work: Work) -> None:
        """What the work's last step brought; then the next work."""
        time = work.end
        self._work = None
        changed: list[ActiveRequest] = []
        while self._wakes and self._wakes[0][0] <= self._step:
            wake, _, request = heappop(self._wakes)
            if request.decoding and request.wake == wake:
                request.wake = -1
                request.computed = request.computed_at(self._step)
                changed.append(request)
        for request in changed:
            self.memory.store(request, time)
            if request.generated(self._step) == request.output_tokens:
                self._finish(request, time)
        for chunk in work.prefills:
            request = chunk.request
            request.computed += chunk.tokens
            request.padded += chunk.padded
            if request.computed < request.target:
                self.memory.store(request, time)
            else:
                self._join(request, time)
                changed.append(request)
        self._plan(time, changed)

    def _join(self, request: ActiveRequest, time: float) -> None:
        """A prefill has ended: its first token (or, after a preemption, its next one) is there, and decoding begins."""
        del self._prefilling[request.id]
        self._decoding[request.id] = request
        request.decoding = True
        request.joined = self._step
        request.base += 1
        if not request.answered:
            request.answered = True
            self._counters.first_token(request)
            self._outputs.append(
                FirstToken(
                    time,
                    request.id,
                    request.cached_device,
                    request.cached_l1,
                    request.cached_l2,
                    request.target - request.cached,
                    request.padded,
                    request.admitted - request.submitted,
                    time - request.admitted - request.load_time,
                    request.load_time,
                )
            )
        self._send(request, request.base, time)
        self.memory.store(request, time)
        if request.base == request.output_tokens:
            self._finish(request, time)

    def _finish(self, request: ActiveRequest, time: float) -> None:
        self._leave(request)
        self._outputs.append(Finished(time, request.id, request.request.finish_reason))

    def _leave(self, request: ActiveRequest) -> None:
        """Forget a request, wherever it is."""
        del self._requests[request.id]
        self._queued.pop(request.id, None)
        self._counters.generation_tokens += request.generated(self._step)
        self._stop(request)

    def _stop(self, request: ActiveRequest) -> None:
        """Take a request's place in the batch and its blocks."""
        self._decoding.pop(request.id, None)
        self._prefilling.pop(request.id, None)
        request.decoding = False
        self.memory.release(request)

    def _enqueue(self, request: ActiveRequest) -> None:
        """Queue a request by priority, then by order of submission: so one that was preempted is first of its kind."""
        priority = request.request.priority if self._by_priority else 0
        heappush(self._waiting, (priority, request.sequence, request))
        self._queued[request.id] = request

    def _plan(self, time: float, changed: Iterable[ActiveRequest]) -> None:
        """Choose the next work at a moment when the device is free.

        Those in `changed` may need a block for their next step, and have no wake. When that costs somebody his blocks,
        nobody is admitted before the next step, as in vLLM.
        """
        full = False
        for request in changed:
            full |= not self._provide(request, time)
        if self._exclusive:
            self._plan_exclusive(time, full=full)
        else:
            self._plan_chunked(time, full=full)

    def _provide(self, request: ActiveRequest, time: float) -> bool:
        """Give a decoding request the blocks for its next step and plan its wake.

        The newest running request, which may be this one, loses its blocks when there are none. False when that happened.
        """
        size = self.profile.block_size
        enough = True
        while request.decoding and request.needs_block(self._step, size):
            if not self.memory.grow(request, time) and not self.pins.give_way():
                enough = False
                self._preempt()
        if request.decoding:
            bucket = 0
            if self.profile.itl_per_context_token:
                bucket = self.profile.decode_context(request.computed_at(self._step) + 1)
            request.wake = request.next_wake(size, bucket)
            heappush(self._wakes, (request.wake, request.sequence, request))
        return enough

    def _preempt(self) -> None:
        """Send the least urgent, newest running request back to the queue; it will compute everything anew."""
        running = [*self._decoding.values(), *self._prefilling.values()]
        by_priority = self._by_priority
        victim = max(running, key=lambda each: (each.request.priority if by_priority else 0, each.sequence))
        victim.base = victim.generated(self._step)
        self._stop(victim)
        victim.target = victim.prompt_tokens + victim.base
        victim.computed = 0
        victim.preempted = True
        self._counters.preemptions += 1
        self._enqueue(victim)

    def _plan_exclusive(self, time: float, *, full: bool) -> None:
        """One prefill if one may start; else decode."""
        if not full and (request := self._admit(time)) is not None:
            sizes = self.profile.chunks(request.target - request.cached)
            for size in sizes:
                self._counters.prefill(size, 0)
            self._work = prefill_work(self.profile, request, sizes, time, self._step)
            # All but the last run are full.
            self._counters.prefill_padding(sizes[-1], sum(sizes) - self._work.prefills[0].tokens)
        else:
            self._plan_decode(time, full=full)

    def _plan_chunked(self, time: float, *, full: bool) -> None:
        """A step for all decodes and as much of the prompts as the budget allows; without prompts, a run of decodes."""
        profile = self.profile
        budget = profile.max_num_batched_tokens - len(self._decoding)
        chunks: list[PrefillChunk] = []
        overhead = profile.chunk_overhead
        load_time = 0.0
        for request in self._prefilling.values():
            tokens = min(request.target - request.computed, budget)
            if tokens:
                chunks.append(PrefillChunk(request, tokens, sum(profile.chunks(tokens))))
                budget -= tokens
        while not full and budget and (new := self._admit(time)) is not None:
            tokens = min(new.target - new.computed, budget)
            chunks.append(PrefillChunk(new, tokens, sum(profile.chunks(tokens))))
            budget -= tokens
            overhead = profile.overhead
            load_time += new.load_time
        if not chunks:
            self._plan_decode(time, full=full)
            return
        for chunk in chunks:
            self._counters.prefill(chunk.padded, chunk.padded - chunk.tokens)
        duration = load_time + overhead + sum(chunk.padded for chunk in chunks) / profile.prefill_rate
        if self._decoding:
            duration += self._itl()
        self._work = Work(
            start=time,
            duration=duration,
            first_step=self._step,
            decodes=bool(self._decoding),
            streams=len(self._decoding),
            prefills=chunks,
        )

    def _plan_decode(self, time: float, *, full: bool) -> None:
        """Decode steps up to the first one after which something changes; nothing without streams.

        One step only if the queue was passed over because blocks ran out.
        """
        if not self._decoding:
            return
        wakes = self._wakes
        while wakes[0][2].wake != wakes[0][0] or not wakes[0][2].decoding:
            heappop(wakes)
        self._work = Work(
            start=time,
            duration=self._itl(),
            steps=1 if full else wakes[0][0] - self._step,
            first_step=self._step,
            decodes=True,
            streams=len(self._decoding),
        )

    def _itl(self) -> float:
        context = 0
        if self.profile.itl_per_context_token:
            context = 1 + max(request.computed_at(self._step) for request in self._decoding.values())
        return self.profile.itl(len(self._decoding), context)

    def _admit(self, time: float) -> ActiveRequest | None:
        """Admit the queue's first request if a slot and its blocks are free; nobody overtakes it.

        One that no compiled shape takes ends in an error, and the next one has its turn.
        """
        while self._queued and len(self._decoding) + len(self._prefilling) < self._slots:
            request = self._waiting[0][2]
            if self._queued.get(request.id) is not request:
                heappop(self._waiting)
                continue
            admission = self.memory.plan(request)
            if not self.profile.takes(request.target - admission.cached, admission.cached):
                heappop(self._waiting)
                self._leave(request)
                self._outputs.append(Finished(time, request.id, "error"))
                continue
            if not self.memory.fits(request, admission):
                if self._decoding or self._prefilling or not self.pins.give_way():
                    return None
                continue
            heappop(self._waiting)
            del self._queued[request.id]
            self._start(request, admission, time)
            return request
        return None

    def _start(self, request: ActiveRequest, admission: Admission, time: float) -> None:
        self.memory.admit(request, admission, time)
        self.prefetcher.demanded(admission.cached_l1, admission.cached_l2)
        self._prefilling[request.id] = request
        request.admitted = time
        request.cached_device = admission.cached_device
        request.cached_l1 = admission.cached_l1
        request.cached_l2 = admission.cached_l2
        request.load_time = admission.load_time
        request.computed = admission.cached
        request.padded = 0
        self._counters.lookup(request)
