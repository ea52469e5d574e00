"""A policy as filters, scorers and one picker, and what happens when one of them misbehaves."""

import operator
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from random import Random
from typing import Final

from policies.base import (
    Candidate,
    Decision,
    Explanation,
    Filter,
    Knowledge,
    Observer,
    Picker,
    RouteRequest,
    Scorer,
)
from policies.explaining import Named, explain

FAULT_LENGTH: Final = 300
"""Characters kept of a fault's text: an exception's message may be as long as the request that caused it."""


class StepError(Exception):
    """A filter, scorer or picker returned something that its Protocol does not allow."""


class Pipeline:
    """Filters in order, then the weighted sum of the scorers' costs, then the picker.

    A step may be somebody else's code. If one raises, or returns what its Protocol does not allow, the decision is made
    all the same: by least load among the candidates that the other filters let through. `faults` and `last_fault` say so;
    the caller logs them, at most once a minute. A step gets tuples, so it cannot change what another one sees.

    Attributes:
        name: as configured.
        knowledge: of the caches, what its candidates' matches should come from (see `policies.base.Knowledge`).
        faults: how often a step misbehaved.
        last_fault: which step and how, the last time; empty if none ever did.
    """

    __slots__ = (
        "_filters",
        "_named",
        "_observers",
        "_picker",
        "_rng",
        "_scorer",
        "_scorers",
        "faults",
        "knowledge",
        "last_fault",
        "name",
    )

    def __init__(
        self,
        name: str,
        filters: Sequence[Filter],
        scorers: Sequence[tuple[Scorer, float]],
        picker: Picker,
        rng: Random | None = None,
        *,
        history_only: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        """Scorers of weight 0 are left out; without any, all candidates cost the same. `rng` breaks ties after a fault.

        `names` are what `explain` calls the filters, then the scorers; their classes' names when left out. A step that reads matches says so by an attribute `needs_match` that is true. With `history_only` they come from the
        gateway's own history even where workers send events.
        """
        self.name = name
        self.faults = 0
        self.last_fault = ""
        self._rng = rng or Random()
        self._filters = tuple(step.filter for step in filters)
        self._scorers = tuple((scorer.score, weight) for scorer, weight in scorers if weight != 0)
        self._scorer = self._scorers[0][0] if len(self._scorers) == 1 and self._scorers[0][1] == 1 else None
        self._picker = picker.pick
        steps: list[object] = [*filters, *(scorer for scorer, _ in scorers), picker]
        asked: list[object] = [*filters, *(scorer for scorer, weight in scorers if weight != 0), picker]
        needs_match = any(getattr(step, "needs_match", False) for step in asked)
        self.knowledge: Knowledge = ("history" if history_only else "events") if needs_match else "none"
        self._named = Named.of(filters, scorers, names)
        self._observers = tuple(step.observe for step in steps if isinstance(step, Observer))

    def __repr__(self) -> str:
        return f"<Pipeline {self.name} faults={self.faults}>"

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """Choose one of `candidates`; None when the filters let none through.

        With one candidate left there is nothing to weigh: neither scorers nor the picker are asked, and `costs` is empty.
        """
        kept = tuple(candidates)
        broken = False
        for step in self._filters:
            try:
                passed = step(request, kept)
                if passed is not kept:
                    kept = _subset(passed, kept)
            except Exception as error:  # noqa: BLE001 - plug-ins may raise anything; the request must go on
                self._fault(step, error)
                broken = True
        if not kept:
            return None
        if len(kept) == 1:
            decision = Decision(kept[0], kept, (), self.name)
        elif broken:
            decision = self._least_loaded(kept)
        else:
            decision = self._choose(request, kept)
        for observe in self._observers:
            try:
                observe(request, decision)
            except Exception as error:  # noqa: BLE001 - as above
                self._fault(observe, error)
        return decision

    def let_through(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of `candidates` that all filters let through. Nothing is counted, and a filter that misbehaves drops nobody."""
        kept = tuple(candidates)
        for step in self._filters:
            with suppress(Exception):  # plug-ins may raise anything; `decide` will say so
                passed = step(request, kept)
                kept = kept if passed is kept else _subset(passed, kept)
        return kept

    def explain(self, request: RouteRequest, candidates: Sequence[Candidate], chosen: int | None = None) -> Explanation:
        """Why the policy chooses, or chose `chosen` (an index into `candidates`): the whole table, and one sentence.

        Nothing is counted and nobody told of it, and what a step draws at random is not used up. With snapshots of the
        workers it may be asked long after the decision; what steps remember (whose turn it is) is as of now, though.
        """
        state = self._rng.getstate()
        try:
            return explain(self._named, request, candidates, chosen)
        finally:
            self._rng.setstate(state)

    def _choose(self, request: RouteRequest, kept: tuple[Candidate, ...]) -> Decision:
        """Score and pick among two or more candidates."""
        step: object = self._scorer
        try:
            if self._scorer is not None:
                costs = tuple(self._scorer(request, kept))
                _check_count(costs, len(kept))
                _check_finite(costs)
            else:
                costs = (0.0,) * len(kept)
                for score, weight in self._scorers:
                    step = score
                    scored = tuple(score(request, kept))
                    _check_count(scored, len(kept))
                    costs = tuple([cost + weight * more for cost, more in zip(costs, scored, strict=True)])
                    _check_finite(costs)  # finite before: so this scorer, or its weight, is to blame
            step = self._picker
            index = _check_index(self._picker(request, kept, costs), len(kept))
            return Decision(kept[index], kept, costs, self.name)
        except Exception as error:  # noqa: BLE001 - plug-ins may raise anything; the request must go on
            self._fault(step, error)
            return self._least_loaded(kept)

    def _least_loaded(self, kept: tuple[Candidate, ...]) -> Decision:
        """The fallback: fewest requests in flight, ties at random."""
        costs = tuple([float(candidate.worker.in_flight) for candidate in kept])
        least = min(costs)
        chosen = self._rng.choice([candidate for candidate, cost in zip(kept, costs, strict=True) if cost == least])
        return Decision(chosen, kept, costs, self.name)

    def _fault(self, step: object, error: Exception) -> None:
        """Count a fault and keep its text; `step` is the bound method that was called."""
        self.faults += 1
        owner = type(getattr(step, "__self__", step)).__qualname__
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - a plug-in's exception may not even have a text
            text = ""
        kind = "" if isinstance(error, StepError) else f"{type(error).__name__}: "
        self.last_fault = f"{owner}: {kind}{text}"[:FAULT_LENGTH]


def _subset(passed: Sequence[Candidate], kept: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """What a filter let through, as a tuple; raises StepError when it is not part of what the filter was given."""
    result = tuple(passed)
    members = set(result)
    if len(members) != len(result) or not members.issubset(kept):
        raise StepError("returned candidates that it was not given, or one twice")
    return result


def _check_count(costs: tuple[float, ...], count: int) -> None:
    """Raise StepError unless there are `count` costs."""
    if len(costs) != count:
        raise StepError(f"returned {len(costs)} costs for {count} candidates")


def _check_finite(costs: tuple[float, ...]) -> None:
    """Raise StepError when a cost is NaN or infinite."""
    # A sum carries every NaN and infinity along at the speed of C; it may also overflow on costs that are fine.
    if not isfinite(sum(costs)) and not all(map(isfinite, costs)):
        raise StepError("returned a cost that is not finite, or too large for its weight")


def _check_index(index: int, count: int) -> int:
    """`index` as an int (numpy's integers have their own types); raises StepError unless it points at a candidate."""
    index = operator.index(index)
    if not 0 <= index < count:
        raise StepError(f"picked index {index} of {count} candidates")
    return index
