"""How well it is known what a worker holds, as a record for telemetry and in sentences for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

STATUSES: Mapping[str, str] = MappingProxyType(
    {
        "events": "KV events tell what the worker holds",
        "history": "no KV events: what the worker holds is guessed from what it was sent",
        "connecting": "no connection to the worker's KV events",
        "gap": "KV events were missed: what the worker holds is known in part",
        "none": "the worker keeps no prefixes",
    }
)
"""Every status of a feed and what it means."""
CONNECTING_SHOWN = 5.0
"""Seconds for which a feed may connect before that is called a degradation."""
NAMED = 5
"""Workers that a sentence names; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStatus:
    """One worker's feed at one moment.

    Attributes:
        worker: id.
        fleet: the model's name.
        status: a key of `STATUSES`.
        since: seconds in this status.
        reason: why it is not ``events``, in words.
        configured: its socket is in the configuration.
        driver_knows: its kind of worker can say where its events are.
        switched_off: its events are not wanted.
        endpoints: where it publishes.
        replay: whether missed events can be had again, from every endpoint.
        ranks: data-parallel ranks that are followed.
        last_seq: number of the latest batch, -1 before the first, None without events.
        events_per_second: smoothed over a few seconds.
        lag: seconds from the worker's clock at its latest batch to ours.
        counters: see `Stream.counters`.
        problems: events that could not be used, by reason.
        orphans: blocks whose parent is not known.
        block_size: tokens per block, None when not known yet; `block_size_origin` says how it is known.
        announced_block_size: what the worker or the configuration says, if anything.
        distrusted_block_size: what was announced but did not fit the events.
        blocks: known to be held, by tier.
        capacity: blocks of device memory, if known; `capacity_origin` says from where.
        silent: prompts were sent there and events must have come, but did not.
    """

    worker: str
    fleet: str
    status: str
    since: float
    reason: str = ""
    configured: bool = False
    driver_knows: bool = False
    switched_off: bool = False
    endpoints: Sequence[str] = ()
    replay: bool = False
    ranks: int = 0
    last_seq: int | None = None
    events_per_second: float = 0.0
    lag: float | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, int] = field(default_factory=dict)
    orphans: int = 0
    block_size: int | None = None
    block_size_origin: str = ""
    announced_block_size: int | None = None
    distrusted_block_size: int | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    capacity: int | None = None
    capacity_origin: str = ""
    silent: bool = False


def say(status: str) -> str:
    """A status in words, for a log line."""
    return STATUSES[status]


def sentences(feeds: Sequence[FeedStatus]) -> list[str]:
    """What is wrong with the feeds of one fleet, one sentence for each kind of trouble; empty when all is well."""
    said: list[str] = []

    def group(text: str, chosen: Sequence[FeedStatus], detail: str = "") -> None:
        if chosen:
            names = sorted(feed.worker for feed in chosen)
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            said.append(f"{len(names)} of {len(feeds)} workers {text}: {', '.join(names[:NAMED])}{more}{detail}")

    # Only where events could be expected: a fleet of a kind that never sends any is as good as it can be.
    guessed = [feed for feed in feeds if feed.status == "history" and feed.driver_knows and not feed.switched_off]
    group("send no KV events, what they hold is guessed", guessed, f" ({guessed[0].reason})" if guessed else "")
    lost = [
        feed
        for feed in feeds
        if feed.status == "connecting" and feed.since > CONNECTING_SHOWN and (feed.endpoints or feed.configured)
    ]
    group("cannot be reached for KV events", lost, f" ({lost[0].reason})" if lost else "")
    group("publish KV events of which none came", [feed for feed in feeds if feed.silent and feed.status == "events"])
    gaps = [feed for feed in feeds if feed.status == "gap"]
    no_replay = [feed for feed in gaps if not feed.replay]
    group("lost KV events and cannot repeat them (no replay_endpoint)", no_replay)
    group("lost KV events, what they hold is known in part", [feed for feed in gaps if feed.replay])
    for feed in feeds:
        if feed.problems.get("other_block_size"):
            said.append(
                f"{feed.worker} sends blocks of another size than {feed.block_size} tokens"
                f" ({feed.block_size_origin}): {feed.problems['other_block_size']} of them are not used"
            )
        if feed.distrusted_block_size is not None:
            said.append(
                f"{feed.worker} says that its blocks have {feed.distrusted_block_size} tokens, but its events say"
                f" {feed.block_size or 'otherwise'}"
            )
    unread = [
        feed
        for feed in feeds
        if any(feed.problems.get(name) for name in ("garbage", "bad_event", "misaligned", "too_large"))
    ]
    group("sent KV events that make no sense", unread)
    return said
