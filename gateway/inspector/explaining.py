"""The decision that a request would get now, by several policies, without sending it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from gateway.http.routes import ROUTES, Body
from gateway.prompt.prompt import How
from gateway.telemetry.table import Line
from policies.base import Candidate, Explaining, Explanation, Policy, RouteRequest, knowledge_of
from policies.parameters import PolicyError
from policies.scorers.ttft import predicted_ttft

if TYPE_CHECKING:
    from gateway.fleet.fleet import Fleet
    from gateway.inspector.sources import InspectorSources
    from gateway.prefix.lookup import Lookup

ROWS: Final = 100
"""Candidates that are shown of each policy's table: the chosen one, then the cheapest, then those that were dropped."""
_HOW: Final = {How.EXACT: "exact", How.APPROXIMATE: "bytes", How.NONE: "none"}


class UnexplainableError(ValueError):
    """The request cannot be explained; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request as a client would send it.

    Attributes:
        path: the API path.
        body: the JSON body.
        headers: fields that a policy may read, names in lower case.
        policies: by which to explain; empty: the fleet's own, then all that are configured or built in.
    """

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    policies: Sequence[str]


async def explain(sources: "InspectorSources", question: Question) -> dict[str, Any]:
    """The tables, ready for JSON. Nothing is sent, counted or remembered, but prompts without a tokenizer are asked for as usual.

    Raises:
        UnexplainableError: there is no such path or model, or no such policy.
    """
    fleet = _fleet(sources, question)
    started = perf_counter()
    matcher = sources.matchers().get(fleet.name)
    lookup: Lookup | None = None
    if matcher is not None:
        size = len(str(question.body))
        lookup = matcher.now(question.path, question.body, size)
        if lookup is None:
            lookup = await matcher.lookup(question.path, question.body, size)
    seconds = perf_counter() - started
    candidates = list(lookup.candidates(fleet.candidates) if lookup is not None else fleet.candidates)
    given = [Candidate(_snapshot(candidate), candidate.match) for candidate in candidates]
    request = RouteRequest(
        model=fleet.name,
        path=question.path,
        headers=question.headers,
        body=question.body,
        prompt_tokens=lookup.prompt.token_count if lookup is not None else 0,
        now=sources.clock(),
    )
    names = question.policies or _every(sources, fleet)
    return {
        "model": fleet.name,
        "path": question.path,
        "policy": fleet.policy_name,
        "prompt": {
            "tokens": lookup.prompt.token_count if lookup is not None else None,
            "how": _HOW[lookup.prompt.how] if lookup is not None else "none",
            "why": (lookup.prompt.reason or None) if lookup is not None else "this fleet's policy reads no prompts",
            "seconds": round(seconds, 6),
        },
        "policies": [_explained(sources, fleet, name, request, given) for name in names],
    }


def _fleet(sources: "InspectorSources", question: Question) -> "Fleet":
    route = ROUTES.get(question.path)
    if route is None or route.body is not Body.JSON:
        raise UnexplainableError(f"{question.path} is no path with a JSON body that goes to a worker")
    model = question.body.get("model")
    fleet = sources.fleets().resolve(model if isinstance(model, str) else None)
    if fleet is None:
        known = ", ".join(name for name, _ in sources.fleets().names())
        raise UnexplainableError(f"the body's `model` is none of those that are served: {known}"[:2000])
    return fleet


def _snapshot(candidate: Candidate) -> Any:
    snapshot = getattr(candidate.worker, "snapshot", None)
    return candidate.worker if snapshot is None else snapshot()


def _every(sources: "InspectorSources", fleet: "Fleet") -> list[str]:
    others = (*sources.config().policies, *sources.registry.presets())
    return list(dict.fromkeys((fleet.policy_name, *others)))


def _explained(
    sources: "InspectorSources", fleet: "Fleet", name: str, request: RouteRequest, given: Sequence[Candidate]
) -> dict[str, Any]:
    """One policy's table. The fleet's own policy is asked itself; others are built anew and so remember nothing."""
    active = name == fleet.policy_name
    try:
        policy: Policy = fleet.policy if active else sources.registry.build(name, sources.config().policies)
    except PolicyError as error:
        raise UnexplainableError(error.message) from error
    knowledge = knowledge_of(policy)
    notes = []
    if knowledge != "none" and knowledge_of(fleet.policy) == "none":
        notes.append("nothing is known of the caches, for the policy in use does not ask")
    elif knowledge == "history" and knowledge_of(fleet.policy) == "events":
        notes.append("it would know only what this gateway has sent; here it is shown what the workers' events say")
    if not isinstance(policy, Explaining):
        return {
            "policy": name,
            "active": active,
            "chosen": None,
            "reason": "this policy cannot explain itself",
            "notes": notes,
            "candidates": [],
        }
    explanation = policy.explain(request, given)
    chosen = explanation.chosen
    return {
        "policy": name,
        "active": active,
        "knowledge": knowledge,
        "chosen": explanation.rows[chosen].worker.id if chosen is not None else None,
        "reason": explanation.reason,
        "notes": notes,
        "candidates": _rows(explanation, request, given),
        "left_out": max(0, len(explanation.rows) - ROWS),
    }


def _rows(explanation: Explanation, request: RouteRequest, given: Sequence[Candidate]) -> list[dict[str, Any]]:
    def rank(index: int) -> tuple[bool, bool, float]:
        row = explanation.rows[index]
        return index != explanation.chosen, row.cost is None, row.cost or 0.0

    rows = []
    for index in sorted(range(len(explanation.rows)), key=rank)[:ROWS]:
        row = explanation.rows[index]
        line = Line(row.worker, row.match, row.rejected_by, row.terms, row.cost, index == explanation.chosen)
        ttft = predicted_ttft(request, given[index])
        rows.append({**line.document(), "ttft": None if ttft is None else round(ttft, 6)})
    return rows
