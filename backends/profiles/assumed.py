"""What is taken for granted about a worker of which nothing is known. Cautious where a wrong number would refuse requests.

No padding, no segments and no cap are assumed: they differ from worker to worker, and vLLM on Neuron tells them itself.
"""

from dataclasses import replace

from backends.profiles.builtin import PROFILES

ASSUMED_GPU = replace(
    PROFILES["h100-8b"],
    name="assumed",
    description="A GPU-like worker of which nothing is known: an 8B model's numbers.",
)
"""vLLM's and SGLang's defaults: paged memory, chunked prefill."""

ASSUMED_NEURON = replace(
    PROFILES["trn2-70b"],
    name="assumed",
    description="A Neuron worker of which nothing is known: a 70B model's numbers, without its buckets.",
    prefill_buckets=(),
    segment_size=None,
    decode_batch_buckets=(),
)
"""All stacks prefill one prompt at a time and reserve memory for the longest answer; the rest is the slowest profile's."""
