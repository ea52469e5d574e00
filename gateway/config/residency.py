"""The section `residency` and a worker's `hints`: which rules of residency are on and with which numbers, and how much they may ask for."""

from typing import Annotated, TypeVar

import msgspec

from gateway.config.base import Bytes, Count, Name, Positive, Seconds, Share, Struct


class QueuedNext(Struct, frozen=True, kw_only=True):
    """While a request waits for its turn, what the worker that will probably take it has in slower memory is brought nearer."""

    min_tokens: Count = 512
    """Less than this is not worth a hint."""
    peers: bool = True
    """Also from another worker's memory, where that one holds more and a driver can move it."""


class Retain(Struct, frozen=True, kw_only=True):
    """Between two turns of a conversation the worker is told to keep it for as long as the next one may take."""

    min_tokens: Count = 256
    """Shorter prompts are not spoken of."""
    quantile: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.9
    """The prompt is kept for as long as this share of turns took to come, of the conversation's own or of all, whichever is longer."""
    gap: Seconds = 60.0
    """Assumed between two turns where nothing has been learned yet."""
    shortest: Seconds = 5.0
    """It is never kept for less than this ..."""
    longest: Seconds = 1800.0
    """... nor for more."""


class SessionEnd(Struct, frozen=True, kw_only=True):
    """What belongs to a conversation that is over goes first."""

    min_tokens: Count = 256
    """Shorter prompts are not spoken of."""
    idle: Seconds = 3600.0
    """A conversation that is silent for this long is over; 0: only those that say so are."""


class ClientWordsRule(Struct, frozen=True, kw_only=True):
    """What clients ask for by `cache_control` and `prompt_cache_retention` is passed on to the worker."""

    min_tokens: Count = 256
    """Shorter prompts are not spoken of."""
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)] = 85
    """How firmly; 50 is as if nothing was said."""
    pin: Seconds = 900.0
    """What is asked for longer than this is pinned in slower memory as well; 0: nothing is."""
    longest: Seconds = 86400.0
    """Nobody gets it kept for longer."""


class HotPrefixRule(Struct, frozen=True, kw_only=True):
    """What many conversations begin with (system prompts, documents) is brought to further workers as it gets hot. Costs a prefill where nothing else than a warm request can bring it."""

    min_tokens: Count = 1024
    """Shorter prefixes are computed sooner than moved."""
    replicas: Positive = 2
    """Workers that should hold it, at most; more than one as its heat rises."""
    up: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Requests a minute and worker from which on one more worker should hold it ..."""
    down: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """... and below which one less should."""
    sessions: Positive = 3
    """Different conversations that must have begun with it."""
    most: Positive = 16
    """Prefixes that are cared for at once."""


class Planner(Struct, frozen=True, kw_only=True):
    """When a slot is reserved for a conversation's next stage, what that stage's prompt will begin with is brought to its worker."""

    min_tokens: Count = 512
    """Less than this is not worth a hint."""


class Drain(Struct, frozen=True, kw_only=True):
    """The live conversations and hot prefixes of a worker that is about to leave are moved to where they will go."""

    min_tokens: Count = 512
    """Less than this is not worth a hint."""
    alive: Seconds = 600.0
    """Conversations that were silent for longer stay behind."""
    most: Positive = 256
    """So many conversations, the latest first."""


class ResidencyRules(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The rules by name: true, false, or a rule's numbers."""

    queued_next: bool | QueuedNext = QueuedNext()
    """Fetch while a request waits."""
    retain: bool | Retain = False
    """Keep between turns; off unless it is asked for: on recorded traffic it has not been better than what workers do by themselves."""
    session_end: bool | SessionEnd = SessionEnd()
    """Let go when a conversation is over."""
    client_words: bool | ClientWordsRule = ClientWordsRule()
    """Do what clients ask for."""
    hot_prefix: bool | HotPrefixRule = False
    """Spread what is shared; off unless it is asked for, because it may cost prefills."""
    planner: bool | Planner = Planner()
    """Fetch for a stage that follows."""
    drain: bool | Drain = Drain()
    """Move before a worker leaves."""


class ResidencyBudget(Struct, frozen=True, kw_only=True):
    """How much may be asked of each worker."""

    hints_per_second: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    """Hints in calls of their own; those inside a request that is sent anyway are free."""
    pinned_share: Share = 0.25
    """Share of a memory that may be pinned."""
    bandwidth_share: Share = 0.2
    """Share of the bandwidth between two memories that prefetches may use."""


class Throttle(Struct, frozen=True, kw_only=True):
    """A rule whose hints mostly turn out to be of no use is held back, and says so."""

    below: Share = 0.2
    """It is, when less than this share of its latest hints was of use ..."""
    until: Share = 0.4
    """... until this share is again."""
    of: Positive = 50
    """So many of its latest hints are looked at."""
    one_in: Positive = 20
    """Of hints that are held back one in so many is said all the same, to see whether it would be of use."""


class ResidencyConfig(Struct, frozen=True, kw_only=True):
    """What the gateway tells workers about what to keep and what to fetch. Nothing is, unless this section is there (`residency: {}` for the defaults)."""

    enabled: bool = True
    """Whether anything is said at all."""
    rules: ResidencyRules = ResidencyRules()
    """When something is said."""
    budget: ResidencyBudget = ResidencyBudget()
    """How much is said."""
    throttle: Throttle = Throttle()
    """What becomes of a rule that is mostly wrong."""
    sessions: Positive = 20_000
    """Conversations of each model that are remembered, those of the latest requests."""
    memory: Annotated[int, msgspec.Meta(ge=1024 * 1024, extra_json_schema={"unit": "bytes"})] = 128 * 1024 * 1024
    """So much memory for each model's; of conversations beyond it less is known, then nothing."""


class WorkerHints(Struct, frozen=True, kw_only=True):
    """How a worker is told."""

    secrets = frozenset({"api_key"})

    driver: Name | tuple[Name, ...] = "auto"
    """What it understands: `auto` asks it, `none`, kv-hints, kv-transfer-params, lmcache, lmcache-coordinator, lmcache-controller, hyperpod, warm, or a list; the first that can say a hint says it."""
    url: Name | None = None
    """Of the hint server beside it (LMCache's), where there is one."""
    model: Name | None = None
    """What the hint server calls the model; default: as the worker does."""
    instance: Name | None = None
    """What the hint server calls the worker."""
    world_size: Positive = 1
    """Of the hint server: over so many devices the worker spreads the model."""
    chunk: Positive | None = None
    """Of the hint server: tokens in each chunk that it stores; default: as the driver finds out or assumes."""
    salt_quota: Bytes | None = None
    """Of the hint server: how much each tenant's salt may hold there."""
    priority: int | None = None
    """`priority` of warm requests, where the worker schedules by it."""
    api_key: str | None = None
    """Sent to the hint server as a bearer token; write it as ``${NAME_OF_A_VARIABLE}``."""


_Rule = TypeVar("_Rule", bound=Struct)


def numbers(value: bool | _Rule, kind: type[_Rule]) -> _Rule | None:
    """A rule's numbers: those of `value`, the defaults of `kind` for True; None where it is off."""
    if isinstance(value, bool):
        return kind() if value else None
    return value
