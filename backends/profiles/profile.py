"""What a worker can do and how long it takes: the numbers of one kind of worker, and the formulas over them."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of worker. Change a field with `dataclasses.replace`.

    Attributes:
        name: how it is chosen, e.g. ``trn2-70b``.
        description: for people: what was measured and what was inferred.
        block_size: tokens per KV block.
        kv_blocks: blocks in the device pool.
        slots: most requests in the running batch (``max_num_seqs``).
        max_model_len: prompt and answer together, in tokens.
        prefill: ``exclusive``: one prompt at a time, and no decode while it runs, all its segments included (Neuron).
            ``chunked``: a step shares `max_num_batched_tokens` between decodes and chunks of prompts (GPU).
        admission: ``reserve``: as many requests as fit at `max_model_len` each, however short they are (Neuron).
            ``paged``: as long as the prompt's blocks fit; the newest request loses its blocks when they run out (GPU).
        order: of the queue: ``fifo`` or ``priority`` (lower first, then first come).
        max_num_batched_tokens: tokens per step; chunked only.
        prefill_rate: tokens per second, padding counted.
        overhead: seconds per prefill, whatever its length.
        chunk_overhead: seconds for each further chunk of the same prefill.
        prefill_buckets: compiled sizes, ascending; a prefill is padded to the smallest that takes it. Empty: no padding.
        segments: whether a prompt above the largest bucket is cut into several; otherwise it ends in an error.
        segment_size: cached tokens count in whole segments of this many only; None: in blocks.
        max_prefix_bucket: largest compiled prefix of a stack with prefill x prefix buckets. There, cached tokens are
            moved into the prefill bucket's padding, and a longer rest ends in an error; None: no such rule.
        itl_base, itl_per_stream, itl_per_context_token: seconds per decode step; see `itl`.
        decode_batch_buckets: compiled batch sizes, ascending; empty: any.
        decode_context_buckets: compiled context lengths, ascending; a longer context counts as `max_model_len`.
        tokens_per_step: output tokens per stream and decode step on average, at least 1 (parallel decoding).
        prefix_caching: whether finished blocks are kept for others.
        offload: when blocks are copied to l1 and l2: at ``store`` (write-through) or at ``evict``, tier by tier.
        l1_blocks, l2_blocks: capacity; 0: there is no such tier.
        l1_bandwidth, l2_bandwidth: bytes per second into the device.
        l1_latency, l2_latency: seconds per transfer, whatever its size.
        kv_bytes_per_token: size of the keys and values of one token.
        warm_up: seconds from the process's start to its first request. The engine has no start; its face waits.
    """

    name: str
    description: str = ""
    block_size: int
    kv_blocks: int
    slots: int
    max_model_len: int
    prefill: Literal["exclusive", "chunked"]
    admission: Literal["reserve", "paged"]
    order: Literal["fifo", "priority"] = "fifo"
    max_num_batched_tokens: int = 8192
    prefill_rate: float
    overhead: float = 0.0
    chunk_overhead: float = 0.0
    prefill_buckets: tuple[int, ...] = ()
    segments: bool = True
    segment_size: int | None = None
    max_prefix_bucket: int | None = None
    itl_base: float
    itl_per_stream: float = 0.0
    itl_per_context_token: float = 0.0
    decode_batch_buckets: tuple[int, ...] = ()
    decode_context_buckets: tuple[int, ...] = ()
    tokens_per_step: float = 1.0
    prefix_caching: bool = True
    offload: Literal["store", "evict"] = "store"
    l1_blocks: int = 0
    l2_blocks: int = 0
    l1_bandwidth: float = 40e9
    l2_bandwidth: float = 10e9
    l1_latency: float = 0.0005
    l2_latency: float = 0.005
    kv_bytes_per_token: int = 131_072
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers with which no request could ever run.

        Raises:
            ValueError: says which.
        """
        for name in ("block_size", "kv_blocks", "slots", "max_model_len", "prefill_rate", "itl_base"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in ("prefill_buckets", "decode_batch_buckets", "decode_context_buckets"):
            buckets = getattr(self, name)
            if any(bucket <= 0 for bucket in buckets) or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name} must be positive and ascending")
        if self.tokens_per_step < 1:
            raise ValueError("tokens_per_step must be at least 1")
        if self.segment_size is not None and self.segment_size % self.block_size:
            raise ValueError("segment_size must be a multiple of block_size")
        if self.prefill == "chunked" and self.max_num_batched_tokens <= self.slots:
            raise ValueError("max_num_batched_tokens must exceed slots: decodes go first, and prompts need the rest")
        if self.admission == "reserve" and not self.effective_slots:
            raise ValueError("kv_blocks hold no request of max_model_len tokens")

    @property
    def effective_slots(self) -> int:
        """Most requests that can run at once.

        With ``reserve`` the pool's size bounds it too: min(max_num_seqs, KV capacity / max_model_len), in whole blocks.
        """
        if self.admission == "paged":
            return self.slots
        return min(self.slots, self.kv_blocks // self.blocks_for(self.max_model_len))

    @property
    def kv_bytes_per_block(self) -> int:
        """Size of one block's keys and values."""
        return self.kv_bytes_per_token * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def pad(self, tokens: int) -> int:
        """Size of the smallest bucket that takes `tokens`; the largest when none does; `tokens` without buckets."""
        buckets = self.prefill_buckets
        if not buckets:
            return tokens
        return buckets[min(bisect_left(buckets, tokens), len(buckets) - 1)]

    def chunks(self, uncached: int) -> list[int]:
        """The padded sizes of the runs that a prefill of `uncached` tokens takes: the largest bucket, then the rest.

        Without buckets it is one run (exclusive), or runs of the step's budget (chunked, when nothing else runs).
        """
        if self.prefill_buckets:
            largest = self.prefill_buckets[-1]
        elif self.prefill == "chunked":
            largest = self.max_num_batched_tokens
        else:
            return [uncached]
        whole, rest = divmod(uncached, largest)
        sizes = [largest] * whole
        if rest:
            sizes.append(self.pad(rest))
        return sizes

    def prefill_seconds(self, uncached: int) -> float:
        """Seconds to prefill `uncached` tokens on an otherwise idle worker.

        overhead + padded / rate, and chunk_overhead for each run after the first.
        """
        sizes = self.chunks(uncached)
        return self.overhead + sum(sizes) / self.prefill_rate + (len(sizes) - 1) * self.chunk_overhead

    def load_seconds(self, l1_tokens: int, l2_tokens: int) -> float:
        """Seconds to bring so many tokens from the tiers into the device, one transfer per tier."""
        seconds = 0.0
        if l1_tokens:
            seconds += self.l1_latency + l1_tokens * self.kv_bytes_per_token / self.l1_bandwidth
        if l2_tokens:
            seconds += self.l2_latency + l2_tokens * self.kv_bytes_per_token / self.l2_bandwidth
        return seconds

    def credit(self, tokens: int, held: int) -> int:
        """How many of `held` cached tokens a prefill of `tokens` tokens really saves.

        Whole segments only with `segment_size`. With `max_prefix_bucket`, cached tokens first fill the padding of the
        prefill bucket and are computed again there, which costs nothing and saves nothing.
        """
        if self.segment_size is not None:
            held -= held % self.segment_size
        if self.max_prefix_bucket is not None and held:
            uncached = tokens - held
            held -= min(held, max(0, self.pad(uncached) - uncached))
        return held

    def takes(self, uncached: int, credit: int) -> bool:
        """Whether a compiled shape exists for so many uncached tokens after so many credited ones."""
        if self.prefill_buckets and not self.segments and uncached > self.prefill_buckets[-1]:
            return False
        return self.max_prefix_bucket is None or credit <= self.max_prefix_bucket

    def decode_batch(self, streams: int) -> int:
        """The batch size that a decode step of `streams` streams really runs at."""
        buckets = self.decode_batch_buckets
        if not buckets or streams > buckets[-1]:
            return streams
        return buckets[bisect_left(buckets, streams)]

    def decode_context(self, tokens: int) -> int:
        """The context that a decode step reads per stream when its longest has `tokens` tokens."""
        buckets = self.decode_context_buckets
        index = bisect_left(buckets, tokens)
        return buckets[index] if index < len(buckets) else self.max_model_len

    def itl(self, streams: int, context: int) -> float:
        """Seconds per decode step of `streams` streams, the longest with `context` tokens.

        itl_base + itl_per_stream * (padded) batch + itl_per_context_token * (padded) longest context.
        """
        seconds = self.itl_base + self.itl_per_stream * self.decode_batch(streams)
        if self.itl_per_context_token:
            seconds += self.itl_per_context_token * self.decode_context(context)
        return seconds
