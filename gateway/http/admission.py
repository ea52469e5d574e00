"""A request before the gate of its fleet: its ticket made, its turn awaited, its end told.

Nothing here is called while the configuration has neither stages nor a model with `admission` or workers with `limits`.
"""

from collections.abc import Mapping
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from gateway.admission.queue import Ticket
from gateway.admission.stages import asked_priority, deadline_of, session_of
from gateway.telemetry.metrics import Outcome
from gateway.telemetry.w3c import TraceParent

if TYPE_CHECKING:
    from gateway.admission.controller import Admissions
    from gateway.fleet.fleet import Fleet
    from gateway.http.journey import Journey

_OK = 200
_NO_FIELDS: Mapping[str, str] = {}
_BYTES_PER_TOKEN = 4
"""Where nobody counts."""


def arrive(journey: "Journey", fleet: "Fleet", admissions: "Admissions") -> None:
    """Find out the request's stage and, where its fleet has a gate, come to stand before it. `leave` must follow.

    Raises:
        GatewayError: 400 for a field that makes no sense; 429 when the line alone makes it late, or is full.
    """
    headers, tenant = journey.request.message.headers, journey.tenant
    # Fields are looked up only where the head was seen to have them: that costs a microsecond each.
    asked = headers if journey.head is not None and journey.head.asked else _NO_FIELDS
    name = tenant.name if tenant is not None else ""
    stages = admissions.stages
    stage = journey.stage = stages.of(fleet.name, name, headers, asked)
    gate = admissions.gates.get(fleet.name)
    session = session_of(headers, journey.parsed) if stage is not None and stages.linked else ""
    trace = journey.trace
    if stage is not None and session and trace is not None:
        if stages.follower(stage) is not None:
            admissions.follow(stage.name, session, TraceParent(trace.number, trace.span, trace.flags))
        if stage.after is not None and trace.parent is None and trace.link is None:
            trace.link = admissions.followed(stage.after, session)
    if gate is None:
        return
    now = monotonic()
    journey.gate = gate
    # In the order of its fields: with their names it takes five times as long.
    ticket = journey.ticket = Ticket(
        now,
        name,
        tenant.weight if tenant is not None else 1.0,
        stage,
        (stage.name if stage is not None else "", name),
        gate.pool_of(stage),
        (stage.priority if stage is not None else 0) + asked_priority(asked, journey.parsed),
        deadline_of(stage, asked, journey.start),
        len(journey.body) // _BYTES_PER_TOKEN or 1,
        session,
    )
    gate.arrive(ticket, now)


def priority_of(journey: "Journey") -> int:
    """The class that a request is of, smaller is sooner, whether it stands before a gate or not. For when somebody has to go."""
    if journey.ticket is not None:
        return journey.ticket.priority
    asked = journey.request.message.headers if journey.head is not None and journey.head.asked else _NO_FIELDS
    return (journey.stage.priority if journey.stage is not None else 0) + asked_priority(asked, journey.parsed)


def leave(journey: "Journey") -> None:
    """The request is over, in whichever way: the next may come."""
    gate, ticket = journey.gate, journey.ticket
    if gate is None or ticket is None:
        return
    usage, request = journey.usage, journey.route_request
    completed = (
        journey.outcome is Outcome.COMPLETED
        and journey.status == _OK
        and (request is None or request.attempt == 0)
        and (ticket.stage is not None or ticket.deadline < inf)
    )
    gate.close(
        ticket,
        journey.end,
        journey.first_byte_at if journey.stream else 0.0,
        completed=completed,
        output_tokens=usage.completion_tokens if usage is not None else 0,
    )
