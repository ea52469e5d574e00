"""The prompts of a `/v1/completions` body: a string, several, token ids, or several lists of them."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.prompt.chat import UnrenderableError, read_truncation

_UINT32_MAX = 2**32 - 1


class CompletionRequest(msgspec.Struct, frozen=True):
    """What makes the prompts of a completion.

    Attributes:
        prompts: each a text or token ids; at least one.
        add_special_tokens: let the tokenizer add its own, such as BOS, to texts.
        truncate: keep this many tokens, or None.
        truncate_left: drop tokens from the left.
    """

    prompts: tuple["str | array[int]", ...]
    add_special_tokens: bool
    truncate: int | None
    truncate_left: bool


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """The prompts of a body.

    Raises:
        UnrenderableError: embeddings, a suffix, or something that the worker will refuse.
    """
    if body.get("prompt_embeds") is not None:
        raise UnrenderableError("prompt_embeds")
    if body.get("suffix") is not None:
        raise UnrenderableError("suffix")
    special = body.get("add_special_tokens", True)
    if not isinstance(special, bool):
        raise UnrenderableError("add_special_tokens: not a boolean")
    keep, left = read_truncation(body)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompts: tuple[str | array[int], ...] = (prompt,)
    elif not isinstance(prompt, list) or not prompt:
        raise UnrenderableError("prompt: neither text nor ids")
    elif isinstance(prompt[0], int):
        prompts = (_ids(prompt),)
    elif all(isinstance(item, str) for item in prompt):
        prompts = tuple(prompt)
    else:
        prompts = tuple(_ids(item) for item in prompt)
    return CompletionRequest(prompts, special, keep, left)


def _ids(values: Any) -> "array[int]":
    if not isinstance(values, list) or not values or any(type(value) is not int for value in values):
        raise UnrenderableError("prompt: not token ids")
    if min(values) < 0 or max(values) > _UINT32_MAX:
        raise UnrenderableError("prompt: ids out of range")
    return array("I", values)
