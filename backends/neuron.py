"""vLLM on AWS Neuron (Trainium, Inferentia)."""

import re
from dataclasses import replace

from backends.capability_facts import CapabilityFacts, buckets
from backends.profiles.assumed import ASSUMED_NEURON
from backends.vllm import VLLMDriver

_BUCKET = re.compile(
    rb'^vllm_neuron:[a-z_]+\{[^\n]*bucket_name="(?:prefill_s([0-9]{1,8})|decode_b([0-9]{1,5}))["_]', re.MULTILINE
)
_SEGMENTS = range(512, 8193)
"""Sizes that a compiled segment can have."""


class NeuronDriver(VLLMDriver):
    """vLLM's API server above the Neuron plug-in; the wire is vLLM's, the start is not.

    Every bucket is compiled ahead of time when the compile cache is cold: about a quarter of an hour for an 8B model,
    and Neuron's documentation sets `VLLM_ENGINE_READY_TIMEOUT_S=5400` for a 120B one. The answers are those of vLLM
    0.11 to 0.24, so cards may lack `root`, `parent` and `max_model_len`.
    """

    name = "neuron"
    credits_blocks = False
    assumed = ASSUMED_NEURON
    runs_medusa_alone = True
    start_up = 5400.0

    def _facts_of_metrics(self, body: bytes) -> CapabilityFacts:
        """Besides vLLM's, the compiled sizes: they are labels of vllm-neuron's metrics, and there before any traffic.

        The largest decode batch is `max_num_seqs`, by vllm-neuron's rule. Segmented prefill is compiled for a single size,
        so a worker that caches prefixes and has one prefill bucket only has segments of that size (inferred).
        """
        facts = super()._facts_of_metrics(body)
        sizes = _BUCKET.findall(body)
        prefills = buckets({int(prefill) for prefill, _ in sizes if prefill} - {0})
        decodes = buckets({int(decode) for _, decode in sizes if decode} - {0})
        segmented = prefills is not None and len(prefills) == 1 and facts.prefix_caching and prefills[0] in _SEGMENTS
        if segmented and facts.block_size and prefills and prefills[0] % facts.block_size:
            segmented = False
        return replace(
            facts,
            prefill_buckets=prefills,
            decode_batch_buckets=decodes,
            slots=decodes[-1] if decodes else None,
            segment_size=prefills[0] if segmented and prefills else None,
        )
