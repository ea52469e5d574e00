"""Where the inspector gets what it shows: the gateway's own parts, asked when somebody looks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.prefix.hot import HotPrefixes
from policies.registry import Registry

if TYPE_CHECKING:
    from gateway.config.schema import Config
    from gateway.fleet.fleet import Fleets
    from gateway.prefix.index import PrefixIndex
    from gateway.prefix.lookup import Matcher
    from gateway.telemetry.decisions import DecisionLog
    from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorSources:
    """Callables give what a reload may replace. None of them waits.

    Attributes:
        config: in use.
        fleets: the routing table.
        lives: every worker's health, as `gateway.fleet.health.HealthMonitor.snapshot` says it.
        degraded: by fleet, what works less well than it should, in sentences.
        matchers: look-ups of prompts, by fleet.
        index: what is known of the workers' caches; None when no fleet wants to know.
        metrics: counters, and readings of all that is not counted there.
        decisions: finished requests and those under way.
        drain, undrain: take a worker out of use and back; False for an unknown one.
        clock: monotonic seconds, the same as the data plane's.
        hot: prefixes by use.
        registry: builds the policies that a request is explained by.
        residency: what workers are told about their caches (`gateway.residency.fleets.Residencies.document`).
    """

    config: "Callable[[], Config]"
    fleets: "Callable[[], Fleets]"
    lives: Callable[[], Sequence[Mapping[str, Any]]]
    degraded: Callable[[], Mapping[str, Sequence[str]]]
    matchers: "Callable[[], Mapping[str, Matcher]]"
    index: "Callable[[], PrefixIndex | None]"
    metrics: "Metrics"
    decisions: "DecisionLog"
    drain: Callable[[str], bool]
    undrain: Callable[[str], bool]
    clock: Callable[[], float]
    hot: HotPrefixes = field(default_factory=HotPrefixes)
    registry: Registry = field(default_factory=Registry.default)
    residency: Callable[[], Mapping[str, Any]] = dict
