"""The families of `/metrics` about what is known of the workers' caches, and how."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.prefix.feed_status import STATUSES

if TYPE_CHECKING:
    from gateway.prefix.feed_status import FeedStatus
    from gateway.prefix.map import PrefixMap

_FEED = ("worker", "model")
_COUNTED = frozenset({"batches", "events"})
"""Of `FeedStatus.counters` those that are no trouble."""


def feed_families(feeds: "Iterable[FeedStatus]") -> Iterator[Metric]:
    """How each worker's cache is known."""
    status = GaugeMetricFamily(
        "warmroute_feed_status", "1 for how its cache is known, else 0", labels=[*_FEED, "status"]
    )
    batches = CounterMetricFamily("warmroute_feed_batches", "Messages with KV events", labels=_FEED)
    events = CounterMetricFamily("warmroute_feed_events", "KV events", labels=_FEED)
    rate = GaugeMetricFamily("warmroute_feed_events_per_second", "KV events in the last seconds", labels=_FEED)
    lag = GaugeMetricFamily(
        "warmroute_feed_lag_seconds", "From the worker's clock at its latest message to ours", labels=_FEED
    )
    troubles = CounterMetricFamily(
        "warmroute_feed_troubles", "What went wrong: gaps, restarts, losses, garbage, ...", labels=[*_FEED, "kind"]
    )
    blocks = GaugeMetricFamily(
        "warmroute_feed_blocks", "Blocks that a worker is known to hold", labels=[*_FEED, "tier"]
    )
    orphans = GaugeMetricFamily("warmroute_feed_orphan_blocks", "Blocks whose parent is not known", labels=_FEED)
    for feed in feeds:
        labels = [feed.worker, feed.fleet]
        for name in STATUSES:
            status.add_metric([*labels, name], float(name == feed.status))
        batches.add_metric(labels, feed.counters.get("batches", 0))
        events.add_metric(labels, feed.counters.get("events", 0))
        rate.add_metric(labels, feed.events_per_second)
        if feed.lag is not None:
            lag.add_metric(labels, feed.lag)
        for kind in sorted((feed.counters.keys() - _COUNTED) | feed.problems.keys()):
            # Garbage is in both: what was no message, and with it what could not be decoded.
            troubles.add_metric([*labels, kind], feed.problems.get(kind) or feed.counters.get(kind, 0))
        for tier, count in feed.blocks.items():
            blocks.add_metric([*labels, tier], count)
        orphans.add_metric(labels, feed.orphans)
    yield from (status, batches, events, rate, lag, troubles, blocks, orphans)


def map_families(maps: "Mapping[int, PrefixMap]") -> Iterator[Metric]:
    """How large the prefix maps are, by block size."""
    labels = ("block_size",)
    taken = GaugeMetricFamily("warmroute_prefix_map_bytes", "Memory that the map takes", labels=labels)
    budget = GaugeMetricFamily("warmroute_prefix_map_budget_bytes", "Memory that it may take", labels=labels)
    blocks = GaugeMetricFamily("warmroute_prefix_map_blocks", "Blocks that it knows", labels=labels)
    sets = GaugeMetricFamily("warmroute_prefix_map_holder_sets", "Distinct sets of holders", labels=labels)
    evicted = CounterMetricFamily("warmroute_prefix_map_evicted", "Blocks forgotten for lack of memory", labels=labels)
    expired = CounterMetricFamily(
        "warmroute_prefix_map_expired", "Blocks forgotten because their time was up", labels=labels
    )
    for block_size, one in maps.items():
        values = [str(block_size)]
        taken.add_metric(values, one.bytes)
        budget.add_metric(values, one.budget)
        blocks.add_metric(values, len(one))
        sets.add_metric(values, one.sets)
        evicted.add_metric(values, one.counters.evicted)
        expired.add_metric(values, one.counters.expired)
    yield from (taken, budget, blocks, sets, evicted, expired)
