"""Workers and fleets as a policy sees them."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.config.schema import Capabilities
from gateway.fleet.worker import Worker
from policies.base import NO_MATCH, Candidate, Match, Policy, RouteRequest
from policies.pipeline import Pipeline
from policies.registry import Registry
from simulator.engine import Engine, EngineRequest, Finished, FirstToken, Profile


@dataclass
class FakeWorker:
    """What `WorkerView` asks for, free to set."""

    id: str
    in_flight: int = 0
    in_flight_tokens: int = 0
    pending: int = 0
    pending_tokens: int = 0
    weight: float = 1.0
    routable: bool = True
    model: str = "m"
    capabilities: Capabilities = field(default_factory=Capabilities)


@pytest.fixture(scope="session")
def candidate() -> Callable[..., Candidate]:
    def make(worker_id: str = "w", **fields: object) -> Candidate:
        return Candidate(FakeWorker(worker_id, **fields), NO_MATCH)

    return make


@pytest.fixture(scope="session")
def fleet(candidate) -> Callable[..., list[Candidate]]:
    """`fleet(3)`: three idle workers; `fleet([2, 0])`: two workers with so many requests in flight."""

    def make(loads: int | list[int]) -> list[Candidate]:
        counts = [0] * loads if isinstance(loads, int) else loads
        return [candidate(f"10.0.0.{n}:8000", in_flight=count) for n, count in enumerate(counts)]

    return make


@pytest.fixture(scope="session")
def build() -> Callable[..., Pipeline]:
    """A preset with a fixed seed."""

    def make(name: str, seed: int = 7, **sections: object) -> Pipeline:
        return Registry.default().build(name, sections, seed=seed)

    return make


@pytest.fixture(scope="session")
def served() -> Callable[..., Counter[str]]:
    """How often each worker is chosen in so many decisions; with `hold`, each request stays in flight."""

    def count(
        policy: Policy,
        candidates: list[Candidate],
        decisions: int,
        make_request: Callable[[int], RouteRequest] = lambda _n: RouteRequest(model="m"),
        hold: bool = False,
    ) -> Counter[str]:
        counts: Counter[str] = Counter({each.worker.id: 0 for each in candidates})
        for n in range(decisions):
            decision = policy.decide(make_request(n), candidates)
            assert decision is not None
            counts[decision.chosen.worker.id] += 1
            decision.chosen.worker.in_flight += hold
        return counts

    return count


class NaiveFleet:
    """Workers and what the gateway believes of them: every block that was sent to a worker stays known as held there.

    A request's prompt is a list of block keys of `BLOCK` tokens. Nothing moves by itself: `send` decides and counts as the
    gateway does, `first_byte` and `end` say how far a request has come.
    """

    BLOCK = 16

    def __init__(self, policy: Policy, workers: int, **fields: Any) -> None:
        self.policy = policy
        self.workers = [FakeWorker(f"10.0.0.{n}:8000", **fields) for n in range(workers)]
        self.held: dict[str, set[Hashable]] = {worker.id: set() for worker in self.workers}
        self.computed: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.running: deque[tuple[FakeWorker, int]] = deque()

    def candidates(self, prompt: Sequence[Hashable]) -> list[Candidate]:
        """Each worker with the leading blocks that it holds."""
        found = []
        for worker in self.workers:
            blocks = 0
            while blocks < len(prompt) and prompt[blocks] in self.held[worker.id]:
                blocks += 1
            found.append(
                Candidate(worker, Match(device=blocks * self.BLOCK, source="expected") if blocks else NO_MATCH)
            )
        return found

    def send(self, prompt: Sequence[Hashable]) -> FakeWorker:
        """Decide, count, and remember the prompt's blocks as expected there."""
        tokens = len(prompt) * self.BLOCK + 1  # the last block is never full: something is always computed
        candidates = self.candidates(prompt)
        decision = self.policy.decide(RouteRequest(model="m", prompt_tokens=tokens), candidates)
        assert decision is not None
        assert decision.chosen in candidates
        worker = decision.chosen.worker
        uncached = tokens - decision.chosen.match.tokens
        worker.in_flight += 1
        worker.in_flight_tokens += tokens
        worker.pending += 1
        worker.pending_tokens += uncached
        self.held[worker.id].update(prompt)
        self.computed[worker.id] += uncached
        self.sent[worker.id] += 1
        self.running.append((worker, uncached))
        return worker

    def first_bytes(self) -> None:
        """All prefills have ended; the requests go on."""
        for worker in self.workers:
            worker.pending = worker.pending_tokens = 0

    def end(self) -> None:
        """The oldest request has ended; its prefill did before."""
        worker, _ = self.running.popleft()
        worker.in_flight -= 1


@pytest.fixture(scope="session")
def naive_fleet(build) -> Callable[..., NaiveFleet]:
    """`naive_fleet("kvaware", 8)`: a preset before eight workers that hold nothing."""

    def make(preset: str, workers: int = 8, seed: int = 7, **fields: Any) -> NaiveFleet:
        return NaiveFleet(build(preset, seed=seed), workers, **fields)

    return make


class Replay:
    """A preset before simulated workers in virtual time, which sees their caches as they are.

    Attributes:
        first_tokens: seconds to the first token, by request.
        cached: prompt tokens that were not computed.
        tokens: prompt tokens.
        served: requests by worker.
    """

    BLOCK = 512

    def __init__(self, policy: Policy, workers: int, **profile: Any) -> None:
        settings: dict[str, Any] = {
            "name": "test",
            "block_size": self.BLOCK,
            "kv_blocks": 2400,
            "slots": 64,
            "max_model_len": 200_000,
            "prefill": "exclusive",
            "admission": "paged",
            "prefill_rate": 8000.0,
            "overhead": 0.03,
            "itl_base": 0.02,
        } | profile
        self.policy = policy
        slots = Capabilities(slots=settings["slots"])
        self.workers = [FakeWorker(f"10.0.0.{n}:8000", capabilities=slots) for n in range(workers)]
        self.engines = [Engine(Profile(**settings), emit_tokens=False) for _ in range(workers)]
        self.first_tokens: list[float] = []
        self.cached = self.tokens = 0
        self.served: Counter[str] = Counter()
        self.live: dict[str, tuple[float, int]] = {}

    @property
    def mean(self) -> float:
        """Mean seconds to the first token."""
        return sum(self.first_tokens) / len(self.first_tokens)

    def run(self, requests: Iterable[tuple[float, int, int, Sequence[Hashable]]]) -> "Replay":
        """Requests as (arrival, prompt tokens, output tokens, keys of the prompt's full blocks), in order of arrival."""
        for number, (now, prompt, output, keys) in enumerate(requests):
            self.advance(now)
            candidates = [
                Candidate(
                    worker, Match(device=self.BLOCK * engine.memory.device.held(keys, (prompt - 1) // self.BLOCK))
                )
                for worker, engine in zip(self.workers, self.engines, strict=True)
            ]
            decision = self.policy.decide(RouteRequest(model="m", prompt_tokens=prompt), candidates)
            assert decision is not None
            index = candidates.index(decision.chosen)
            worker, uncached = self.workers[index], prompt - decision.chosen.match.tokens
            worker.in_flight += 1
            worker.pending += 1
            worker.pending_tokens += uncached
            self.served[worker.id] += 1
            self.live[str(number)] = now, uncached
            blocks = [*keys, *((number, n) for n in range((prompt + output) // self.BLOCK - len(keys)))]
            self.engines[index].submit(
                EngineRequest(id=str(number), prompt_tokens=prompt, output_tokens=output, blocks=blocks), now
            )
        self.advance(1e9)
        assert not self.live
        return self

    def advance(self, now: float) -> None:
        """Count what the workers have answered up to `now`."""
        for worker, engine in zip(self.workers, self.engines, strict=True):
            for output in engine.advance(now):
                if isinstance(output, FirstToken):
                    sent, uncached = self.live[output.request_id]
                    worker.pending -= 1
                    worker.pending_tokens -= uncached
                    self.first_tokens.append(output.time - sent)
                    self.cached += output.cached_device
                    self.tokens += output.cached_device + output.computed_tokens
                elif isinstance(output, Finished):
                    del self.live[output.request_id]
                    worker.in_flight -= 1


@pytest.fixture(scope="session")
def replay(build) -> Callable[..., Replay]:
    """`replay("kvaware", 8, requests)`: the outcome of requests on eight workers."""

    def make(preset: str, workers: int, requests: Iterable[Any], **profile: Any) -> Replay:
        return Replay(build(preset), workers, **profile).run(requests)

    return make


@pytest.fixture(scope="session")
def real() -> Callable[..., Candidate]:
    """A candidate with the gateway's own worker: `match` in tokens or as a `Match`, the rest as its capabilities."""

    def make(match: int | Match = 0, worker_id: str = "w", **section: Any) -> Candidate:
        section = {"prefill_rate": 1000.0, "overhead": 0.5, "prefill": "exclusive"} | section
        worker = Worker(
            url="http://127.0.0.1:1", driver=None, model="m", worker_id=worker_id, capabilities=Capabilities(**section)
        )
        worker.routable = True
        held = match if isinstance(match, Match) else Match(device=match, source="event") if match else NO_MATCH
        return Candidate(worker, held)

    return make
