"""The three Protocols of a policy, and what flows through them.

A *filter* removes candidates that must not take the request. A *scorer* gives each remaining candidate a cost: lower is
better. Its docstring says in which unit: seconds, or a share in [0, 1]. A *picker* chooses one, given the weighted sums of the
costs. Each works on the whole list at once: one call per step and request, not one per candidate.

A third-party policy is a class with one of these methods and a constructor that takes the YAML `parameters` as keywords.
One that reads candidates' matches has a class attribute ``needs_match = True``: without, the caller need not look them up.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

Knowledge = Literal["none", "history", "events"]
"""What a policy wants candidates' matches to come from.

``none``: it does not read them, and prompts need no tokenizing for it. ``history``: what the gateway itself has sent where.
``events``: the workers' own KV events, and history for workers that send none.
"""


class CapabilitiesView(Protocol):
    """What a worker can do, as far as a policy may use it. `gateway.fleet.capabilities.WorkerCapabilities` is one.

    None stands for what is not known. Speeds are always there: where nobody knows better, assumed ones.
    """

    @property
    def block_size(self) -> int | None:
        """Tokens per KV block."""

    @property
    def kv_capacity_tokens(self) -> int | None:
        """Tokens that its KV cache holds in device memory."""

    @property
    def max_model_len(self) -> int | None:
        """Prompt and answer together, in tokens."""

    @property
    def slots(self) -> int | None:
        """Requests that run at once."""

    @property
    def prefill(self) -> Literal["exclusive", "chunked"]:
        """Whether decodes stand still while a prompt is computed, or share its steps."""

    @property
    def max_prefix_bucket(self) -> int | None:
        """Longest cached prefix in tokens that it can use; None: any."""

    @property
    def role(self) -> str:
        """``both``, ``prefill`` or ``decode``."""

    @property
    def lora_adapters(self) -> Collection[str]:
        """Names of the adapters that it has loaded."""

    @property
    def shaped(self) -> bool:
        """Whether padding, segments or prefix caps apply: if not, `padded` and `credit` return what they are given."""

    def padded(self, uncached: int, /) -> int:
        """Tokens that the device computes for so many that it does not hold, padding included."""

    def credit(self, tokens: int, held: int, /) -> int:
        """How many of `held` cached tokens a prompt of `tokens` tokens is spared."""

    def takes(self, uncached: int, credit: int, /) -> bool:
        """Whether it can compute so many tokens after so many credited ones at all."""

    def load_seconds(self, l1: int, l2: int, /) -> float:
        """Seconds to bring so many tokens from the tiers into the device."""


class WorkerView(Protocol):
    """What a policy may see of a worker (read only). `gateway.fleet.worker.Worker` is one; so is its `WorkerLoad`."""

    @property
    def id(self) -> str:
        """Unique among all workers."""

    @property
    def routable(self) -> bool:
        """Whether it takes new requests."""

    @property
    def in_flight(self) -> int:
        """Requests sent there that have not ended."""

    @property
    def in_flight_tokens(self) -> int:
        """Prompt tokens of those requests, where known."""

    @property
    def pending(self) -> int:
        """Those of them whose answer has not begun: they wait for their prefill, or are in it."""

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that the worker has to compute for the pending ones, as far as known."""

    @property
    def pending_padded(self) -> int:
        """The same, as the device computes them: padded, and without credit for what it cannot use."""

    @property
    def backlog(self) -> float:
        """Seconds that the pending ones take, at the learned speed and from the start of the first one's prefill."""

    @property
    def head(self) -> float:
        """Seconds of the `backlog` that are the first one's; no more of it can be over by now."""

    @property
    def prefill_since(self) -> float:
        """When the prefill of the first pending one began, as far as we know; 0: none is, or it is not known."""

    @property
    def rate(self) -> float:
        """Padded tokens per second, learned."""

    @property
    def overhead(self) -> float:
        """Seconds per prefill whatever its length, learned."""

    @property
    def hold(self) -> float:
        """Mean seconds that a request holds a slot, learned; 0: not known yet."""

    @property
    def weight(self) -> float:
        """Share of a full load it should take, in (0, 1]."""

    @property
    def model(self) -> str:
        """What the worker calls the model."""

    @property
    def capabilities(self) -> CapabilitiesView:
        """What it can do."""


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading tokens of a prompt a worker holds, by tier. A token is counted in its fastest tier only."""

    device: int = 0
    l1: int = 0
    l2: int = 0
    source: str = ""
    """How we know: ``event``, ``expected`` or ``history``; empty when nothing is held."""

    @property
    def tokens(self) -> int:
        """Tokens held in any tier."""
        return self.device + self.l1 + self.l2


NO_MATCH = Match()


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A worker that may take this request, with what it holds of the prompt."""

    worker: WorkerView
    match: Match


class RouteRequest(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What a policy may know about a request.

    Attributes:
        model: the fleet's name.
        path: the API path, e.g. ``/v1/chat/completions``.
        headers: header fields, names in lower case; the last one wins when a name is repeated.
        body: the parsed JSON body; empty for other bodies. Not to be changed.
        prompt_tokens: length of the prompt, or 0 when it is not known.
        now: seconds on the clock that the caller uses, monotonic (virtual in a replay).
        attempt: 0 for the first, 1 for the first retry, ...
        tried: ids of the workers that earlier attempts used.
    """

    model: str
    path: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    prompt_tokens: int = 0
    now: float = 0.0
    attempt: int = 0
    tried: Sequence[str] = ()


@runtime_checkable
class Filter(Protocol):
    """Removes candidates. Returning an empty list refuses the request."""

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates that may stay, in the same order; `candidates` itself when all may."""


@runtime_checkable
class Scorer(Protocol):
    """Gives each candidate a cost."""

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """One cost per candidate, in the same order, finite; lower is better."""


@runtime_checkable
class Picker(Protocol):
    """Chooses one candidate."""

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], costs: Sequence[float]) -> int:
        """The index of the chosen candidate; `candidates` and `costs` have the same length, at least one."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Which candidate was chosen and why. A Struct, because one is made per request: 0.1 us, a frozen dataclass 0.5.

    Attributes:
        chosen: one of `candidates`.
        candidates: those that all filters let through.
        costs: their weighted sums, in the same order; empty when there was no choice to make.
        policy: the policy's name.
    """

    chosen: Candidate
    candidates: Sequence[Candidate]
    costs: Sequence[float]
    policy: str


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one candidate in a decision.

    Attributes:
        worker: as it was then, if the caller gave a snapshot.
        match: what it held of the prompt.
        rejected_by: name of the filter that dropped it; empty for those that were scored.
        terms: what its cost is made of, by name, weights included; they add up to `cost`.
        cost: None where there is none: dropped, or a scorer failed.
    """

    worker: WorkerView
    match: Match
    rejected_by: str
    terms: Mapping[str, float]
    cost: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole table behind a decision.

    Attributes:
        rows: one per candidate, in the order given.
        chosen: index of the chosen one; None when the filters let none through.
        reason: why, in one sentence.
    """

    rows: Sequence[Row]
    chosen: int | None
    reason: str


@runtime_checkable
class Detailed(Protocol):
    """What a scorer may be besides: one that says what its costs are made of."""

    def terms(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        """Per candidate, in the same order, parts by name that add up to its cost (before the weight)."""


@runtime_checkable
class Observer(Protocol):
    """What a filter, scorer or picker may be besides: told of every decision of its policy, right after it was made."""

    def observe(self, request: RouteRequest, decision: Decision) -> None:
        """Remember what the next decision needs. Whoever keeps something per worker bounds it: workers come and go."""


class Policy(Protocol):
    """What the gateway asks: one candidate of those given, or None when no filter let one through."""

    @property
    def name(self) -> str:
        """As configured."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """Choose. Synchronous, no I/O; the caller counts the load before it does anything else."""


@runtime_checkable
class Explaining(Protocol):
    """What a policy may be besides: one that says why. `policies.pipeline.Pipeline` is."""

    def explain(self, request: RouteRequest, candidates: Sequence[Candidate], chosen: int | None = None) -> Explanation:
        """Why it chooses, or chose `chosen`, an index into `candidates`. Without side effects; not for the hot path."""


def knowledge_of(policy: Policy) -> Knowledge:
    """What `policy` wants matches to come from; a policy of somebody else's that does not say so reads none."""
    knowledge: Knowledge = getattr(policy, "knowledge", "none")
    return knowledge
