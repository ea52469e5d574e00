"""What residency has to do with a request: what is wished for it, what it carries, and what its end says.

Nothing here is called for fleets without residency, and nothing here may fail a request: whatever goes wrong in a rule or a driver is
logged and counted (`FleetResidency.failed`), and the request goes on without hints.
"""

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import orjson

from backends.hints.model import Fate, Hint, Subject
from gateway.http.splice import with_member
from gateway.prompt.prompt import How
from gateway.residency.client_words import client_words
from gateway.residency.residency import Asked
from gateway.telemetry.metrics import Outcome
from policies.base import Explaining

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.fleet.worker import Worker
    from gateway.http.journey import Journey
    from gateway.prefix.lookup import Lookup
    from gateway.prompt.prompt import Prompt
    from gateway.residency.live import FleetResidency, Note
    from gateway.residency.speakers import Speaker
    from policies.base import Candidate, Match, Policy, RouteRequest

_OK: Final = 200
REFUSALS: Final = frozenset({400, 422})
"""How a worker says that it does not take a body. Of one that carries hints it is asked again without them."""
MOST_EXPLAINED: Final = 64
"""Candidates up to which the policy itself is asked where a request that waits will probably go: 5 us each."""


class Hinted:
    """One request as residency sees it.

    Attributes:
        live: its fleet's residency.
        asked: what its rules are told.
        inside: the hints that the body of the present attempt carries, each with who says it.
        refused: the worker has refused that body; it goes out again without them.
        notes: of all hints that were wished because of it.
    """

    __slots__ = ("asked", "inside", "live", "notes", "refused", "suspects", "waited")

    def __init__(self, live: "FleetResidency", asked: Asked) -> None:
        self.live = live
        self.asked = asked
        self.inside: list[tuple[Speaker, Hint]] = []
        self.refused = False
        self.suspects: list[tuple[Speaker, Hint]] = []
        self.waited = False
        self.notes: list[Note] = []


def waits(
    journey: "Journey",
    live: "FleetResidency",
    policy: "Policy",
    request: "RouteRequest",
    candidates: "Sequence[Candidate]",
) -> None:
    """A request has to wait for its turn: what it will need may be fetched where it will probably go. Once per request."""
    try:
        hinted = _hinted(journey, live)
        if hinted is None or hinted.waited:
            return
        hinted.waited = True
        probable = _probable(policy, request, candidates)
        if probable is None:
            return
        hints = live.core.waiting(hinted.asked, probable.worker, probable.match)
        if hints:
            hinted.notes += live.say(hints)[1]
    except Exception:  # noqa: BLE001 - see the module
        live.failed()


def sent(journey: "Journey", live: "FleetResidency", worker: "Worker", match: "Match", now: float) -> None:
    """It was decided where an attempt goes, and its body is not made yet."""
    try:
        hinted = _hinted(journey, live)
        if hinted is None:
            return
        asked = hinted.asked
        asked.now = now
        hinted.inside = []
        hints = live.core.sent(asked, worker, match)
        if hints:
            hinted.inside, notes = live.say(hints, asked.subject, worker.id)
            hinted.notes += notes
    except Exception:  # noqa: BLE001 - see the module
        live.failed()


def with_hints(body: bytes, parsed: "Mapping[str, Any]", hinted: Hinted) -> "tuple[bytes, Mapping[str, Any]]":
    """`body` with the fields that say what the attempt is to carry, merged with the client's own, which are never lost.

    Args:
        body: a JSON object.
        parsed: the client's.
        hinted: what is carried; of what can't be, the fate is told and it is taken out.

    Returns:
        The body, and what it would now be parsed to.
    """
    try:
        return _with_hints(body, parsed, hinted)
    except Exception:  # noqa: BLE001 - see the module
        hinted.inside = []
        hinted.live.failed()
        return body, parsed


def _with_hints(body: bytes, parsed: "Mapping[str, Any]", hinted: Hinted) -> "tuple[bytes, Mapping[str, Any]]":
    for speaker, hints in _by_speaker(hinted.inside):
        said = False
        for name, value in speaker.driver.fields(hints, parsed).items():
            spliced = with_member(body, parsed, name, orjson.dumps(value))
            if spliced is not body:
                body, said = spliced, True
                parsed = {**parsed, name: value}
        if not said:
            hinted.live.fate([(speaker, hint) for hint in hints], Fate.SKIPPED, "the client's own field leaves no room")
            hinted.inside = [pair for pair in hinted.inside if pair[0] is not speaker]
    if hinted.inside:
        hinted.live.fate(hinted.inside, Fate.SENT, "inside the request", hinted.asked.now)
    return body, parsed


def _by_speaker(pairs: "Sequence[tuple[Speaker, Hint]]") -> "Iterable[tuple[Speaker, list[Hint]]]":
    if len(pairs) == 1:
        ((speaker, hint),) = pairs
        return ((speaker, [hint]),)
    spoken: dict[int, tuple[Speaker, list[Hint]]] = {}
    for speaker, hint in pairs:
        spoken.setdefault(id(speaker), (speaker, []))[1].append(hint)
    return spoken.values()


def passes_on(hinted: Hinted, status: int) -> bool:
    """Whether an answer with this status is given up, for the worker to be asked again without what offended it."""
    if not hinted.inside or status not in REFUSALS:
        return False
    hinted.refused = True
    return True


def strip(hinted: Hinted) -> None:
    """The next attempt carries nothing."""
    hinted.suspects, hinted.inside = hinted.inside, []
    hinted.refused = False


def attempted(journey: "Journey", hinted: Hinted) -> None:
    """An attempt is over, in whichever way: what it carried was taken, or went nowhere."""
    try:
        _attempted(journey, hinted)
    except Exception:  # noqa: BLE001 - see the module
        hinted.live.failed()


def _attempted(journey: "Journey", hinted: Hinted) -> None:
    if hinted.suspects:
        if _OK <= journey.status < 400:
            hinted.live.refused(hinted.suspects, "the request was refused with hints and taken without")
        else:
            hinted.live.fate(hinted.suspects, Fate.FAILED, "the request was refused without hints, too")
        hinted.suspects = []
    if hinted.inside:
        elsewhere = journey.worker is None or journey.worker.id != hinted.inside[0][1].worker
        if elsewhere:
            hinted.live.fate(hinted.inside, Fate.FAILED, "another attempt was quicker")
        elif journey.status == _OK:
            hinted.live.fate(hinted.inside, Fate.ACCEPTED, "the request was answered")
        else:
            hinted.live.fate(hinted.inside, Fate.FAILED, "the request was not answered")
        hinted.inside = []


def ended(journey: "Journey", hinted: Hinted) -> None:
    """The request is over."""
    usage, live = journey.usage, hinted.live
    cached = usage.cached_tokens if usage is not None else None
    answered = journey.status == _OK and journey.worker is not None and journey.outcome is not Outcome.FAILED
    worker = journey.worker.id if answered and journey.worker is not None else ""
    try:
        hints = live.core.answered(hinted.asked, worker, journey.match if cached is None else cached, journey.end)
        if hints:
            hinted.notes += live.say(hints)[1]
    except Exception:  # noqa: BLE001 - see the module
        live.failed()


def _hinted(journey: "Journey", live: "FleetResidency") -> Hinted | None:
    """The request's `Hinted`, made at the first call; None: nothing is known of its prompt."""
    hinted = journey.hinted
    if hinted is not None or live.silent:
        return hinted
    if (lookup := journey.lookup) is not None and lookup.chains and journey.route.generates:
        hinted = journey.hinted = Hinted(live, _asked(journey, lookup))
    return hinted


def _asked(journey: "Journey", lookup: "Lookup") -> Asked:
    prompt, parsed, head = lookup.prompt, journey.parsed, journey.head
    model, salt = parsed.get("model"), parsed.get("cache_salt")
    known = journey.fleet is None or model is None or model in journey.fleet.own_names
    subject = Subject(
        lookup.fleet,
        prompt.token_count,
        {size: chain.hashes for size, chain in lookup.chains.items()},
        partial(_ids, prompt) if prompt.how is How.EXACT else None,
        salt if isinstance(salt, str) else None,
        None if known or not isinstance(model, str) else model,
        _session(journey),
    )
    words = client_words(parsed, prompt, session_end=head is not None and head.session_ends)
    return Asked(subject, monotonic(), journey.stage.name if journey.stage is not None else None, words)


def _session(journey: "Journey") -> str:
    """The conversation that a request names: by header field, ``metadata.session_id`` or ``session_id``; empty: it names none."""
    head, parsed, ticket = journey.head, journey.parsed, journey.ticket
    name = ""
    if ticket is not None and ticket.session:
        name = ticket.session  # as reservations know it
    elif head is not None and head.session:
        name = head.session.decode("latin-1")
    else:
        metadata = parsed.get("metadata")
        found = metadata.get("session_id") if isinstance(metadata, dict) else None
        if found is None:
            found = parsed.get("session_id")
        if isinstance(found, str):
            name = found
    return session_name(name, journey.tenant.name if journey.tenant is not None else "")


def session_name(session: str, tenant: str) -> str:
    """A session as rules see it: nobody can speak of another tenant's by naming it."""
    return f"{tenant}/{session}" if session and tenant else session


def _ids(prompt: "Prompt") -> "array[int]":
    return prompt.ids


def _probable(policy: "Policy", request: "RouteRequest", candidates: "Sequence[Candidate]") -> "Candidate | None":
    """Where a request would go if all had room; nothing that a policy remembers is changed by asking."""
    if isinstance(policy, Explaining) and len(candidates) <= MOST_EXPLAINED:
        request.now = monotonic()
        chosen = policy.explain(request, candidates).chosen
        return None if chosen is None else candidates[chosen]
    takes = [candidate for candidate in candidates if candidate.worker.routable]
    return max(takes, key=lambda each: (each.match.tokens, -each.worker.backlog), default=None)
