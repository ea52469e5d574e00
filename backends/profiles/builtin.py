"""The built-in profiles, each number with its source.

Sources: [N] AWS Neuron SDK performance tables, release 2.18.1, transformers-neuronx, int8 weights. [T] the NxD Inference
tutorial for Llama-3.3-70B on one Trn2.48xlarge. [D] llm-d-inference-sim's latency profiles. [L] llm-d's measured constants
for its Qwen3-32B pods. [V] the design document and metrics of vllm-neuron (release 0.24). [I] inferred here, as said beside it.

What is measured is the time of one prompt and of decode at one or two batch sizes. What is inferred is everything between and
beyond those: linear in the batch, and linear in the context where a second context was measured. Pools are the hand-set,
small ones of Neuron workers (a little above what the slots need), so that eviction matters as it does there.
"""

from backends.profiles.profile import Profile

_POWERS = (512, 1024, 2048, 4096, 8192)
"""NxD Inference's automatic prefill buckets with prefix caching: powers of two from 512."""

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="trn2-70b",
            description="Llama-3.3-70B on one Trn2.48xlarge, TP 64. Measured: 10,000 tokens in 814 ms, ITL 19.6 ms alone; "
            "ITL by batch inferred from Trn1.",
            block_size=32,  # [V] default
            kv_blocks=4096,  # [I] 131,072 tokens: four slots of max_model_len and nothing more, 40 GiB
            slots=4,  # [I] compiled batch; tutorial's own run has one request at a time
            max_model_len=32_768,  # [I] prompt and answer of an agent's turn; the tutorial measured 11,500
            prefill="exclusive",  # [V] one prefill at a time, decodes held back
            admission="reserve",  # [V] min(max_num_seqs, KV capacity / max_model_len)
            prefill_rate=13_950.0,  # [T] 10,000 tokens in 814 ms: (8192 + 2048 padded) / (0.814 - 0.080)
            overhead=0.080,  # [T] about 80 ms; short prompts without a hit took 90 ms
            prefill_buckets=_POWERS,
            segment_size=1024,  # [V] the tutorial's segments; cached tokens count in whole ones
            itl_base=0.0181,  # [T] 19.6 ms at batch 1
            itl_per_stream=0.0015,  # [I] Trn1's (32.3 - 26.2 ms) / 3 for a 70B [N], scaled by 19.6 / 26.2
            decode_batch_buckets=(1, 2, 4),  # [V] powers of two up to max_num_seqs
            kv_bytes_per_token=327_680,  # 80 layers x 8 KV heads x 128 x 2 (K, V) x 2 bytes
            warm_up=1200.0,  # [I] a 70B-class model on Trn2 was seen to take about 20 minutes
        ),
        Profile(
            name="trn1-8b",
            description="Llama-3-8B on one Trn1.32xlarge, TP 32. Measured: 4,096 tokens in 153 ms, ITL 7.0 ms alone and "
            "10.0 ms at batch 8; the pool's size is chosen.",
            block_size=32,
            kv_blocks=4096,  # [I] 131,072 tokens; 2,048 is the least for 8 x 8,192
            slots=8,  # [N] largest batch measured
            max_model_len=8192,  # [N]
            prefill="exclusive",
            admission="reserve",
            prefill_rate=27_680.0,  # [N] 4,096 / (0.153 - 0.005)
            overhead=0.005,  # [N] about 5 ms
            prefill_buckets=_POWERS,
            max_prefix_bucket=8192,  # [V] prefill x prefix buckets; as large as max_model_len, so that none is too long
            itl_base=0.00657,  # [N] 7.0 ms at batch 1, 10.0 ms at batch 8
            itl_per_stream=0.00043,
            decode_batch_buckets=(1, 2, 4, 8),  # [I]
            kv_bytes_per_token=131_072,  # 32 layers x 8 KV heads x 128 x 2 (K, V) x 2 bytes
            warm_up=900.0,  # [V] a 15 GB model compiles in about 15 minutes
        ),
        Profile(
            name="inf2-8b",
            description="Llama-3-8B on one Inf2.48xlarge, TP 24. Measured: 4,096 tokens in 209 ms, ITL 7.5 ms alone, 10.5 ms "
            "at batch 8 and 4k context, 15.3 ms at 8k; the context's share at batch 1 is inferred.",
            block_size=32,
            kv_blocks=2048,  # [N] the least for 8 x 8,192
            slots=8,  # [N]
            max_model_len=8192,  # [N]
            prefill="exclusive",
            admission="reserve",
            prefill_rate=20_080.0,  # [N] 4,096 / (0.209 - 0.005)
            overhead=0.005,  # [N] about 5 ms
            prefill_buckets=_POWERS,
            max_prefix_bucket=8192,
            itl_base=0.00227,  # [N] solves the three measured points: 7.5 (1, 4k), 10.5 (8, 4k), 15.3 ms (8, 8k)
            itl_per_stream=0.00043,
            itl_per_context_token=1.172e-6,
            decode_batch_buckets=(1, 2, 4, 8),  # [I]
            decode_context_buckets=(4096, 8192),  # [N] the two that were measured
            kv_bytes_per_token=131_072,
            warm_up=900.0,
        ),
        Profile(
            name="h100-8b",
            description="Llama-3.1-8B bf16 on one H100. ITL measured; the prefill rate is an estimate between 4,000 (llm-d's "
            "simulator) and what two H100 do for a 32B; the pool follows from the memory.",
            block_size=16,  # vLLM's default on GPUs
            kv_blocks=25_000,  # [I] (72 - 16 - 3 GB) / 128 KiB = about 400 k tokens
            slots=256,  # vLLM's default
            max_model_len=131_072,  # the model's
            prefill="chunked",
            admission="paged",
            order="priority",
            max_num_batched_tokens=8192,  # vLLM's default for serving
            prefill_rate=20_000.0,  # [I]
            overhead=0.030,  # [D]
            itl_base=0.01195,  # [D] 12 ms alone, about twice that at full batch
            itl_per_stream=0.00005,
            kv_bytes_per_token=131_072,
            warm_up=60.0,  # [I]
        ),
        Profile(
            name="h100x2-32b",
            description="Qwen3-32B on two H100, TP 2. Prefill rate and pool measured, ITL between two measured bounds.",
            block_size=16,
            kv_blocks=19_208,  # [L] 307,328 tokens
            slots=256,
            max_model_len=40_960,  # the model's
            prefill="chunked",
            admission="paged",
            order="priority",
            max_num_batched_tokens=8192,
            prefill_rate=20_480.0,  # [L]
            itl_base=0.02,  # [L] 20 to 30 ms
            itl_per_stream=0.00004,  # [I] 30 ms at full batch
            kv_bytes_per_token=262_144,  # 64 layers x 8 KV heads x 128 x 2 (K, V) x 2 bytes
            warm_up=90.0,  # [I]
        ),
    )
}


def profile_named(name: str) -> Profile:
    """The built-in profile of that name.

    Raises:
        ValueError: there is none; the message lists them.
    """
    profile = PROFILES.get(name)
    if profile is None:
        raise ValueError(f"no profile {name!r}; there are {', '.join(PROFILES)}")
    return profile
