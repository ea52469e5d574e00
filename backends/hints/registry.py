"""Which hint drivers there are, by the name that the configuration uses, and what each needs to know of its worker."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from backends.hints.hyperpod import HyperPodDriver
from backends.hints.kv_hints import KvHintsDriver
from backends.hints.kv_transfer_params import KvTransferParamsDriver
from backends.hints.lmcache import LMCacheDriver
from backends.hints.lmcache_common import Place
from backends.hints.lmcache_controller import LMCacheControllerDriver
from backends.hints.lmcache_coordinator import LMCacheCoordinatorDriver
from backends.hints.warm import WarmDriver

if TYPE_CHECKING:
    from backends.hints.base import HintDriver


class HintTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that hints are for, as far as drivers must know.

    Attributes:
        worker: its id.
        engine: its driver's name: vllm, neuron, ...
        model: what it calls the model; hint servers may know it by another name, see `options`.
        fleet: the fleet's name.
        block_size: tokens per KV block, where known.
        url: of the hint server, without a trailing slash; empty: none is configured.
        options: the worker's ``hints`` section as the configuration has it, by field name.
    """

    worker: str
    model: str
    engine: str = "vllm"
    fleet: str = ""
    block_size: int | None = None
    url: str = ""
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def option(self, name: str, default: Any) -> Any:
        """`options[name]`, or `default` where it is missing or None."""
        value = self.options.get(name)
        return default if value is None else value


def _warm(target: HintTarget) -> "HintDriver":
    return WarmDriver(target.model, priority=target.option("priority", None))


def _place(target: HintTarget) -> Place:
    return Place(
        model=target.option("model", target.model),
        world_size=target.option("world_size", 1),
        chunk=target.option("chunk", None),
        instance=target.option("instance", ""),
        worker=target.worker,
        salt_quota=target.option("salt_quota", None),
    )


HINT_DRIVERS: Mapping[str, "Callable[[HintTarget], HintDriver]"] = MappingProxyType(
    {
        "kv-hints": lambda _target: KvHintsDriver(),
        "kv-transfer-params": lambda _target: KvTransferParamsDriver(),
        "lmcache": lambda target: LMCacheDriver(_place(target)),
        "lmcache-coordinator": lambda target: LMCacheCoordinatorDriver(_place(target)),
        "lmcache-controller": lambda target: LMCacheControllerDriver(_place(target)),
        "hyperpod": lambda target: HyperPodDriver(_place(target)),
        "warm": _warm,
    }
)
"""By name; more protocols are added here."""

AT_WORKER = ("kv-hints",)
"""What `auto` asks the worker itself for, the best first. Not kv-transfer-params: that it is read does not show from outside."""
AT_SERVER: tuple[str, ...] = ("lmcache-coordinator", "lmcache", "lmcache-controller")
"""What `auto` asks a configured hint server for, the best first."""
SPEAK_TO_SERVERS = frozenset({"hyperpod", "lmcache", "lmcache-controller", "lmcache-coordinator"})
"""Drivers that need the URL of a hint server."""


def hint_driver(name: str, target: HintTarget) -> "HintDriver":
    """A driver of that name for one worker.

    Raises:
        KeyError: there is none; the configuration was not checked.
    """
    return HINT_DRIVERS[name](target)
