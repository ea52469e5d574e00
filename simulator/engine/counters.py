"""The engine's counters."""

from simulator.engine.outputs import BucketStats, EngineStats
from simulator.engine.request import ActiveRequest


class Counters:
    """Plain integers that only grow; `EngineStats` says what they mean.

    `generation_tokens` counts requests that have ended; the others' tokens are added in a snapshot.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.cached_device = 0
        self.cached_l1 = 0
        self.cached_l2 = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.external_queries = 0
        self.external_hits = 0
        self.preemptions = 0
        self._prefill: dict[int, list[int]] = {}
        self._decode: dict[int, list[int]] = {}

    def prefill(self, bucket: int, padding: int) -> None:
        """A prefill of `bucket` tokens, `padding` of them for nothing, was started."""
        counts = self._prefill.setdefault(bucket, [0, 0])
        counts[0] += 1
        counts[1] += padding

    def prefill_padding(self, bucket: int, padding: int) -> None:
        """More padding in a prefill that was counted."""
        self._prefill[bucket][1] += padding

    def decode_steps(self, steps: int, batch: int, streams: int) -> None:
        """`steps` decode steps of `streams` streams ran at batch size `batch`."""
        counts = self._decode.setdefault(batch, [0, 0])
        counts[0] += steps
        counts[1] += steps * (batch - streams)

    def lookup(self, request: ActiveRequest) -> None:
        """A request was admitted. Later admissions, after a preemption, do not count, as in vLLM."""
        if request.preempted:
            return
        prompt = request.prompt_tokens
        self.prefix_queries += prompt
        self.prefix_hits += request.cached_device
        self.external_queries += prompt - request.cached_device
        self.external_hits += request.cached_l1 + request.cached_l2

    def first_token(self, request: ActiveRequest) -> None:
        """A request's prefill has ended."""
        self.prompt_tokens += request.prompt_tokens
        self.computed_tokens += request.prompt_tokens - request.cached
        self.cached_device += request.cached_device
        self.cached_l1 += request.cached_l1
        self.cached_l2 += request.cached_l2

    def snapshot(
        self,
        *,
        running: int,
        waiting: int,
        kv_blocks: int,
        kv_usage: float,
        cached_blocks: int,
        live_tokens: int,
        stored_blocks: int,
        removed_blocks: int,
    ) -> EngineStats:
        """The counters as they are, with the load that the engine knows."""
        return EngineStats(
            running=running,
            waiting=waiting,
            kv_blocks=kv_blocks,
            kv_usage=kv_usage,
            cached_blocks=cached_blocks,
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.computed_tokens,
            cached_device=self.cached_device,
            cached_l1=self.cached_l1,
            cached_l2=self.cached_l2,
            generation_tokens=self.generation_tokens + live_tokens,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            external_queries=self.external_queries,
            external_hits=self.external_hits,
            preemptions=self.preemptions,
            stored_blocks=stored_blocks,
            removed_blocks=removed_blocks,
            prefill_buckets={bucket: BucketStats(*counts) for bucket, counts in sorted(self._prefill.items())},
            decode_buckets={bucket: BucketStats(*counts) for bucket, counts in sorted(self._decode.items())},
        )
