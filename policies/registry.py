"""From a name in the configuration to a policy: built-in steps and presets, entry points, dotted paths."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from random import Random
from typing import Any, Final, Literal, Protocol

from policies import presets
from policies.base import Filter, Picker, Scorer
from policies.filters.fits_context import FitsContext
from policies.filters.has_slot import HasSlot
from policies.filters.healthy import Healthy
from policies.filters.lora import Lora
from policies.filters.model import Model
from policies.filters.prefix_bucket_cap import PrefixBucketCap
from policies.filters.role import Role
from policies.filters.untried import Untried
from policies.parameters import PolicyError, Where, construct, nearest
from policies.pickers.lowest_cost import LowestCost
from policies.pickers.power_of_two import PowerOfTwo
from policies.pipeline import Pipeline
from policies.presets import Recipe
from policies.scorers.dynamo_cost import DynamoCost
from policies.scorers.in_flight import InFlight
from policies.scorers.in_flight_tokens import InFlightTokens
from policies.scorers.kv_pressure import KvPressure
from policies.scorers.lmetric import LMetric
from policies.scorers.lora_affinity import LoraAffinity
from policies.scorers.lru import Lru
from policies.scorers.predicted_latency import PredictedLatency
from policies.scorers.prefill_cost import PrefillCost
from policies.scorers.prefix_hash import PrefixHash
from policies.scorers.prefix_match import PrefixMatch
from policies.scorers.queue import Queue
from policies.scorers.round_robin import RoundRobin
from policies.scorers.running_requests import RunningRequests
from policies.scorers.session import Session
from policies.scorers.tier_weighted_match import TierWeightedMatch
from policies.scorers.ttft import Ttft
from policies.scorers.uncached_tokens import UncachedTokens
from policies.scorers.uniform import Uniform

__all__ = ["Kind", "PolicyError", "PolicySection", "Registry", "StepSection"]

Kind = Literal["filter", "scorer", "picker"]
"""What a step is."""

PROTOCOLS: Final[Mapping[Kind, type]] = {"filter": Filter, "scorer": Scorer, "picker": Picker}
"""What each kind must be able to do."""


BUILT_IN: Final[Mapping[tuple[Kind, str], Callable[..., Any]]] = {
    ("filter", "healthy"): Healthy,
    ("filter", "model"): Model,
    ("filter", "untried"): Untried,
    ("filter", "fits-context"): FitsContext,
    ("filter", "prefix-bucket-cap"): PrefixBucketCap,
    ("filter", "has-slot"): HasSlot,
    ("filter", "role"): Role,
    ("filter", "lora"): Lora,
    ("scorer", "dynamo-cost"): DynamoCost,
    ("scorer", "in-flight"): InFlight,
    ("scorer", "in-flight-tokens"): InFlightTokens,
    ("scorer", "kv-pressure"): KvPressure,
    ("scorer", "lmetric"): LMetric,
    ("scorer", "lora-affinity"): LoraAffinity,
    ("scorer", "lru"): Lru,
    ("scorer", "predicted-latency"): PredictedLatency,
    ("scorer", "prefill-cost"): PrefillCost,
    ("scorer", "prefix-hash"): PrefixHash,
    ("scorer", "prefix-match"): PrefixMatch,
    ("scorer", "queue"): Queue,
    ("scorer", "random"): Uniform,
    ("scorer", "round-robin"): RoundRobin,
    ("scorer", "running-requests"): RunningRequests,
    ("scorer", "session"): Session,
    ("scorer", "tier-weighted-match"): TierWeightedMatch,
    ("scorer", "ttft"): Ttft,
    ("scorer", "uncached-tokens"): UncachedTokens,
    ("picker", "lowest-cost"): LowestCost,
    ("picker", "power-of-two"): PowerOfTwo,
}
"""Every step that is there without being registered, by kind and name."""

ALIASES: Final[Mapping[tuple[Kind, str], str]] = {
    ("scorer", "kvCache"): "kv-pressure",
    ("scorer", "loraAffinity"): "lora-affinity",
    ("scorer", "predictedLatency"): "predicted-latency",
    ("scorer", "prefix"): "tier-weighted-match",
    ("scorer", "runningRequests"): "running-requests",
}
"""Weight names of the HyperPod Inference Gateway, where they differ from ours; its `queue` and `lru` are called the same here."""


class StepSection(Protocol):
    """A step in the configuration: `gateway.config.schema.Step` is one."""

    @property
    def type(self) -> str:
        """A registered name, an entry point's name or ``package.module:Class``."""

    @property
    def weight(self) -> float:
        """The factor of a scorer's costs in the sum."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The constructor's keywords."""


class PolicySection(Protocol):
    """A policy in the configuration: `gateway.config.schema.Policy` is one."""

    @property
    def preset(self) -> str | None:
        """Another name for the rest: mutually exclusive with the steps."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The preset's parameters."""

    @property
    def filters(self) -> Sequence[StepSection]:
        """In order; when empty, those of the presets."""

    @property
    def scorers(self) -> Sequence[StepSection]:
        """Their weighted costs are summed up."""

    @property
    def picker(self) -> StepSection | None:
        """When None, ``lowest-cost``."""


class Registry:
    """The types of steps and the presets that a configuration may name.

    An ordinary object: two of them share nothing. Names that are not registered are looked up as entry points of the
    groups ``warmroute.filters``, ``warmroute.scorers`` and ``warmroute.pickers``, and those with a colon are imported as
    ``package.module:Class``.
    """

    def __init__(self) -> None:
        self._factories: dict[Kind, dict[str, Callable[..., Any]]] = {"filter": {}, "scorer": {}, "picker": {}}
        self._presets: dict[str, Callable[..., Recipe]] = {}

    @classmethod
    def default(cls) -> "Registry":
        """A new registry with everything that is built in."""
        registry = cls()
        for (kind, name), factory in BUILT_IN.items():
            registry.register(kind, name, factory)
        registry.register_preset("roundrobin", presets.round_robin)
        registry.register_preset("leastload", presets.least_load)
        registry.register_preset("p2c", presets.p2c)
        registry.register_preset("session", presets.session)
        registry.register_preset("chwbl", presets.chwbl)
        registry.register_preset("prefixaware", presets.prefix_aware)
        registry.register_preset("kvaware", presets.kv_aware)
        registry.register_preset("lmetric", presets.lmetric)
        registry.register_preset("ttft", presets.ttft)
        registry.register_preset("dynamo-cost", presets.dynamo_cost)
        return registry

    def register(self, kind: Kind, name: str, factory: Callable[..., Any]) -> None:
        """Make `name` a type of step. `factory` takes the YAML parameters as keywords, and ``rng`` if it has it.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._factories[kind]:
            raise ValueError(f'there is a {kind} "{name}" already')
        self._factories[kind][name] = factory

    def register_preset(self, name: str, factory: Callable[..., Recipe]) -> None:
        """Make `name` a preset. `factory` takes the section's `parameters` as keywords.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._presets:
            raise ValueError(f'there is a preset "{name}" already')
        self._presets[name] = factory

    def types(self, kind: Kind) -> list[str]:
        """The names of all steps of a kind, entry points included, sorted."""
        found = {entry.name for entry in entry_points(group=f"warmroute.{kind}s")}
        return sorted(found.union(self._factories[kind]))

    def presets(self) -> list[str]:
        """The names of all presets, sorted."""
        return sorted(self._presets)

    def build(self, name: str, sections: Mapping[str, PolicySection], *, seed: int | None = None) -> Pipeline:
        """The policy `name`: a key of `sections`, else a preset with its defaults.

        Each call builds new steps with state of their own. `seed` makes all random choices repeatable.

        Raises:
            PolicyError: there is no such policy, or its section makes no sense.
        """
        rng = Random(seed)
        section = sections.get(name)
        if section is None:
            if name not in self._presets:
                raise PolicyError(f'there is no policy "{name}"{nearest(name, {*sections, *self._presets})}')
            return self._from_recipe(name, self._presets[name](), ("policies", name), rng)
        where: Where = ("policies", name)
        steps = bool(section.filters or section.scorers or section.picker)
        if section.preset is not None:
            if steps:
                raise PolicyError("either a preset or filters, scorers and a picker, not both", (*where, "preset"))
            if section.preset not in self._presets:
                hint = nearest(section.preset, self._presets)
                raise PolicyError(f'there is no preset "{section.preset}"{hint}', (*where, "preset"))
            where = (*where, "parameters")
            recipe = construct(self._presets[section.preset], section.parameters, where)
            return self._from_recipe(name, recipe, where, rng)
        if section.parameters:
            raise PolicyError("parameters belong to a preset, or to a step", (*where, "parameters"))
        if not steps:
            raise PolicyError("names neither a preset nor any filter, scorer or picker", where)
        return self._from_steps(name, section, where, rng)

    def _from_recipe(self, name: str, recipe: Recipe, where: Where, rng: Random) -> Pipeline:
        """A preset's policy. What its steps refuse are the preset's parameters, so that is where errors point."""
        try:
            return self._assemble(
                name, recipe.filters, recipe.scorers, recipe.picker, (), rng, history_only=recipe.history_only
            )
        except PolicyError as error:
            raise PolicyError(error.message, where) from error

    def _from_steps(self, name: str, section: PolicySection, where: Where, rng: Random) -> Pipeline:
        """The policy of a section that lists its steps; what it leaves out is as in the presets."""
        blank = Recipe(scorers=())
        filters: Sequence[StepSection] = section.filters or blank.filters
        picker: StepSection = section.picker or blank.picker
        return self._assemble(name, filters, section.scorers, picker, where, rng)

    def _assemble(
        self,
        name: str,
        filters: Sequence[StepSection],
        scorers: Sequence[StepSection],
        picker: StepSection,
        where: Where,
        rng: Random,
        *,
        history_only: bool = False,
    ) -> Pipeline:
        return Pipeline(
            name,
            [self._step("filter", step, (*where, "filters", index), rng) for index, step in enumerate(filters)],
            [
                (self._step("scorer", step, (*where, "scorers", index), rng), step.weight)
                for index, step in enumerate(scorers)
            ],
            self._step("picker", picker, (*where, "picker"), rng),
            rng,
            history_only=history_only,
            names=[getattr(step, "name", None) or step.type for step in (*filters, *scorers)],
        )

    def _step(self, kind: Kind, step: StepSection, where: Where, rng: Random) -> Any:
        """One step, built and checked."""
        if kind != "scorer" and step.weight != 1:
            raise PolicyError(f"only scorers have a weight; this is a {kind}", (*where, "weight"))
        if not (math.isfinite(step.weight) and step.weight >= 0):
            raise PolicyError("expected a finite weight of at least 0", (*where, "weight"))
        factory = self._factory(kind, step.type, (*where, "type"))
        built = construct(factory, step.parameters, (*where, "parameters"), rng)
        if not isinstance(built, PROTOCOLS[kind]):
            method = {"filter": "filter", "scorer": "score", "picker": "pick"}[kind]
            raise PolicyError(f'"{step.type}" is no {kind}: it has no method "{method}"', (*where, "type"))
        return built

    def _factory(self, kind: Kind, type_name: str, where: Where) -> Callable[..., Any]:
        """What builds steps of this type."""
        factories = self._factories[kind]
        factory = factories.get(type_name) or factories.get(ALIASES.get((kind, type_name), ""))
        if factory is None and ":" in type_name:
            factory = _imported(type_name, where)
        elif factory is None:
            entries = list(entry_points(group=f"warmroute.{kind}s", name=type_name))
            if not entries:
                raise PolicyError(f'there is no {kind} "{type_name}"{nearest(type_name, self.types(kind))}', where)
            try:
                factory = entries[0].load()
            except Exception as error:  # importing somebody's package may raise anything
                raise PolicyError(f'cannot load the {kind} "{entries[0].value}": {error}', where) from error
        if not callable(factory):
            raise PolicyError(f'"{type_name}" is no class', where)
        return factory


def _imported(path: str, where: Where) -> Any:
    """The object that ``package.module:Name`` stands for."""
    module_name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except Exception as error:  # importing somebody's module may raise anything
        raise PolicyError(f'cannot import "{path}": {error}', where) from error
    return found
