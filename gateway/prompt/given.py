"""Prompts that need no tokenizer: those that the client sends as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.prompt.chat import UnrenderableError
from gateway.prompt.completion import read_completion
from gateway.prompt.prompt import Prompt, exact
from gateway.prompt.rendering import truncated
from gateway.prompt.segments import Segment


def given_ids(body: Mapping[str, Any]) -> Prompt | None:
    """The prompts of a completion's body that holds ids; None if any of them is a text.

    Raises:
        UnrenderableError: it holds something else.
    """
    request = read_completion(body)
    segments = [
        Segment(truncated(prompt, request.truncate, left=request.truncate_left))
        for prompt in request.prompts
        if not isinstance(prompt, str)
    ]
    return together(segments) if len(segments) == len(request.prompts) else None


def together(segments: Sequence[Segment], seconds: float = 0.0, new_tokens: int = 0) -> Prompt:
    """One exact prompt of one segment each, the further ones behind the first.

    Raises:
        UnrenderableError: there is none.
    """
    if not segments:
        raise UnrenderableError("prompt: neither text nor ids")
    also = tuple(exact((segment,)) for segment in segments[1:])
    return exact(segments[:1], new_tokens=new_tokens, seconds=seconds, also=also)
