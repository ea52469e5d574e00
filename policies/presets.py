"""Whole policies by name: the ones that users of other routers know, written in the same steps as one's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from policies.keys import SESSION_COOKIE, SESSION_FIELDS, SESSION_HEADER
from policies.scorers.prefill_cost import ASSUMED_SLOTS, CONGESTION_PRICE, OCCUPANCY

SESSION_LOAD: Final = 4.0
"""Times the mean load that a session's worker may hold. A session costs more where its cache is not: with 1.25, two requests at once on
an otherwise idle fleet are already too many for one worker, and Claude Code sessions find 0.80 of their tokens cached; 0.93 with 4
(mean TTFT 0.96 s instead of 2.68; without a bound 0.94 and 0.87, but nothing that keeps a hot session from burying its worker)."""


@dataclass(frozen=True, slots=True)
class Step:
    """A filter, scorer or picker: its type, its weight in the sum (scorers only), the keywords of its constructor."""

    type: str
    weight: float = 1.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a preset stands for; a section of the configuration is the same thing in YAML.

    With `history_only`, matches come from the gateway's own history alone, whatever the workers' events say.
    """

    filters: Sequence[Step] = (Step("healthy"), Step("untried"), Step("lora"))
    scorers: Sequence[Step]
    picker: Step = Step("lowest-cost")
    history_only: bool = False


def round_robin() -> Recipe:
    """Every worker in turn, whatever its load."""
    return Recipe(scorers=(Step("round-robin"),))


def least_load() -> Recipe:
    """The worker with the fewest requests in flight."""
    return Recipe(scorers=(Step("in-flight"),))


def p2c() -> Recipe:
    """The less loaded of two random workers."""
    return Recipe(scorers=(Step("in-flight"),), picker=Step("power-of-two"))


def session(
    *,
    header: str | None = SESSION_HEADER,
    body_field: str | Sequence[str] | None = SESSION_FIELDS,
    cookie: str | None = SESSION_COOKIE,
    max_load_factor: float = SESSION_LOAD,
) -> Recipe:
    """The requests of one session to one worker, while its load stays within the bound; those without a key by load."""
    parameters = {
        "header": header,
        "body_field": body_field,
        "cookie": cookie,
        "max_load_factor": max_load_factor,
        "without_key": "load",
    }
    return Recipe(scorers=(Step("session", parameters=parameters),))


def chwbl(*, prefix_length: int = 256, load_factor: float = 1.25) -> Recipe:
    """Prompts that begin alike to one worker, while its load stays within the bound; those without text by load."""
    parameters = {"prefix_length": prefix_length, "load_factor": load_factor}
    return Recipe(scorers=(Step("prefix-hash", parameters=parameters),))


def kv_aware(
    *,
    congestion_price: float = CONGESTION_PRICE,
    occupancy: float = OCCUPANCY,
    assumed_slots: int = ASSUMED_SLOTS,
) -> Recipe:
    """Where computing the rest of the prompt costs least, by the workers' KV events; what has no known prompt by load."""
    parameters = {
        "congestion_price": congestion_price,
        "occupancy": occupancy,
        "assumed_slots": assumed_slots,
        "without_prompt": "load",
    }
    return Recipe(scorers=(Step("prefill-cost", parameters=parameters),))


def prefix_aware(
    *,
    congestion_price: float = CONGESTION_PRICE,
    occupancy: float = OCCUPANCY,
    assumed_slots: int = ASSUMED_SLOTS,
) -> Recipe:
    """The rule of `kv_aware`, by what the gateway itself has sent where: for workers that send no events."""
    known = kv_aware(congestion_price=congestion_price, occupancy=occupancy, assumed_slots=assumed_slots)
    return replace(known, history_only=True)


def lmetric() -> Recipe:
    """The least product of tokens to compute and requests in flight; what has no known prompt by load."""
    return Recipe(scorers=(Step("lmetric", parameters={"without_prompt": "load"}),))


def ttft(
    *,
    congestion_price: float = CONGESTION_PRICE,
    occupancy: float = OCCUPANCY,
    assumed_slots: int = ASSUMED_SLOTS,
) -> Recipe:
    """Where the first token comes soonest at the least cost to the others, by the workers' KV events; the default."""
    parameters = {"congestion_price": congestion_price, "occupancy": occupancy, "assumed_slots": assumed_slots}
    filters = (
        *Recipe(scorers=()).filters,
        Step("fits-context", parameters={"refuse": False}),  # a worker says best what is too long
        Step("prefix-bucket-cap"),
        Step("role"),
    )
    return Recipe(filters=filters, scorers=(Step("ttft", parameters=parameters),))


def dynamo_cost(*, prefill_load_scale: float = 1.0) -> Recipe:
    """The cost function of NVIDIA Dynamo's KV router, for comparison."""
    return Recipe(scorers=(Step("dynamo-cost", parameters={"prefill_load_scale": prefill_load_scale}),))
