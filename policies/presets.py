"""Whole policies by name: the ones that users of other routers know, written in the same steps as one's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.keys import SESSION_COOKIE, SESSION_FIELDS, SESSION_HEADER


@dataclass(frozen=True, slots=True)
class Step:
    """A filter, scorer or picker: its type, its weight in the sum (scorers only), the keywords of its constructor."""

    type: str
    weight: float = 1.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a preset stands for; a section of the configuration is the same thing in YAML."""

    filters: Sequence[Step] = (Step("healthy"), Step("untried"))
    scorers: Sequence[Step]
    picker: Step = Step("lowest-cost")


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
    max_load_factor: float = 1.25,
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
