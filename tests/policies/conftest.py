"""Workers and fleets as a policy sees them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gateway.config.schema import Capabilities
from policies.base import NO_MATCH, Candidate, Policy, RouteRequest
from policies.pipeline import Pipeline
from policies.registry import Registry


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
