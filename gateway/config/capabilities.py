"""What is wrong with the `capabilities` of a worker beyond the types: unknown profiles, and values that contradict each other.

Values are compared with those of the named profile where the section itself says nothing; what a worker tells later is
compared by `gateway.fleet.capabilities`, which has nobody to complain to.
"""

from collections.abc import Collection, Iterator
from typing import Any, TypeGuard

from backends.profiles import PROFILES
from gateway.config.problems import Where, choices, clip, did_you_mean


def contradictions(section: dict[str, Any], driver: Any, profiles: Collection[str]) -> Iterator[tuple[Where, str]]:
    """Each problem: where in the section, and a sentence with a remedy.

    Args:
        section: plain data; fields of the wrong type are passed over, they have been complained about.
        driver: the worker's, as written.
        profiles: names that exist.
    """
    profile = section.get("profile")
    if isinstance(profile, str) and profile not in profiles:
        yield (
            ("profile",),
            (
                f'no profile is called "{clip(profile)}"{did_you_mean(profile, profiles) or "."} '
                f"Known profiles: {choices(profiles)}"
            ),
        )
    for key in ("prefill_buckets", "decode_context_buckets"):
        yield from _disorder(section, key)
    yield from _sizes(section)
    yield from _batch(section, driver)


def _disorder(section: dict[str, Any], key: str) -> Iterator[tuple[Where, str]]:
    buckets = section.get(key)
    if not isinstance(buckets, list):
        return
    for index, bucket in enumerate(buckets):
        before = buckets[index - 1] if index else 0
        if _is_count(bucket) and _is_count(before) and bucket <= before:
            yield (
                (key, index),
                f"expected more than {before}, got {bucket}: buckets are token counts in rising order",
            )


def _sizes(section: dict[str, Any]) -> Iterator[tuple[Where, str]]:
    """Sizes in tokens that do not go together."""
    block, block_from = _value(section, "block_size")
    segment = section.get("segment_size")
    if _is_count(segment) and block and segment % block:
        yield (
            ("segment_size",),
            (
                f"segments of {segment} tokens are no multiple of the block of {block}{block_from}; "
                f"write the worker's kv_segment_size_buckets, such as {max(1, segment // block) * block}"
            ),
        )
    longest, longest_from = _value(section, "max_model_len")
    capacity, capacity_from = _value(section, "kv_capacity_tokens")
    given = _is_count(section.get("max_model_len")) or _is_count(section.get("kv_capacity_tokens"))
    if given and longest and capacity and capacity < longest:
        place = "kv_capacity_tokens" if _is_count(section.get("kv_capacity_tokens")) else "max_model_len"
        yield (
            (place,),
            (
                f"a request of max_model_len ({longest} tokens{longest_from}) does not fit into the KV cache "
                f"({capacity} tokens{capacity_from}); lower `max_model_len`, or correct `kv_capacity_tokens`: "
                "blocks x block size"
            ),
        )
    contexts = section.get("decode_context_buckets")
    if isinstance(contexts, list) and contexts and _is_count(contexts[-1]) and longest and contexts[-1] > longest:
        yield (
            ("decode_context_buckets", len(contexts) - 1),
            (
                f"no context is longer than max_model_len ({longest} tokens{longest_from}); "
                "remove the bucket, or correct `max_model_len`"
            ),
        )


def _batch(section: dict[str, Any], driver: Any) -> Iterator[tuple[Where, str]]:
    """What cannot be of a running batch."""
    slots, decoder, prefill = (section.get(key) for key in ("slots", "decoder", "prefill"))
    if decoder == "medusa" and driver == "neuron" and _is_count(slots) and slots > 1:
        yield (
            ("slots",),
            f"Medusa on Neuron runs one request at a time, not {slots}; remove `slots`, or write the decoder that it has",
        )
    steps = section.get("tokens_per_step")
    if decoder == "plain" and isinstance(steps, int | float) and steps > 1:
        yield (
            ("tokens_per_step",),
            f"a plain decoder gives 1 token a step, not {steps:g}; write `decoder: speculative` or `decoder: medusa`",
        )
    budget = section.get("max_num_batched_tokens")
    if _is_count(budget) and prefill == "exclusive":
        yield (
            ("max_num_batched_tokens",),
            "a step's budget means nothing where prefill is exclusive; remove it, or write `prefill: chunked`",
        )
    elif _is_count(budget) and _is_count(slots) and budget <= slots:
        yield (
            ("max_num_batched_tokens",),
            (
                f"expected more than the {slots} slots, got {budget}: each running request takes one token of a step, "
                "and prompts need the rest"
            ),
        )


def _value(section: dict[str, Any], key: str) -> tuple[int | None, str]:
    """A size from the section, else from its profile, and in words where it is from if not from here."""
    value = section.get(key)
    if value is not None:
        return (value, "") if _is_count(value) else (None, "")
    name = section.get("profile")
    profile = PROFILES.get(name) if isinstance(name, str) else None
    if profile is None:
        return None, ""
    size: int = profile.kv_blocks * profile.block_size if key == "kv_capacity_tokens" else getattr(profile, key)
    return size, f", from the profile {name}"


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0
