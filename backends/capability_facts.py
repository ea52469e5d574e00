"""What a worker tells about what it can do. Whatever it answers is read with suspicion: a wrong field is an unknown one."""

from dataclasses import dataclass, fields
from typing import Any, Literal

LARGEST = 1 << 40
"""No count of tokens, blocks or requests is above this; a larger one is garbage."""
MAX_BUCKETS = 64
"""Compiled sizes that are believed of one worker; one that names more has no buckets that we understand."""
MAX_ADAPTERS = 1024
"""Names of LoRA adapters kept of one worker."""
MAX_NAME = 256
"""Characters of such a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityFacts:
    """What one answer says. None: it says nothing about that.

    Attributes:
        block_size: tokens per KV block.
        kv_capacity_tokens: tokens in the device pools, of all data-parallel ranks together.
        l1_capacity_tokens: tokens in the worker's CPU memory.
        max_model_len: prompt and answer together, in tokens.
        slots: most requests in the running batch (``max_num_seqs``).
        prefill: one prompt at a time or in chunks beside decodes.
        max_num_batched_tokens: tokens per step of a worker that prefills in chunks.
        prefill_buckets, decode_batch_buckets, decode_context_buckets: compiled sizes, ascending.
        segment_size: cached tokens count in whole segments of this many.
        prefix_caching: whether prefixes are reused at all.
        tokens_per_step: output tokens per stream and decode step, as observed, at least 1.
        decoder: how it decodes.
        role: its part where prefill and decode are done by different workers.
        lora_adapters: names of those that it serves.
        started: seconds since 1970 on the worker's clock at which its process started.
    """

    block_size: int | None = None
    kv_capacity_tokens: int | None = None
    l1_capacity_tokens: int | None = None
    max_model_len: int | None = None
    slots: int | None = None
    prefill: Literal["exclusive", "chunked"] | None = None
    max_num_batched_tokens: int | None = None
    prefill_buckets: tuple[int, ...] | None = None
    decode_batch_buckets: tuple[int, ...] | None = None
    decode_context_buckets: tuple[int, ...] | None = None
    segment_size: int | None = None
    prefix_caching: bool | None = None
    tokens_per_step: float | None = None
    decoder: Literal["plain", "speculative", "medusa"] | None = None
    role: Literal["both", "prefill", "decode"] | None = None
    lora_adapters: tuple[str, ...] | None = None
    started: float | None = None

    def known(self) -> dict[str, Any]:
        """The fields that it says something about."""
        return {it.name: value for it in fields(self) if (value := getattr(self, it.name)) is not None}


def count(value: Any) -> int | None:
    """A positive whole number of a sensible size, or None."""
    return value if type(value) is int and 0 < value <= LARGEST else None


def count_in(text: str | None) -> int | None:
    """The same, written in decimal digits."""
    return count(int(text)) if text and len(text) < 16 and text.isascii() and text.isdecimal() else None


def buckets(sizes: "set[int]") -> tuple[int, ...] | None:
    """Compiled sizes, ascending; None when there are none or absurdly many."""
    return tuple(sorted(sizes)) if 0 < len(sizes) <= MAX_BUCKETS else None
