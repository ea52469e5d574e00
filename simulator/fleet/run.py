"""A workload through a policy and a fleet of engines, in virtual time.

The objects that decide are the gateway's own: the policy, its workers with their leases, the prefix index, the chains, residency. The
workers behind them are the simulator's engines. What is left out of the gateway: tokenizing, retries, health, sockets.

Time jumps from event to event: arrivals, and the moments at which an engine has something to say. At equal times engines
come first, so that a decision sees what has ended by then. No clock is read and nothing is opened.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Final, cast

from backends.hints.model import Hint
from backends.registry import driver_named
from gateway.admission.stages import Stage
from gateway.config.schema import Capabilities, TierMemory, Tiers
from gateway.errors import GatewayError
from gateway.fleet.worker import Lease, Worker, WorkerState
from gateway.prompt.blocks import Hasher
from gateway.residency.residency import TICK, Asked
from policies.base import NO_MATCH, Candidate, Explaining, Match, Policy, RouteRequest, knowledge_of
from policies.registry import PolicySection, Registry
from simulator.engine import Engine, EngineRequest, Finished, FirstToken, Profile, Retention, Tier
from simulator.fleet.admission import Door
from simulator.fleet.bounds import Bounds
from simulator.fleet.hints import Hints
from simulator.fleet.keys import KeyMaker, RequestKeys
from simulator.fleet.knowledge import CacheKnowledge
from simulator.fleet.options import FleetOptions
from simulator.fleet.result import Outcome, ReplayResult, Requests
from simulator.fleet.series import Series
from simulator.workloads.workload import Workload, WorkRequest

Progress = Callable[[int, int], None]
"""Told of the requests that have ended and of all, now and then."""

_LOOK: Final = 2
_HINT: Final = 3
_TICK: Final = 4
_TOLD: Final = 64
"""Requests between two reports of progress."""
_SHOWN_TOKENS: Final = 512
"""Leading tokens of a prompt that policies can see in the body (`policies.keys.prefix_key`)."""
_HASH_SEED: Final = 0
_EPOCH: Final = 1.0
"""What the gateway's objects see as the time of the start, in seconds: 0 means to them that a time is not known."""


class ReplayError(RuntimeError):
    """The simulation contradicts itself: a defect of ours, never of the workload."""


def replay(
    workload: Workload,
    options: FleetOptions,
    policy: str,
    *,
    sections: Mapping[str, PolicySection] | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Run `workload` on a new fleet.

    Args:
        workload: what arrives.
        options: the fleet.
        policy: name of a preset, or of one of `sections`.
        sections: policies of one's own, as in the configuration.
        progress: see `Progress`.

    Raises:
        PolicyError: there is no such policy, or its section makes no sense.
        ValueError: the workers' block size does not go with the workload's runs.
        ReplayError: see there.
    """
    built = Registry.default().build(policy, sections or {}, seed=options.seed)
    run = _Run(workload, options, built, progress)
    run.to_the_end()
    result = run.result()
    return replace(result, faults=built.faults, last_fault=built.last_fault)


class _Running:
    """A request that was sent to a worker."""

    __slots__ = ("arrival", "asked", "first", "index", "lease")

    def __init__(self, index: int, arrival: float, lease: Lease, asked: Asked | None) -> None:
        self.index = index
        self.asked = asked
        self.arrival = arrival
        self.first = 0.0
        self.lease = lease


class _Run:
    """The state of one replay."""

    def __init__(self, workload: Workload, options: FleetOptions, policy: Policy, progress: Progress | None) -> None:
        profile = options.profile
        self._workload = workload
        self._options = options
        self._policy = policy
        self._progress = progress
        self._workers = [_worker(f"w{index}", options.profile_of(index), options) for index in range(options.workers)]
        self._candidates = [worker.candidate for worker in self._workers]
        self._position = {worker.id: index for index, worker in enumerate(self._workers)}
        l2 = Tier(profile.l2_blocks) if profile.l2_blocks else None
        self._engines = [
            Engine(options.profile_of(index), seed=options.seed + index, emit_tokens=False, l2=l2)
            for index in range(options.workers)
        ]
        self._door = Door(options.admission, self._workers) if options.admission is not None else None
        hasher = Hasher(_HASH_SEED)
        self._keys = KeyMaker(hasher, run_tokens=workload.block_tokens, block_size=profile.block_size)
        self._knowledge = CacheKnowledge(
            [worker.id for worker in self._workers],
            knowledge=knowledge_of(policy),
            hasher=hasher,
            block_size=profile.block_size,
            capacity=profile.kv_blocks,
            lag=options.event_lag,
            loss=options.event_loss,
            random=Random(options.seed),
            shared_l2=l2 is not None,
        )
        self._hints: Hints | None = None
        self._said: list[Hint] = []
        self._asked: dict[int, Asked] = {}
        if options.residency is not None and self._knowledge.asked:
            self._hints = Hints(
                options.residency,
                self._workers,
                self._engines,
                match=self._knowledge.match,
                block_size=profile.block_size,
                lag=options.event_lag,
                later=self._say,
                epoch=_EPOCH,
            )
            if self._door is not None:
                self._door.gate.reservations.warm = self._reserved
        self._bounds = Bounds(options.workers * profile.kv_blocks, profile.block_size)
        requests = workload.requests
        self._requests: Sequence[WorkRequest] = requests
        self._out = Requests.blank(
            (request.prompt_tokens for request in requests), (request.output_tokens for request in requests)
        )
        self._running: dict[str, _Running] = {}
        self._waiting: dict[int, RequestKeys] = {}
        self._ended = 0
        self._now = 0.0
        self._refused = 0
        self._last = 0.0
        # (time, what: 0 an engine, 1 an arrival, 2 a look at the line, 3 a hint comes, 4 a tick of residency, engine, request or hint)
        self._events: list[tuple[float, int, int]] = []
        self._wakes: list[float | None] = [None] * options.workers
        self._followers: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            if request.after is None:
                self._events.append((request.time / options.speed, 1, index))
            else:
                self._followers[request.after].append(index)
        self._events.sort()
        self._first = self._events[0][0] if self._events else 0.0
        if self._hints is not None and self._events:
            heappush(self._events, (self._first, _TICK, 0))
        self._series = Series(self._first)

    def to_the_end(self) -> None:
        """Until every request has ended."""
        events, series = self._events, self._series
        while events:
            self._now, kind, index = heappop(events)
            now = self._now
            if now >= series.due:
                series.sample(now, self._workers, self._refused)
            if kind == 1:
                self._arrive(index, now)
            elif kind == 0 and self._wakes[index] == now:
                self._wakes[index] = None
                self._listen(index, now)
            elif kind == _HINT:
                self._hinted(self._said[index], now)
            elif kind == _TICK:
                self._tick(now)
            if self._door is not None:
                self._take_turns(self._door, now, looking=kind == _LOOK)
        series.sample(self._last + series.interval, self._workers, self._refused)
        self._check()

    def result(self) -> ReplayResult:
        """What came out of it."""
        bounds = self._bounds
        return ReplayResult(
            policy=self._policy.name,
            workload=self._workload.name,
            workers=[worker.id for worker in self._workers],
            profile=self._options.profile.name,
            seed=self._options.seed,
            knowledge=knowledge_of(self._policy),
            requests=self._out,
            series=self._series,
            duration=max(0.0, self._last - self._first),
            pooled_lru_hit_rate=bounds.pooled / (bounds.tokens or 1),
            infinite_hit_rate=bounds.infinite / (bounds.tokens or 1),
            hints=None if self._hints is None else self._hints.summary(),
        )

    def _arrive(self, index: int, now: float) -> None:
        """Decide and send."""
        request = self._requests[index]
        out = self._out
        out.arrival[index] = now
        if not _fits(self._options.profile, request):
            self._end(index, now, Outcome.REFUSED)
            return
        keys = self._keys.keys(request)
        self._bounds.arrived(keys)
        if self._door is not None:
            ticket = self._door.ticket(index, request, now + _EPOCH)
            try:
                self._door.gate.arrive(ticket, now + _EPOCH)
            except GatewayError:
                self._end(index, now, Outcome.REFUSED)
                return
        self._send(index, keys, now)

    def _send(self, index: int, keys: RequestKeys, now: float) -> None:
        """Decide and submit, if nothing speaks against it."""
        request = self._requests[index]
        known = self._knowledge
        candidates: Sequence[Candidate] = self._candidates
        if known.asked:
            matches = known.match(keys.chain, now)
            if matches:
                candidates = [
                    candidate
                    if (match := matches.get(candidate.worker.id)) is None
                    else Candidate(candidate.worker, match)
                    for candidate in candidates
                ]
        route = self._route(request, now)
        door = self._door
        if door is not None:
            try:
                selected = door.gate.select(door.tickets[index], route, candidates, now + _EPOCH)
            except GatewayError:
                self._end(index, now, Outcome.REFUSED)
                return
            if selected is None:
                self._waiting[index] = keys
                self._waits(index, keys, route, candidates, now)
                return
            candidates = selected
        decision = self._policy.decide(route, candidates)
        if decision is None:
            self._end(index, now, Outcome.REFUSED)
            return
        worker, match = cast("Worker", decision.chosen.worker), decision.chosen.match
        if door is not None:
            door.gate.started(door.tickets[index], route, decision.chosen, now + _EPOCH)
        # As the gateway does: what a policy without knowledge does not ask for, nobody counts.
        prompt = request.prompt_tokens if known.asked else 0
        asked, retention = self._wish(index, keys, worker, match, now)
        lease = worker.acquire(prompt, match=match, now=now + _EPOCH)
        if known.asked:
            lease.expectation = known.sent(worker.id, keys.chain, match)
        position = self._position[worker.id]
        out = self._out
        out.worker[index] = position
        out.predicted[index] = 0 if match is NO_MATCH else match.tokens
        self._running[request.id] = _Running(index, out.arrival[index], lease, asked)
        self._engines[position].submit(
            EngineRequest(request.id, request.prompt_tokens, request.output_tokens, keys.blocks, retention=retention),
            now,
        )
        self._listen(position, now)

    def _ask(self, index: int, keys: RequestKeys, now: float) -> Asked:
        """A request as residency sees it, made once."""
        assert self._hints is not None
        asked = self._asked.get(index)
        if asked is None:
            request = self._requests[index]
            asked = self._asked[index] = self._hints.asked(keys.chain, request.session, request.stage, now)
        return asked

    def _waits(
        self, index: int, keys: RequestKeys, route: RouteRequest, candidates: Sequence[Candidate], now: float
    ) -> None:
        """It waits in the gateway: what it will need may be fetched where the policy would send it now."""
        if self._hints is None or index in self._asked or not isinstance(self._policy, Explaining):
            return
        chosen = self._policy.explain(route, candidates).chosen
        if chosen is not None:
            candidate = candidates[chosen]
            worker = cast("Worker", candidate.worker)
            self._hints.waits(self._ask(index, keys, now), worker, candidate.match, now)

    def _wish(
        self, index: int, keys: RequestKeys, worker: Worker, match: Match, now: float
    ) -> tuple[Asked | None, Sequence[Retention]]:
        """What is wished because a request goes to `worker`; of that, what it is to carry."""
        hints = self._hints
        if hints is None:
            return None, ()
        asked = self._ask(index, keys, now)
        del self._asked[index]
        if worker.pending and self._door is None:
            # Without a line in the gateway the one at the worker is where it waits.
            hints.waits(asked, worker, match, now)
        return asked, hints.sent(asked, worker, match, now)

    def _reserved(self, session: str, stage: Stage, worker: Worker) -> None:
        """The gate keeps a slot at `worker`: what will be needed there may be fetched."""
        assert self._hints is not None
        self._hints.reserved(session, stage.name, worker, self._now)

    def _say(self, at: float, hint: Hint) -> None:
        self._said.append(hint)
        heappush(self._events, (at, _HINT, len(self._said) - 1))

    def _hinted(self, hint: Hint, now: float) -> None:
        """A hint has come to its worker."""
        assert self._hints is not None
        self._hints.take_effect(hint, now)
        self._listen(self._position[hint.worker], now)

    def _tick(self, now: float) -> None:
        """Residency looks at the clock, as long as anything is still to come."""
        assert self._hints is not None
        self._hints.tick(now)
        if self._ended < len(self._out):
            heappush(self._events, (min(self._hints.next_tick, now + TICK), _TICK, 0))

    def _take_turns(self, door: Door, now: float, *, looking: bool) -> None:
        """Act upon what the gate has said, and see when it has to be asked again."""
        if looking:
            door.gate.advance(now + _EPOCH)
        while door.turns:
            turn = door.turns.pop(0)
            if turn.index not in door.tickets:
                continue
            keys = self._waiting.pop(turn.index)
            if turn.error is not None:
                self._end(turn.index, now, Outcome.REFUSED)
            else:
                self._send(turn.index, keys, now)
        wake = door.next_wake(now + _EPOCH)
        if wake is not None:
            heappush(self._events, (wake - _EPOCH, _LOOK, 0))

    def _route(self, request: WorkRequest, now: float) -> RouteRequest:
        """What the policy sees of a request."""
        return RouteRequest(
            model=request.model,
            path="/v1/completions",
            headers={"x-session-id": request.session},
            body={"prompt": _beginning(request, self._workload.block_tokens), "max_tokens": request.output_tokens},
            prompt_tokens=request.prompt_tokens if self._knowledge.asked else 0,
            now=now + _EPOCH,
        )

    def _listen(self, position: int, now: float) -> None:
        """Take what an engine has to say, and see when it will have more."""
        engine = self._engines[position]
        outputs = engine.advance(now)
        if outputs:
            out = self._out
            for output in outputs:
                if type(output) is FirstToken:
                    running = self._running[output.request_id]
                    running.lease.first_byte(now + _EPOCH)
                    running.first = now + _EPOCH
                    if self._door is not None:
                        self._door.gate.opened(now + _EPOCH)
                    index = running.index
                    out.ttft[index] = output.time - running.arrival
                    out.device[index] = output.cached_device
                    out.l1[index] = output.cached_l1
                    out.l2[index] = output.cached_l2
                elif type(output) is Finished:
                    running = self._running.pop(output.request_id)
                    failed = output.reason == "error"
                    running.lease.release(0.0 if failed else now + _EPOCH)
                    if running.asked is not None and not failed:
                        self._answered(running, position, now)
                    if self._door is not None:
                        self._door.close(running.index, now + _EPOCH, running.first, completed=not failed)
                    self._end(running.index, now, Outcome.FAILED if failed else Outcome.COMPLETED)
            self._knowledge.heard(now, position, outputs)
            if self._hints is not None:
                self._hints.heard(self._workers[position].id, outputs, now)
        wake = engine.next_time()
        if wake is not None and wake != self._wakes[position]:
            # A wake that is put off leaves its old entry behind, which then finds that it is no longer meant.
            heappush(self._events, (wake, 0, position))
        self._wakes[position] = wake

    def _answered(self, running: _Running, position: int, now: float) -> None:
        """It has ended: hints about it show what they were worth."""
        assert self._hints is not None
        assert running.asked is not None
        out, index = self._out, running.index
        cached = out.device[index] + out.l1[index] + out.l2[index]
        self._hints.answered(running.asked, self._workers[position].id, cached, now)

    def _end(self, index: int, now: float, outcome: Outcome) -> None:
        """A request has ended; those that waited for it come."""
        out = self._out
        if out.outcome[index] != Outcome.UNENDED:
            raise ReplayError(f"request {self._requests[index].id} ended twice")
        out.outcome[index] = outcome
        if outcome is Outcome.REFUSED:
            self._refused += 1
            out.refused_after[index] = now - out.arrival[index]
        elif outcome is not Outcome.NEVER_CAME:
            out.e2e[index] = now - out.arrival[index]
        self._asked.pop(index, None)
        self._last = max(self._last, now)
        self._ended += 1
        if self._progress is not None and (self._ended % _TOLD == 0 or self._ended == len(out)):
            self._progress(self._ended, len(out))
        door = self._door
        if door is not None and index in door.tickets:
            door.close(index, now + _EPOCH)
        speed = self._options.speed
        for follower in self._followers.pop(self._requests[index].id, ()):
            if door is not None and outcome in {Outcome.REFUSED, Outcome.NEVER_CAME}:
                self._end(follower, now, Outcome.NEVER_CAME)
                continue
            request = self._requests[follower]
            arrival = max(request.time / speed, now + request.delay / speed)
            heappush(self._events, (arrival, 1, follower))

    def _check(self) -> None:
        """Every request has ended once, and no worker believes that it still has one.

        Raises:
            ReplayError: otherwise.
        """
        if self._ended != len(self._out):
            raise ReplayError(f"{len(self._out) - self._ended} of {len(self._out)} requests never ended")
        for worker in self._workers:
            if any((worker.in_flight, worker.in_flight_tokens, worker.pending, worker.pending_tokens, worker.backlog)):
                raise ReplayError(f"{worker} has leases left")


def _worker(worker_id: str, profile: Profile, options: FleetOptions) -> Worker:
    """A ready worker of the gateway that knows its profile's numbers; its speed only where that is told."""
    bytes_per_token = profile.kv_bytes_per_token
    worker = Worker(
        url=f"http://{worker_id}",
        driver=driver_named("neuron" if profile.admission == "reserve" else "vllm"),
        model="m",
        worker_id=worker_id,
        capabilities=Capabilities(
            block_size=profile.block_size,
            kv_capacity_tokens=profile.kv_blocks * profile.block_size,
            kv_bytes_per_token=bytes_per_token,
            max_model_len=profile.max_model_len,
            slots=profile.slots,
            prefill=profile.prefill,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            prefill_buckets=profile.prefill_buckets,
            segments=profile.segments,
            segment_size=profile.segment_size,
            max_prefix_bucket=profile.max_prefix_bucket,
            decode_context_buckets=profile.decode_context_buckets,
            prefill_rate=profile.prefill_rate if options.speed_told else None,
            overhead=profile.overhead if options.speed_told else None,
            tokens_per_step=profile.tokens_per_step,
            prefix_caching=profile.prefix_caching,
            tiers=Tiers(
                l1=_memory(profile.l1_blocks, profile.l1_bandwidth, profile.l1_latency, profile),
                l2=_memory(profile.l2_blocks, profile.l2_bandwidth, profile.l2_latency, profile),
            ),
        ),
    )
    worker.state = WorkerState.READY
    worker.routable = True
    return worker


def _memory(blocks: int, bandwidth: float, latency: float, profile: Profile) -> TierMemory | None:
    """A tier as the configuration says it; None where there is none."""
    if not blocks:
        return None
    return TierMemory(capacity=blocks * profile.kv_bytes_per_block, bandwidth=max(1, int(bandwidth)), latency=latency)


def _fits(profile: Profile, request: WorkRequest) -> bool:
    """Whether a worker could ever run the request."""
    tokens = request.prompt_tokens + request.output_tokens
    return tokens <= profile.max_model_len and profile.blocks_for(tokens) <= profile.kv_blocks


def _beginning(request: WorkRequest, run_tokens: int) -> list[int]:
    """The first tokens of the prompt, as far as policies look: each run's content id in place of its tokens."""
    left = min(request.prompt_tokens, _SHOWN_TOKENS)
    tokens: list[int] = []
    for content in request.blocks:
        tokens += [content] * min(run_tokens, left)
        left -= run_tokens
        if left <= 0:
            break
    return tokens
