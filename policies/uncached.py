"""What a worker would have to compute of a prompt."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest


def uncached_tokens(request: RouteRequest, candidates: Sequence[Candidate]) -> list[int]:
    """Per candidate ``max(0, prompt_tokens - tokens held in any tier)``; all 0 when the prompt's length is not known.

    A token counts as held whatever its tier and however we know of it. A match longer than the prompt, which no honest map
    reports, counts as the whole of it.
    """
    prompt = request.prompt_tokens
    # Spelled out, for `Match.tokens` is a call per candidate. Most hold nothing, and share one `Match` then.
    rests = [prompt - match.device - match.l1 - match.l2 for match in [candidate.match for candidate in candidates]]
    return rests if min(rests, default=0) >= 0 else [max(0, rest) for rest in rests]


def requests_by_weight(candidates: Sequence[Candidate]) -> list[float]:
    """Requests that a worker would have with this one, divided by its weight, less one: at full weight those in flight.

    With this one, because a worker that fails at once has none in flight: divided by however small a weight, none would stay the least of all.
    """
    return [
        worker.in_flight if worker.weight == 1.0 else (worker.in_flight + 1) / worker.weight - 1
        for worker in [candidate.worker for candidate in candidates]
    ]
