"""The candidate table of a decision, made when somebody looks: every worker, what it held, its load, its cost, what dropped it."""

from collections.abc import Mapping, Sequence
from math import isclose
from typing import TYPE_CHECKING, Any

import msgspec

from policies.base import Candidate, Explaining, Explanation, Match, RouteRequest, Row, WorkerView
from policies.scorers.ttft import predicted_ttft

if TYPE_CHECKING:
    from gateway.telemetry.record import Decided


class Line(msgspec.Struct, frozen=True):
    """One candidate.

    Attributes:
        worker: as it was then.
        match: what it held of the prompt.
        rejected_by: the filter that dropped it, or empty.
        terms: what its cost was made of, by name; empty where that cannot be told any more.
        cost: None where there was none.
        chosen: it took the request.
    """

    worker: WorkerView
    match: Match
    rejected_by: str
    terms: Mapping[str, float]
    cost: float | None
    chosen: bool

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        worker, match = self.worker, self.match
        return {
            "worker": worker.id,
            "match": {"device": match.device, "l1": match.l1, "l2": match.l2, "source": match.source or None},
            "load": {
                "in_flight": worker.in_flight,
                "pending": worker.pending,
                "pending_tokens": worker.pending_tokens,
                "slots": worker.capabilities.slots,
            },
            "rejected_by": self.rejected_by or None,
            "terms": {name: _rounded(value) for name, value in self.terms.items()},
            "cost": None if self.cost is None else _rounded(self.cost),
            "chosen": self.chosen,
        }


class Table(msgspec.Struct, frozen=True):
    """All candidates of a decision, and why it fell as it did.

    Attributes:
        lines: in the order of the configuration.
        chosen_id: the chosen worker's, None when the filters let none through.
        reason: one sentence.
    """

    lines: Sequence[Line]
    chosen_id: str | None
    reason: str

    def document(self) -> list[dict[str, Any]]:
        """The lines, ready for JSON."""
        return [line.document() for line in self.lines]


def table_of(decided: "Decided", *, ask: bool = True) -> Table:
    """The table. Costs and who was left are what they were; the policy is asked for filters and terms with the loads of then.

    Without `ask` it is not, and any thread may call.

    A policy's own memory (whose turn it is, say) has moved on since: where its answer does not agree with what the decision
    said, the decision is right, and terms are left out.
    """
    decision = decided.decision
    given = _as_then(decided)
    chosen = _index(decided.candidates, decision.chosen) if decision is not None else None
    explanation = _explained(decided, given, chosen) if ask else _unexplained(given, chosen)
    costs = _costs(decided)
    left = set(decision.candidates) if decision is not None else set()
    agrees = True
    lines = []
    for index, (candidate, row) in enumerate(zip(decided.candidates, explanation.rows, strict=True)):
        stayed = candidate in left
        cost = costs.get(candidate, row.cost if stayed else None)
        terms = row.terms
        if cost is None or row.cost is None or not isclose(cost, row.cost, rel_tol=1e-6, abs_tol=1e-9):
            agrees = agrees and not stayed
            terms = {}
        rejected_by = "" if stayed else row.rejected_by or "filtered"
        lines.append(Line(row.worker, row.match, rejected_by, terms, cost, index == chosen))
    reason = explanation.reason if agrees and explanation.reason else sentence_of(decided)
    return Table(lines, lines[chosen].worker.id if chosen is not None else None, reason)


def ttft_of(decided: "Decided") -> float | None:
    """Seconds to the first token that the chosen worker was predicted to need."""
    chosen = _chosen(decided)
    return predicted_ttft(_request(decided), chosen) if chosen is not None else None


def cached_of(decided: "Decided") -> int | None:
    """Tokens of the prompt that the chosen worker was predicted to take from its cache."""
    chosen = _chosen(decided)
    if chosen is None:
        return None
    return chosen.worker.capabilities.credit(decided.request.prompt_tokens, chosen.match.tokens)


def _chosen(decided: "Decided") -> Candidate | None:
    """The chosen candidate as it was then."""
    if decided.decision is None:
        return None
    chosen = decided.decision.chosen
    return Candidate(decided.loads[_index(decided.candidates, chosen)], chosen.match)


def _as_then(decided: "Decided") -> list[Candidate]:
    return [Candidate(load, candidate.match) for candidate, load in zip(decided.candidates, decided.loads, strict=True)]


def _request(decided: "Decided") -> RouteRequest:
    """What the policy was told then: retries have changed the request since."""
    given = {candidate.worker.id for candidate in decided.candidates}
    tried = tuple(name for name in decided.request.tried if name not in given)
    return msgspec.structs.replace(decided.request, now=decided.at, tried=tried, attempt=len(tried))


def _explained(decided: "Decided", given: Sequence[Candidate], chosen: int | None) -> Explanation:
    policy = decided.policy
    if isinstance(policy, Explaining):
        try:
            return policy.explain(_request(decided), given, chosen)
        except Exception:  # noqa: BLE001, S110 - somebody else's policy; the rest of the table is still worth seeing
            pass
    return _unexplained(given, chosen)


def _unexplained(given: Sequence[Candidate], chosen: int | None) -> Explanation:
    return Explanation([Row(each.worker, each.match, "", {}, None) for each in given], chosen, "")


def _index(candidates: Sequence[Candidate], chosen: Candidate) -> int:
    return next(index for index, candidate in enumerate(candidates) if candidate is chosen)


def lines_of(decided: "Decided", count: int) -> list[dict[str, Any]]:
    """The chosen candidate, then those that cost least, then those that were dropped: `count` at most, ready for JSON.

    What the decision itself has said, without terms and without the names of filters. Any thread may ask.
    """
    decision = decided.decision
    costs = _costs(decided)
    chosen = decision.chosen if decision is not None else None
    left = set(decision.candidates) if decision is not None else set()
    order = sorted(
        zip(decided.candidates, decided.loads, strict=True),
        key=lambda pair: (pair[0] is not chosen, pair[0] not in left, costs.get(pair[0], 0.0)),
    )
    lines = []
    for candidate, load in order[:count]:
        match = candidate.match
        lines.append(
            {
                "worker": load.id,
                "device": match.device,
                "l1": match.l1,
                "l2": match.l2,
                "in_flight": load.in_flight,
                "pending_tokens": load.pending_tokens,
                "cost": costs.get(candidate),
                "chosen": candidate is chosen,
                "dropped": candidate not in left,
            }
        )
    return lines


def sentence_of(decided: "Decided") -> str:
    """Why the decision fell as it did, in one sentence, from what it has said itself. Any thread may ask."""
    decision = decided.decision
    if decision is None:
        return f"None of {len(decided.candidates)} workers may take the request."
    chosen, kept = decision.chosen, decision.candidates
    name = chosen.worker.id
    if len(kept) == 1:
        return f"{name} was the only one of {len(decided.candidates)} workers that the filters let through."
    costs = _costs(decided)
    others = [cost for candidate, cost in costs.items() if candidate is not chosen]
    if chosen not in costs or not others:
        return f"{name} was chosen among {len(kept)} candidates."
    mine, best = costs[chosen], min(others)
    if mine <= best:
        return f"{name} cost least of {len(kept)} candidates, {mine:.4g} against {best:.4g} of the next."
    return f"{name} was drawn among {len(kept)} candidates though another cost less, {best:.4g} against {mine:.4g}."


def _costs(decided: "Decided") -> dict[Candidate, float]:
    """As the decision has said them; empty where there was no choice to make."""
    decision = decided.decision
    if decision is None or not decision.costs:
        return {}
    return dict(zip(decision.candidates, decision.costs, strict=True))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
