"""Which part of a request makes its prompt, as far as that can be said without knowing the model: for questions and their cache."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.prompt.rendering import CHAT, COMPLETIONS, INVOCATIONS

_NO_PART_OF_PROMPTS: Final = frozenset(
    {
        "best_of",
        "cache_salt",
        "echo",
        "ec_transfer_params",
        "frequency_penalty",
        "ignore_eos",
        "include_reasoning",
        "kv_transfer_params",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "metadata",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "presence_penalty",
        "priority",
        "prompt_cache_key",
        "prompt_logprobs",
        "repetition_penalty",
        "request_id",
        "return_prompt_text",
        "return_token_ids",
        "safety_identifier",
        "seed",
        "service_tier",
        "session_id",
        "skip_special_tokens",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "store",
        "stream",
        "stream_interval",
        "stream_options",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
        "vllm_xargs",
    }
)
"""Fields that change what is generated, never what it is generated from. One that is missing here costs hits of the cache, no
truth; that is why fields are left out by name and not taken by name."""

_TEXT_PARTS: Final = frozenset(
    {
        "function_call",
        "input_text",
        "output_text",
        "reasoning",
        "reasoning_text",
        "refusal",
        "summary_text",
        "text",
        "thinking",
        "tool_result",
        "tool_use",
    }
)
_MOST_DEEP: Final = 4


def resolved(path: str, body: Mapping[str, Any]) -> str:
    """The API path that a request to `/invocations` really takes."""
    if path != INVOCATIONS:
        return path
    return CHAT if "messages" in body else COMPLETIONS


def relevant(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without what can't change its prompt."""
    return {name: value for name, value in body.items() if name not in _NO_PART_OF_PROMPTS}


def only_text(body: Mapping[str, Any]) -> bool:
    """Whether all messages and inputs are texts: ids do not tell two images apart."""
    return all(_is_text(body.get(name), 0) for name in ("messages", "input", "system"))


def _is_text(value: Any, depth: int) -> bool:
    """Whether a message, a part, or a list of such holds text only."""
    if value is None or type(value) is str:
        return True
    if depth > _MOST_DEEP:
        return False
    if type(value) is list:
        return all(_is_text(each, depth + 1) for each in value)
    if type(value) is not dict:
        return False
    content = value.get("content") or value.get("output")
    if content is not None:  # a message, or the result of a tool
        return _is_text(content, depth + 1)
    kind = value.get("type")
    return "role" in value or (isinstance(kind, str) and kind in _TEXT_PARTS)
