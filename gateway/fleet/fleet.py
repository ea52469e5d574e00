"""The routing table: which fleet serves a model's name, and which workers are in it.

`Fleets` is never changed in place. A reload builds a new one that takes over the workers and policies that stay, with
everything they know, and the caller swaps one reference; requests in flight go on with the fleet that they started with.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from backends.registry import driver_named
from gateway.config.schema import Config, Health, Model, Retries, Timeouts
from gateway.errors import GatewayError, Source
from gateway.fleet.budget import Budget
from gateway.fleet.worker import Worker, WorkerState
from policies.base import Knowledge, Policy, knowledge_of

PolicyBuilder = Callable[[str], Policy]
"""Builds the policy that the configuration calls by this name: a section of `policies`, or a preset."""


class Fleet:
    """All workers that serve one model.

    Attributes:
        name: the model's name, as clients and `aliases` resolve to it.
        aliases: other names that clients may use.
        own_names: the name and the aliases: what else resolves to this fleet is the name of a LoRA adapter.
        policy_name: what the configuration calls the policy.
        policy: chooses among `candidates`. Each fleet has its own.
        policies: that one and all others that stages or clients may want (`policy_for`), by name.
        choice: what clients may choose from, and in which header field (lower case); None: nothing.
        stage_policies: names of other policies, by stage.
        workers: in the order of the configuration.
        candidates: the workers' own persistent candidates, in the same order.
        timeouts, retries, health, hedging: this model's sections, or the top-level ones.
        retry_budget: how many more attempts it can bear; kept by a reload.
    """

    __slots__ = (
        "aliases",
        "candidates",
        "choice",
        "health",
        "hedging",
        "name",
        "own_names",
        "policies",
        "policy",
        "policy_name",
        "retries",
        "retry_budget",
        "stage_policies",
        "timeouts",
        "workers",
    )

    def __init__(
        self,
        model: Model,
        *,
        workers: list[Worker],
        policies: Mapping[str, Policy],
        timeouts: Timeouts,
        retries: Retries,
        health: Health,
    ) -> None:
        """The last three are the top-level sections, used where `model` has none of its own. `policies`: see `policies_of`."""
        self.name = model.name
        self.aliases = model.aliases
        self.own_names = frozenset((model.name, *model.aliases))
        self.policy_name = model.policy
        self.policy = policies[model.policy]
        self.policies = policies
        choice = model.policy_choice
        self.choice = choice and msgspec.structs.replace(choice, header=choice.header.lower())
        self.stage_policies = model.stage_policies
        self.workers = workers
        self.candidates = [worker.candidate for worker in workers]
        self.timeouts = model.timeouts or timeouts
        self.retries = model.retries or retries
        self.health = model.health or health
        self.hedging = model.hedging
        self.retry_budget = Budget(self.retries.budget, self.retries.budget_min, self.retries.budget_window)

    def keep_budget(self, before: "Fleet") -> None:
        """Take over what the fleet of this name has spent, under the share that is configured now."""
        old, new = before.retry_budget, self.retry_budget
        if old.window == new.window:
            old.share, old.floor = new.share, new.floor
            self.retry_budget = old

    def adapters(self) -> set[str]:
        """The LoRA adapters that its workers have loaded, by the names that requests use."""
        return {name for worker in self.workers for name in worker.capabilities.lora_adapters}

    def __repr__(self) -> str:
        return f"<Fleet {self.name} workers={len(self.workers)}>"

    def policy_for(self, headers: Mapping[str, str], stage: str | None = None) -> Policy:
        """The policy of a request: what its header names, if clients may choose, else its stage's, else the model's.

        Raises:
            GatewayError: 400, the header names a policy that is not allowed.
        """
        choice = self.choice
        if choice is not None and (name := headers.get(choice.header)):
            if name not in choice.allowed:
                raise GatewayError(
                    400,
                    "unknown_policy",
                    f"{choice.header} names no policy that may be chosen here; there are: {', '.join(choice.allowed)}.",
                    source=Source.CLIENT,
                    api_type="invalid_request_error",
                    param=choice.header,
                )
            return self.policies[name]
        if stage is not None and self.stage_policies:
            return self.policies[self.stage_policies.get(stage, self.policy_name)]
        return self.policy

    @property
    def knowledge(self) -> Knowledge:
        """What matches must come from so that each of its policies finds what it wants."""
        wanted = {knowledge_of(policy) for policy in self.policies.values()}
        return "events" if "events" in wanted else "history" if "history" in wanted else "none"

    @property
    def ready(self) -> int:
        """How many workers are `READY`."""
        return sum(worker.state is WorkerState.READY for worker in self.workers)


class Fleets:
    """The fleets of one `Config`, by name and alias.

    Attributes:
        config: what it was built from.
        departed: workers of earlier configurations that still had requests in flight when this one was made.
    """

    __slots__ = ("_build_policy", "_by_name", "_fleets", "_only", "config", "departed")

    def __init__(
        self, config: Config, fleets: list[Fleet], build_policy: PolicyBuilder, departed: list[Worker] | None = None
    ) -> None:
        self.config = config
        self.departed = departed or []
        self._build_policy = build_policy
        self._fleets = {fleet.name: fleet for fleet in fleets}
        # Names are written last: a name is never hidden by another fleet's alias.
        self._by_name = {alias: fleet for fleet in reversed(fleets) for alias in fleet.aliases} | self._fleets
        self._only = fleets[0] if len(fleets) == 1 else None

    @classmethod
    def from_config(cls, config: Config, build_policy: PolicyBuilder) -> "Fleets":
        """Build every fleet of `config`, all workers `WARMING`.

        Raises:
            UnknownDriverError: a worker names a driver that does not exist.
            Exception: whatever `build_policy` raises.
        """
        return cls(config, [], build_policy).updated(config)

    def updated(self, config: Config, build_policy: PolicyBuilder | None = None) -> "Fleets":
        """The table for `config`, made from this one.

        A worker stays the same object (state, counters, pooled connections) when its URL, driver and model are the
        same; its id, API key and capabilities then follow `config`. A policy stays when its name and section did.
        New workers are `WARMING`; those that are in no fleet any more become `GONE`.

        Nothing changes when this raises: every part that can fail is built before a worker is touched. Once it returns
        the old table is only good for requests in flight, and `HealthMonitor.update` must be told of the new one.

        Args:
            config: the new configuration.
            build_policy: builds from the new `policies` section; None: the builder of this table.

        Raises:
            UnknownDriverError: a worker names a driver that does not exist.
            Exception: whatever `build_policy` raises.
        """
        build = build_policy or self._build_policy
        policies = [
            {name: self._kept_policy(config, model, name) or build(name) for name in policies_of(model)}
            for model in config.models
        ]
        drivers = {name: driver_named(name) for name in {w.driver for model in config.models for w in model.workers}}

        pool = _Pool(self)
        members = [
            [
                pool.take(model.name, section.url, section.driver, section.model or model.name)
                or Worker(url=section.url, driver=drivers[section.driver], model=section.model or model.name)
                for section in model.workers
            ]
            for model in config.models
        ]
        _configure(config, members)
        fleets = [
            Fleet(
                model,
                workers=workers,
                policies=built,
                timeouts=config.timeouts,
                retries=config.retries,
                health=config.health,
            )
            for model, workers, built in zip(config.models, members, policies, strict=True)
        ]
        for fleet in fleets:
            if (before := self._fleets.get(fleet.name)) is not None:
                fleet.keep_budget(before)
        departed = [worker for worker in self.departed if worker.in_flight]
        for worker in pool.rest():
            worker.state = WorkerState.GONE
            worker.routable = False
            worker.probe = None
            departed.append(worker)
        return Fleets(config, fleets, build, departed)

    def __iter__(self) -> Iterator[Fleet]:
        return iter(self._fleets.values())

    def __len__(self) -> int:
        return len(self._fleets)

    def resolve(self, model: str | None) -> Fleet | None:
        """The fleet that a request's `model` means: its name, an alias, or a LoRA adapter that one of its workers has loaded.

        No model means the only fleet there is.
        """
        if model is None:
            return self._only
        return self._by_name.get(model) or self._having(model)

    def _having(self, adapter: str) -> Fleet | None:
        for fleet in self:
            for worker in fleet.workers:
                if adapter in worker.capabilities.lora_adapters:
                    return fleet
        return None

    def names(self) -> Iterator[tuple[str, Fleet]]:
        """Every name that `resolve` knows: each fleet's own, then its aliases, then the adapters that its workers have."""
        for fleet in self:
            for name in (fleet.name, *fleet.aliases):
                if self._by_name[name] is fleet:
                    yield name, fleet
            for name in sorted(fleet.adapters()):
                if name not in self._by_name and self._having(name) is fleet:
                    yield name, fleet

    def workers(self) -> Iterator[Worker]:
        """Every worker of every fleet."""
        for fleet in self:
            yield from fleet.workers

    def _kept_policy(self, config: Config, model: Model, name: str) -> Policy | None:
        """The policy object of this name that `model` had, if its configuration is the same."""
        fleet = self._fleets.get(model.name)
        if fleet is None or self.config.policies.get(name) != config.policies.get(name):
            return None
        return fleet.policies.get(name)


def policies_of(model: Model) -> list[str]:
    """The names of all policies that requests of `model` may go by, its own first, each once."""
    allowed = model.policy_choice.allowed if model.policy_choice is not None else ()
    return list(dict.fromkeys((model.policy, *model.stage_policies.values(), *allowed)))


class _Pool:
    """The workers of the old table, to be taken by identity, each once."""

    def __init__(self, fleets: Fleets) -> None:
        self._free: dict[tuple[str, str, str], list[tuple[str, Worker]]] = defaultdict(list)
        for fleet in fleets:
            for worker in fleet.workers:
                if worker.state is not WorkerState.GONE:
                    self._free[worker.url, worker.driver.name, worker.model].append((fleet.name, worker))

    def take(self, fleet: str, url: str, driver: str, model: str) -> Worker | None:
        """A worker of this identity, that of the fleet of the same name if there are several."""
        free = self._free.get((url.rstrip("/"), driver, model))
        if not free:
            return None
        index = next((i for i, (name, _) in enumerate(free) if name == fleet), 0)
        return free.pop(index)[1]

    def rest(self) -> list[Worker]:
        """Those that nobody took."""
        return [worker for free in self._free.values() for _, worker in free]


def _configure(config: Config, members: list[list[Worker]]) -> None:
    """Write what may change in a worker's life from `config` to the workers of each model, in the same order.

    An id is as configured, else ``host:port``. One server may stand in several fleets (LoRA adapters, say): its later
    appearances are called ``host:port@model``, so that an id means one worker in headers, metrics and the drain API.
    """
    taken = {section.id for model in config.models for section in model.workers if section.id}
    for model, workers in zip(config.models, members, strict=True):
        for section, worker in zip(model.workers, workers, strict=True):
            address = f"{worker.host}:{worker.port}"
            choices = itertools.chain(
                (address, f"{address}@{model.name}"), (f"{address}@{model.name}#{n}" for n in itertools.count(2))
            )
            worker.id = section.id or next(choice for choice in choices if choice not in taken)
            taken.add(worker.id)
            worker.api_key = section.api_key
            worker.machine = section.host or worker.host
            worker.adopt(worker.capabilities.configured(section.capabilities))
