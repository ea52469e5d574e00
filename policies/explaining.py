"""Why a policy chose as it did: what each filter said of each candidate, and what each scorer's cost was made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from policies.base import Candidate, Detailed, Explanation, Filter, RouteRequest, Row, Scorer


@dataclass(frozen=True, slots=True)
class Named:
    """The steps of a policy with what they are called."""

    filters: Sequence[tuple[str, Filter]]
    scorers: Sequence[tuple[str, Scorer, float]]

    @classmethod
    def of(cls, filters: Sequence[Filter], scorers: Sequence[tuple[Scorer, float]], names: Sequence[str]) -> "Named":
        """`names` are those of the filters, then of the scorers; their classes' names when empty. Weight 0 is left out."""
        steps: list[object] = [*filters, *(scorer for scorer, _ in scorers)]
        called = list(names) or [type(step).__qualname__ for step in steps]
        named = zip(called[len(filters) :], scorers, strict=True)
        return cls(
            tuple(zip(called, filters, strict=False)),
            tuple((name, scorer, weight) for name, (scorer, weight) in named if weight != 0),
        )


def explain(steps: Named, request: RouteRequest, candidates: Sequence[Candidate], chosen: int | None) -> Explanation:
    """The table and the sentence; `chosen` is an index into `candidates`, None: the cheapest.

    A step that raises is named in the reason; what it should have said is left out.
    """
    failed: list[str] = []
    rejected: dict[Candidate, str] = {}
    kept = tuple(candidates)
    for name, step in steps.filters:
        try:
            passed = set(step.filter(request, kept))
        except Exception as error:  # noqa: BLE001 - plug-ins may raise anything
            failed.append(_fault(name, error))
            continue
        rejected.update((candidate, name) for candidate in kept if candidate not in passed)
        kept = tuple(candidate for candidate in kept if candidate in passed)
    terms: dict[Candidate, dict[str, float]] = {candidate: {} for candidate in kept}
    scored = True
    for name, scorer, weight in steps.scorers if kept else ():
        try:
            parts = _parts(name, scorer, request, kept)
        except Exception as error:  # noqa: BLE001 - plug-ins may raise anything
            failed.append(_fault(name, error))
            scored = False
            continue
        for candidate, more in zip(kept, parts, strict=True):
            mine = terms[candidate]
            for term, value in more.items():
                mine[term] = mine.get(term, 0.0) + weight * value
    costs = {candidate: sum(mine.values()) for candidate, mine in terms.items()} if scored else {}
    rows = [
        Row(each.worker, each.match, rejected.get(each, ""), terms.get(each, {}), costs.get(each))
        for each in candidates
    ]
    if chosen is None and kept:
        best = min(kept, key=lambda each: costs.get(each, 0.0)) if costs else kept[0]
        chosen = next(index for index, each in enumerate(candidates) if each is best)
    return Explanation(tuple(rows), chosen, _reason(request, rows, chosen, failed))


def _parts(
    name: str, scorer: Scorer, request: RouteRequest, kept: Sequence[Candidate]
) -> Sequence[Mapping[str, float]]:
    """One scorer's terms per candidate: its own, or its cost under its name."""
    if isinstance(scorer, Detailed):
        parts = list(scorer.terms(request, kept))
    else:
        parts = [{name: float(cost)} for cost in scorer.score(request, kept)]
    if len(parts) != len(kept) or not all(isfinite(value) for each in parts for value in each.values()):
        raise ValueError("not one finite cost per candidate")
    return parts


def _fault(name: str, error: Exception) -> str:
    return f"{name} failed ({type(error).__name__})"


def _reason(request: RouteRequest, rows: Sequence[Row], chosen: int | None, failed: Sequence[str]) -> str:
    """One sentence."""
    kept = [row for row in rows if not row.rejected_by]
    if chosen is None:
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.rejected_by] = counts.get(row.rejected_by, 0) + 1
        by = ", ".join(f"{count} by {name}" for name, count in counts.items())
        text = f"None of {len(rows)} workers may take the request: dropped {by}" if rows else "There are no workers"
    else:
        row = rows[chosen]
        if row.rejected_by:
            text = f"{row.worker.id} was chosen although {row.rejected_by} would drop it now"
        elif len(kept) == 1:
            dropped = sorted({other.rejected_by for other in rows if other.rejected_by})
            text = f"{row.worker.id} was the only one of {len(rows)} workers"
            text += f" that {' and '.join(dropped)} let through" if dropped else ""
        else:
            text = _compared(row, kept)
        if request.prompt_tokens > 0 and row.match.tokens:
            text += f"; it holds {row.match.tokens} of the prompt's {request.prompt_tokens} tokens"
    if failed:
        text += f"; {', '.join(failed)}"
    return text + "."


def _compared(row: Row, kept: Sequence[Row]) -> str:
    """How the chosen one compares with the best of the others."""
    others = [other.cost for other in kept if other is not row and other.cost is not None]
    if row.cost is None or not others:
        return f"{row.worker.id} was chosen among {len(kept)} candidates by load"
    best = min(others)
    if row.cost < best:
        return f"{row.worker.id} costs least of {len(kept)} candidates, {row.cost:.4g} against {best:.4g} of the next"
    if row.cost == best:
        return f"{row.worker.id} was drawn among the cheapest of {len(kept)} candidates, which cost {row.cost:.4g} each"
    return f"{row.worker.id} was drawn among {len(kept)} candidates though another costs less, {best:.4g} against {row.cost:.4g}"
