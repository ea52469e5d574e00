"""Bytes of a KV event batch to `Stored`, `Removed` and `Cleared`; whatever cannot be understood is counted.

One decoder for all workers, because what they send differs in spelling only:

* the batch: ``[ts, events]``, ``[ts, events, dp_rank]`` or a map with those names;
* an event: a map with the tag under ``type`` (vLLM from 0.24), or an array with the tag first and trailing fields left out
  (vLLM before, SGLang, LMCache);
* a block's hash: an int, signed or not, or its digest as bytes;
* a medium: ``GPU``, ``CPU``, ``CPU_PINNED``, ``DISK``, ``STORAGE``, ``lmcache-l1``, ``lmcache-l2-fs`` ...

Fields are taken by name or place as far as they are there; unknown ones are ignored. `decode` never raises.
Layouts and their history: vllm/distributed/kv_events.py, sglang/srt/disaggregation/kv_events.py, LMCache kv_event_publisher.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.prefix.holders import Tier
from gateway.prompt.blocks import pack

MAX_PAYLOAD = 64 * 1024 * 1024
"""Bytes of a batch; a step of an engine with a million new tokens sends 5 MB."""
MAX_EVENTS = 1_000_000
MAX_TOKENS = 8_000_000
MAX_NAME = 1024
"""Characters of a LoRA adapter's name or a salt."""
MAX_BLOCK_SIZE = 1 << 20
HASH_MASK = (1 << 60) - 1
"""An engine's hash is known by its last 60 bits: such an int takes 32 bytes of memory, one of 64 bits 48."""

FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache in which every block of a prefix has its own hash, in order."""

_MEDIUMS = {
    None: Tier.DEVICE,
    "": Tier.DEVICE,
    "gpu": Tier.DEVICE,
    "device": Tier.DEVICE,
    "hbm": Tier.DEVICE,
    "neuron": Tier.DEVICE,
    "cpu": Tier.L1,
    "cpu_pinned": Tier.L1,
    "host": Tier.L1,
    "lmcache-l1": Tier.L1,
    "storage": Tier.L2,
    "fs": Tier.L2,
    "obj": Tier.L2,
    "disk": Tier.L2,
    "external": Tier.L2,
}
_STORED_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx", "locality")


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one prefix are now held.

    Attributes:
        hashes: the engine's hashes (`HASH_MASK`), one per block.
        parent: hash of the block before the first one; None at the start of a prompt.
        tokens: packed token ids (`gateway.prompt.blocks.pack`); may be more or fewer than the hashes stand for.
        block_size: tokens per block; 0 when only hashes were given.
        tier: where.
        lora: the LoRA adapter's name, ``#7`` for one that is known by its number only, or None.
        extra_keys: per block what else went into its hash (LoRA name, images, salt); empty when nothing did.
        group: KV cache group of a hybrid model, or None.
        kind: of that group, e.g. ``full_attention``; None means full attention too.
    """

    hashes: list[int]
    parent: int | None
    tokens: bytes
    block_size: int
    tier: Tier
    lora: str | None = None
    extra_keys: Sequence[Any] = ()
    group: int | None = None
    kind: str | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks are no longer held in one tier; the hashes need not be known."""

    hashes: list[int]
    tier: Tier
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The engine's own cache was emptied."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What one message said.

    Attributes:
        events: in order.
        timestamp: seconds since 1970 on the worker's clock, or 0.
        rank: data-parallel rank, or None.
        problems: what was left out and how often, by a short name: ``garbage``, ``unknown_event``, ``bad_event``, ``unknown_medium``.
    """

    events: list[Event]
    timestamp: float = 0.0
    rank: int | None = None
    problems: dict[str, int] = {}


class _BadEventError(Exception):
    """An event that makes no sense; its message is the problem's short name."""


def decode(payload: bytes | memoryview) -> Batch:
    """One message's payload. Anything that is not understood is left out and counted in `Batch.problems`."""
    if len(payload) > MAX_PAYLOAD:
        return Batch([], problems={"too_large": 1})
    try:
        raw = msgspec.msgpack.decode(payload)
    # Besides its own errors msgspec lets these out: deep nesting, huge timestamps, lengths that no memory can hold.
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError, MemoryError):
        return Batch([], problems={"garbage": 1})
    if isinstance(raw, dict):
        timestamp, items, rank = (
            raw.get("ts"),
            raw.get("events"),
            raw.get("data_parallel_rank", raw.get("attn_dp_rank")),
        )
    elif isinstance(raw, list) and len(raw) >= 2:
        timestamp, items, rank = raw[0], raw[1], raw[2] if len(raw) > 2 else None
    else:
        return Batch([], problems={"garbage": 1})
    if not isinstance(items, list) or len(items) > MAX_EVENTS:
        return Batch([], problems={"garbage": 1})
    events: list[Event] = []
    problems: dict[str, int] = {}
    for item in items:
        try:
            event = _event(item)
        except _BadEventError as error:
            problems[str(error)] = problems.get(str(error), 0) + 1
        else:
            events.append(event)
    return Batch(
        events,
        float(timestamp) if isinstance(timestamp, float | int) else 0.0,
        rank if type(rank) is int else None,
        problems,
    )


def tier_of(medium: Any, locality: Any = None) -> Tier | None:
    """The tier that a worker's name for a memory stands for; None when the name is unknown."""
    if isinstance(medium, str):
        medium = medium.lower()
        if medium.startswith("lmcache-l2"):
            return Tier.L2
    elif medium is not None:
        return None
    tier = _MEDIUMS.get(medium)
    # What another host holds has to be fetched like anything else from storage.
    return Tier.L2 if tier is not None and isinstance(locality, str) and locality.upper() == "REMOTE" else tier


def _event(item: Any) -> Event:
    if isinstance(item, dict):
        tag = item.get("type")
        get: Callable[[str], Any] = item.get
    elif isinstance(item, list) and item:
        tag = item[0]
        names = _STORED_FIELDS if tag == "BlockStored" else _REMOVED_FIELDS
        get = dict(zip(names, item, strict=False)).get
    else:
        raise _BadEventError("bad_event")
    if tag == "BlockStored":
        return _stored(get)
    if tag == "BlockRemoved":
        return Removed(_hashes(get("block_hashes")), _tier(get), _group(get("group_idx")))
    if tag == "AllBlocksCleared":
        return Cleared()
    raise _BadEventError("unknown_event")


def _stored(get: Callable[[str], Any]) -> Stored:
    tokens, block_size, parent = get("token_ids"), get("block_size"), get("parent_block_hash")
    if tokens is None:
        tokens = []
    if block_size is None:
        block_size = 0
    if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS:
        raise _BadEventError("bad_event")
    if type(block_size) is not int or not 0 <= block_size <= MAX_BLOCK_SIZE:
        raise _BadEventError("bad_event")
    try:
        packed = pack(tokens)
    except (TypeError, OverflowError) as error:  # e.g. pairs of tokens, from SGLang's EAGLE
        raise _BadEventError("bad_event") from error
    kind = get("kv_cache_spec_kind")
    hashes = _hashes(get("block_hashes"))
    return Stored(
        hashes,
        None if parent is None else _hashes([parent])[0],
        packed,
        block_size,
        _tier(get),
        _lora(get("lora_name"), get("lora_id")),
        _extra_keys(get("extra_keys")),
        _group(get("group_idx")),
        kind if isinstance(kind, str) else None,
    )


def _extra_keys(raw: Any) -> Sequence[Any]:
    """Per block None or a list of scalars and flat lists (an image and its place); nothing when no block has any."""
    if not isinstance(raw, list) or not any(raw):
        return ()
    for keys in raw:
        for key in keys if isinstance(keys, list) else (keys,):
            if isinstance(key, dict) or (isinstance(key, list) and any(isinstance(each, list | dict) for each in key)):
                raise _BadEventError("bad_event")
    return raw


def _hashes(raw: Any) -> list[int]:
    if not isinstance(raw, list):
        raise _BadEventError("bad_event")
    try:
        return [each & HASH_MASK for each in raw]
    except TypeError:
        pass
    if all(isinstance(each, bytes) and each for each in raw):
        # vLLM's own short form of a digest is its end.
        return [int.from_bytes(each[-8:], "big") & HASH_MASK for each in raw]
    raise _BadEventError("bad_event")


def _tier(get: Callable[[str], Any]) -> Tier:
    tier = tier_of(get("medium"), get("locality"))
    if tier is None:
        raise _BadEventError("unknown_medium")
    return tier


def _lora(name: Any, number: Any) -> str | None:
    if isinstance(name, str) and name:
        return name[:MAX_NAME]
    # Numbers are local to the worker, but they keep adapters apart.
    return f"#{number}" if type(number) is int else None


def _group(raw: Any) -> int | None:
    return raw if type(raw) is int else None
