"""A third-party package's policies, as its author would write them. Never imported: mypy reads it (`test_typing.py`).

What must be refused carries a ``type: ignore``; under ``--strict`` one that is not needed is an error as well.
"""

from collections.abc import Sequence
from random import Random

from policies.base import Candidate, Decision, Filter, Observer, Picker, Policy, RouteRequest, Scorer
from policies.pipeline import Pipeline
from policies.presets import Recipe, Step
from policies.registry import Registry


class FitsContext:
    """A filter."""

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        def fits(candidate: Candidate) -> bool:
            limit = candidate.worker.capabilities.max_model_len
            return limit is None or request.prompt_tokens < limit

        return [candidate for candidate in candidates if fits(candidate)]


class TokensInFlight:
    """A scorer that is an observer, too."""

    def __init__(self, *, scale: float = 8192.0) -> None:
        self.scale = scale
        self.last = ""

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        return tuple(candidate.worker.in_flight_tokens / self.scale for candidate in candidates)

    def observe(self, request: RouteRequest, decision: Decision) -> None:
        self.last = decision.chosen.worker.id


class Any1:
    """A picker."""

    def __init__(self, *, rng: Random) -> None:
        self.rng = rng

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], costs: Sequence[float]) -> int:
        return self.rng.randrange(len(candidates))


class OneByOne:
    """Not a scorer: it takes one candidate at a time."""

    def score(self, request: RouteRequest, candidate: Candidate) -> float:
        return 0.0


class Names:
    """Not a picker: it returns a name."""

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], costs: Sequence[float]) -> str:
        return candidates[0].worker.id


def preset(*, scale: float = 8192.0) -> Recipe:
    """A preset of one's own."""
    return Recipe(scorers=(Step("tokens-in-flight", parameters={"scale": scale}),))


a_filter: Filter = FitsContext()
a_scorer: Scorer = TokensInFlight(scale=4096)
an_observer: Observer = TokensInFlight()
a_picker: Picker = Any1(rng=Random(1))
by_hand: Policy = Pipeline("mine", [FitsContext()], [(TokensInFlight(), 0.5)], Any1(rng=Random(1)))

registry = Registry.default()
registry.register("filter", "fits-context", FitsContext)
registry.register("scorer", "tokens-in-flight", TokensInFlight)
registry.register("picker", "any", Any1)
registry.register_preset("tokens", preset)
built: Policy = registry.build("tokens", {}, seed=1)

not_a_scorer: Scorer = OneByOne()  # type: ignore[assignment]
not_a_picker: Picker = Names()  # type: ignore[assignment]
not_a_filter: Filter = TokensInFlight()  # type: ignore[assignment]
registry.register("sorter", "x", FitsContext)  # type: ignore[arg-type]


def cheat(candidate: Candidate, request: RouteRequest) -> None:
    """What a policy may not do to what it sees."""
    candidate.worker.in_flight += 1  # type: ignore[misc]
    candidate.worker = candidate.worker  # type: ignore[misc]
    request.headers["x-user"] = "admin"  # type: ignore[index]
