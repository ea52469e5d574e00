"""A request inside the engine: how far it is, and at which decode step something happens to it."""

from typing import TYPE_CHECKING

from simulator.engine.outputs import BlockKey, EngineRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

THOUSAND = 1000
"""Tokens per step are counted in thousandths, so that no rounding depends on how far the engine advances at once."""


class ActiveRequest:
    """A request that has not ended.

    The key arithmetic: the answer's first token comes out of the prefill, and a token's keys and values are computed by
    the step after the one that made it. So with g generated tokens, ``prompt_tokens + g - 1`` are computed, and the last
    output token never is.

    Attributes:
        id, prompt_tokens, output_tokens, keys: of the request.
        request: as submitted.
        sequence: position in order of submission.
        submitted, admitted: when.
        target: tokens that its prefill has to reach: the prompt, and after a preemption what was generated, too.
        computed: tokens whose keys and values are there.
        shared: leading keys that it uses in the prefix cache.
        private: blocks that are its own.
        cached_device, cached_l1, cached_l2, padded: of its latest prefill, see `FirstToken`.
        load_time: seconds that its latest admission spends on loading.
        answered: its `FirstToken` is out.
        preempted: it has lost its blocks at least once.
        decoding: it takes part in decode steps.
        joined: decode step after which it joined the batch.
        base: tokens that it had generated then.
        sent: tokens that are out, as `TokenOut` where those are wanted.
        wake: decode step after which something happens to it; -1: none is planned.
    """

    __slots__ = (
        "_pace",
        "_phase",
        "admitted",
        "answered",
        "base",
        "cached_device",
        "cached_l1",
        "cached_l2",
        "computed",
        "decoding",
        "id",
        "joined",
        "keys",
        "load_time",
        "output_tokens",
        "padded",
        "preempted",
        "private",
        "prompt_tokens",
        "request",
        "sent",
        "sequence",
        "shared",
        "submitted",
        "target",
        "wake",
    )

    def __init__(self, request: EngineRequest, *, sequence: int, now: float, pace: int, phase: int) -> None:
        """`pace` is the tokens per decode step and `phase` what it has of the next one at its first, in thousandths."""
        self.request = request
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.keys: Sequence[BlockKey] = request.blocks
        self.sequence = sequence
        self.submitted = now
        self.admitted = now
        self.target = request.prompt_tokens
        self.computed = 0
        self.shared = 0
        self.private = 0
        self.cached_device = 0
        self.cached_l1 = 0
        self.cached_l2 = 0
        self.padded = 0
        self.load_time = 0.0
        self.answered = False
        self.preempted = False
        self.decoding = False
        self.joined = 0
        self.base = 0
        self.sent = 0
        self.wake = -1
        self._pace = pace
        self._phase = phase

    @property
    def cached(self) -> int:
        """Tokens that its latest prefill did not have to compute."""
        return self.cached_device + self.cached_l1 + self.cached_l2

    def generated(self, step: int) -> int:
        """Output tokens after the decode step `step`."""
        if not self.decoding:
            return self.base
        tokens = self.base + ((step - self.joined) * self._pace + self._phase) // THOUSAND
        return min(tokens, self.output_tokens)

    def computed_at(self, step: int) -> int:
        """Tokens with keys and values after the decode step `step`."""
        return self.prompt_tokens + self.generated(step) - 1

    def step_of(self, tokens: int) -> int:
        """The first decode step after which `tokens` output tokens, more than `base`, are there."""
        return self.joined - (self._phase - (tokens - self.base) * THOUSAND) // self._pace

    def step_computed(self, tokens: int) -> int:
        """The first decode step after which `tokens` tokens have keys and values."""
        return self.step_of(tokens - self.prompt_tokens + 1)

    def needs_block(self, step: int, block_size: int) -> bool:
        """Whether the decode step after `step` writes beyond its blocks."""
        return self.computed_at(step + 1) > (self.shared + self.private) * block_size

    def next_wake(self, block_size: int, context_bucket: int) -> int:
        """The decode step after which it next ends, fills a block, needs a block or outgrows `context_bucket`.

        It must hold the blocks that its next step writes. `context_bucket` 0 means that the context does not matter.
        """
        last = self.prompt_tokens + self.output_tokens - 1
        wake = self.step_of(self.output_tokens)
        filled = (self.shared + 1) * block_size
        if self.keys and filled <= last:
            wake = min(wake, self.step_computed(filled))
        capacity = (self.shared + self.private) * block_size
        if capacity < last:
            wake = min(wake, self.step_computed(capacity + 1) - 1)
        if context_bucket and context_bucket <= last:
            wake = min(wake, self.step_computed(context_bucket))
        return wake
