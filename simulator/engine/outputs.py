"""What goes into the engine and what comes out of it.

All times are seconds on the caller's clock.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import msgspec

BlockKey: TypeAlias = Hashable
"""One full block *and all that precedes it*: a chained key, namespaced by salt and LoRA adapter by whoever makes it."""

TierName: TypeAlias = Literal["device", "l1", "l2"]


class Retention(NamedTuple):
    """What the blocks ``[start, stop)`` of a request are worth, by their index among its `blocks`.

    Attributes:
        start, stop: which; `stop` may lie beyond the last.
        priority: 0 (first to go) to 100 (last to go); blocks of which nothing is said count 50.
        until: when that lapses.
    """

    start: int
    stop: int
    priority: int
    until: float = float("inf")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request, with its answer's length known beforehand.

    Attributes:
        id: unique among the requests that have not ended.
        prompt_tokens: at least 1.
        output_tokens: at least 1; how many it will generate.
        blocks: keys of every full block of prompt and output, in order: ``(prompt_tokens + output_tokens) // block_size``
            of them. May be empty when the profile has no prefix caching.
        priority: lower goes first where the profile orders by priority.
        lora: the adapter's name; the engine only carries it.
        finish_reason: ``length`` or ``stop``; comes back in `Finished`.
        retention: what its blocks are worth to the device's cache, from their coming into it, or their being found there, on. Of
            parts that overlap the last counts.
        offload_tokens: so many leading tokens are copied to l1 and l2 as they are stored, and no more; None: all.
        load_tiers: the tiers from which anything is loaded; None: all.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[BlockKey]
    priority: int = 0
    lora: str | None = None
    finish_reason: str = "length"
    retention: Sequence[Retention] = ()
    offload_tokens: int | None = None
    load_tiers: Sequence[TierName] | None = None


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The prefill has ended. Exactly one per request, before its first `TokenOut`.

    ``cached_device + cached_l1 + cached_l2 + computed_tokens`` is the prompt's length, and ``queue_time + load_time +
    prefill_time`` the time since the submission (up to rounding).

    Attributes:
        cached_device: prompt tokens that were credited from device blocks (whole segments only, where the profile says so).
        cached_l1: tokens loaded from the worker's CPU memory.
        cached_l2: tokens loaded from the shared tier.
        computed_tokens: tokens that the prefill computed.
        padded_tokens: the same, after padding to buckets.
        queue_time: seconds from submission to (the last) admission.
        prefill_time: seconds from admission to here, without `load_time`.
        load_time: seconds spent on bringing l1 and l2 blocks in.
    """

    time: float
    request_id: str
    cached_device: int
    cached_l1: int
    cached_l2: int
    computed_tokens: int
    padded_tokens: int
    queue_time: float
    prefill_time: float
    load_time: float


class TokenOut(msgspec.Struct, frozen=True, gc=False):
    """`count` output tokens from `index` (from 0). Only where the engine emits tokens."""

    time: float
    request_id: str
    index: int
    count: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The request has ended.

    `reason` is the request's own; or ``error`` (normally without a `FirstToken`; with one only if it was preempted
    since) when the worker's compiled shapes cannot take the prompt, see `Profile.max_prefix_bucket` and `Profile.segments`.
    """

    time: float
    request_id: str
    reason: str


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks have come into a tier.

    Attributes:
        keys: at least one, in chain order.
        parent: the key before the first one; None at the start of a chain.
        tier: where they are now (too).
        request_id: the request that made them; None for blocks that were copied on eviction or prefetched.
        first_block: index of ``keys[0]`` among the request's blocks; None without a request.
    """

    time: float
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    tier: TierName
    request_id: str | None
    first_block: int | None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks have left a tier, in the order in which they were evicted."""

    time: float
    keys: tuple[BlockKey, ...]
    tier: TierName


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The device's prefix cache was reset: it holds no key any more. The other tiers announce each block themselves."""

    time: float


Output: TypeAlias = FirstToken | TokenOut | Finished | Stored | Removed | Cleared


class BucketStats(msgspec.Struct, frozen=True, gc=False):
    """How often a compiled shape ran, and the padding in it: tokens for prefill, streams for decode."""

    executions: int
    padding: int


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of load and counters, at the latest time that the engine was told.

    Attributes:
        running: requests in the batch, those being prefilled included.
        waiting: requests in the queue.
        kv_blocks: the size of the device pool.
        kv_usage: share of it that running requests hold, in [0, 1]; cached blocks without a user are not in use.
        cached_blocks: keys in the device's prefix cache, in use or not.
        prompt_tokens: of requests whose prefill has ended; so are the four that follow.
        computed_tokens, cached_device, cached_l1, cached_l2: where those came from.
        generation_tokens: output tokens so far.
        prefix_queries: prompt tokens looked up in the device's prefix cache, at a request's first admission.
        prefix_hits: those of them that were credited.
        external_queries: prompt tokens looked up in l1 and l2, at the first admission.
        external_hits: those of them that were loaded.
        preemptions: times that a running request lost its blocks.
        stored_blocks, removed_blocks: of the device's prefix cache.
        prefill_buckets: by padded size in tokens.
        decode_buckets: by padded batch size; one execution per step.
    """

    running: int
    waiting: int
    kv_blocks: int
    kv_usage: float
    cached_blocks: int
    prompt_tokens: int
    computed_tokens: int
    cached_device: int
    cached_l1: int
    cached_l2: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    external_queries: int
    external_hits: int
    preemptions: int
    stored_blocks: int
    removed_blocks: int
    prefill_buckets: dict[int, BucketStats]
    decode_buckets: dict[int, BucketStats]
