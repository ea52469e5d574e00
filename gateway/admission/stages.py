"""Stages: named classes of work, each with a deadline, a priority and a part of the fleet. No clock, no I/O.

Which one a request belongs to is said by its header field `STAGE_HEADER`, else by what a stage matches: its model, its tenant, other
fields. What it is due by is its stage's deadline, or `DEADLINE_HEADER`'s; its class is its stage's priority plus what the request
asks for itself (`PRIORITY_HEADER`, or vLLM's ``priority`` in the body): smaller is sooner.
"""

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal

from gateway.admission.shedding import LARGEST, Estimate
from gateway.errors import GatewayError, Source

if TYPE_CHECKING:
    from gateway.config.schema import Stage as Section

STAGE_HEADER: Final = "x-warmroute-stage"
DEADLINE_HEADER: Final = "x-warmroute-deadline-ms"
PRIORITY_HEADER: Final = "x-warmroute-priority"
SESSION_HEADER: Final = "x-warmroute-session"
MOST_PRIORITY: Final = 1 << 31
_LONGEST: Final = 86_400_000.0
"""Milliseconds of the longest deadline that may be asked for: a day."""


class Stage:
    """One stage, as one configuration has it.

    Attributes:
        name: as configured.
        kind: what has to have happened by the deadline: ``ttft`` the first token, ``completion`` the last one.
        deadline: seconds from the request's arrival; infinite: none.
        priority: its class.
        reserve: share of a fleet's slots that is kept for it.
        max_share: share of a fleet's slots that it may take.
        pool: ids of the workers that are its own; empty: those of all that have none.
        after: name of the stage that precedes it in a conversation, None: none.
        hedging: how its requests are hedged, None: as their model's are.
        hold: seconds that a slot is kept for it from the start of that stage's request on.
        models, tenants, headers: what it matches, empty: anything.
        matched: it asks for something; one that does not is only taken by name.
    """

    __slots__ = (
        "after",
        "deadline",
        "headers",
        "hedging",
        "hold",
        "kind",
        "matched",
        "max_share",
        "models",
        "name",
        "pool",
        "priority",
        "reserve",
        "tenants",
    )

    def __init__(self, name: str, section: "Section") -> None:
        self.name = name
        self.kind: Literal["ttft", "completion"] = section.kind
        self.deadline = inf if section.deadline is None else section.deadline
        self.priority = section.priority
        self.reserve = section.reserve
        self.max_share = section.max_share
        self.pool = frozenset(section.workers)
        self.after = section.after
        self.hold = section.hold
        self.hedging = section.hedging
        self.models = frozenset(section.match.models)
        self.tenants = frozenset(section.match.tenants)
        self.headers = {field.lower(): value for field, value in section.match.headers.items()}
        self.matched = bool(self.models or self.tenants or self.headers)

    def __repr__(self) -> str:
        return f"<Stage {self.name}>"

    def matches(self, model: str, tenant: str, headers: Mapping[str, str]) -> bool:
        """Whether a request that names no stage is of this one."""
        return (
            self.matched
            and (not self.models or model in self.models)
            and (not self.tenants or tenant in self.tenants)
            and (not self.headers or all(headers.get(field) == value for field, value in self.headers.items()))
        )


class Stages:
    """All stages of one configuration, and what was learned of each.

    Attributes:
        by_name: in the order of the configuration, which is that in which they are matched.
        learned: what was learned, by fleet and stage.
        pooled: ids of the workers that are some stage's own.
    """

    __slots__ = ("_followers", "by_name", "learned", "pooled")

    def __init__(self, sections: "Mapping[str, Section]", before: "Stages | None" = None) -> None:
        """`before`: the stages until now, of which is kept what was learned."""
        self.by_name = {name: Stage(name, section) for name, section in sections.items()}
        self.pooled = frozenset(worker for stage in self.by_name.values() for worker in stage.pool)
        self._followers = {stage.after: stage for stage in self.by_name.values() if stage.after is not None}
        self.learned: dict[tuple[str, str], Estimate] = {} if before is None else before.learned

    def of(
        self, model: str, tenant: str, headers: Mapping[str, str], named: Mapping[str, str] | None = None
    ) -> Stage | None:
        """The stage of a request.

        Args:
            model: the fleet's name.
            tenant: whose it is.
            headers: its fields.
            named: where `STAGE_HEADER` is looked for, if that is known better; None: in `headers`.

        Raises:
            GatewayError: 400, it names one that does not exist.
        """
        if not self.by_name:
            return None
        if name := (headers if named is None else named).get(STAGE_HEADER):
            stage = self.by_name.get(name)
            if stage is None:
                raise _bad_field(STAGE_HEADER, f"names no stage; there are: {', '.join(self.by_name)}")
            return stage
        for stage in self.by_name.values():
            if stage.matches(model, tenant, headers):
                return stage
        return None

    @property
    def shared(self) -> bool:
        """Whether any of them has a share of slots."""
        return any(stage.reserve > 0 or stage.max_share < 1 for stage in self.by_name.values())

    @property
    def linked(self) -> bool:
        """Whether any of them comes after another."""
        return bool(self._followers)

    def follower(self, stage: Stage | None) -> Stage | None:
        """The stage that comes after `stage` in a conversation."""
        return self._followers.get(stage.name) if stage is not None else None

    def estimate(self, fleet: str, stage: Stage | None) -> Estimate:
        """What was learned of requests of `stage` at a fleet."""
        key = (fleet, stage.name if stage is not None else "")
        found = self.learned.get(key)
        if found is None:
            found = self.learned[key] = Estimate()
        found.most = stage.deadline * LARGEST if stage is not None else inf
        return found


def deadline_of(stage: Stage | None, headers: Mapping[str, str], arrived: float) -> float:
    """When a request that `arrived` then is due; infinite: never.

    Raises:
        GatewayError: 400, what its header field says is no time.
    """
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return arrived + stage.deadline if stage is not None else inf
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= _LONGEST:
        raise _bad_field(DEADLINE_HEADER, "must be a number of milliseconds above 0, up to a day")
    return arrived + milliseconds / 1000


def asked_priority(headers: Mapping[str, str], body: Mapping[str, Any]) -> int:
    """The priority that a request asks for itself: its header field's, else vLLM's member of the body; 0 without.

    Raises:
        GatewayError: 400, the field's is no integer. A body that vLLM would refuse is left to it.
    """
    text = headers.get(PRIORITY_HEADER)
    if text is not None:
        try:
            priority = int(text)
        except ValueError:
            priority = MOST_PRIORITY + 1
        if abs(priority) > MOST_PRIORITY:
            raise _bad_field(PRIORITY_HEADER, "must be an integer; smaller is sooner")
        return priority
    member = body.get("priority")
    return member if type(member) is int and abs(member) <= MOST_PRIORITY else 0


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """What links the stages of one conversation: `SESSION_HEADER`, ``metadata.session_id`` or ``prompt_cache_key``; empty: nothing."""
    if session := headers.get(SESSION_HEADER):
        return session
    metadata = body.get("metadata")
    found = metadata.get("session_id") if isinstance(metadata, dict) else None
    if not isinstance(found, str):
        found = body.get("prompt_cache_key")
    return found if isinstance(found, str) else ""


def share_of(slots: float, share: float) -> float:
    """So many slots of all are a share of them; at least one, if it is a share at all."""
    return max(1.0, slots * share) if share > 0 else 0.0


def kept_for_others(stage: Stage | None, stages: Iterable[Stage], running: Mapping[str, int], slots: float) -> float:
    """Slots that `stage` must leave to others: what they have reserved and do not use."""
    return sum(
        max(0.0, share_of(slots, other.reserve) - running.get(other.name, 0))
        for other in stages
        if other is not stage and other.reserve > 0
    )


def _bad_field(field: str, problem: str) -> GatewayError:
    return GatewayError(
        400, "invalid_request", f"{field} {problem}.", source=Source.CLIENT, code="invalid_header", param=field
    )
