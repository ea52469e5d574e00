"""From a parsed request body to its `Prompt`: the exact tokens that the worker will prefill, or the best guess at them."""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.prompt.segments import Segment, joined

if TYPE_CHECKING:
    from array import array


class How(enum.Enum):
    """How a prompt's tokens are known."""

    EXACT = "exact"
    """They are the ones that the worker will make of the request."""
    APPROXIMATE = "approximate"
    """Pseudo-tokens from the request's bytes: good for matching requests with each other, with nothing else."""
    NONE = "none"
    """This path or body has no prompt that could be matched."""


class Prompt(msgspec.Struct, frozen=True):
    """The tokens of one prompt.

    Attributes:
        how: whether they are the worker's own.
        segments: the ids, in runs that other prompts share; chain state may be kept at each boundary.
        token_count: all of them together.
        reason: why `how` is not `EXACT`: a short fixed phrase; empty if it is.
        new_tokens: those that had to be encoded because no earlier request had brought them.
        seconds: from the body to the ids, waiting included.
        off_loop: part of the work was done in a thread.
        also: the further prompts of a `/v1/completions` body with several.
    """

    how: How
    segments: tuple[Segment, ...] = ()
    token_count: int = 0
    reason: str = ""
    new_tokens: int = 0
    seconds: float = 0.0
    off_loop: bool = False
    also: "tuple[Prompt, ...]" = ()

    @property
    def ids(self) -> "array[int]":
        """All ids (uint32) in one new array."""
        return joined(self.segments)

    @property
    def boundaries(self) -> list[int]:
        """Where each segment ends, in tokens from the start; the last one is `token_count`."""
        ends: list[int] = []
        end = 0
        for segment in self.segments:
            end += len(segment)
            ends.append(end)
        return ends

    @property
    def json(self) -> bytes:
        """The ids as a JSON list, put together from the segments' own texts."""
        return b"[" + b",".join(segment.json for segment in self.segments if len(segment)) + b"]"


def exact(
    segments: Sequence[Segment],
    *,
    new_tokens: int = 0,
    seconds: float = 0.0,
    off_loop: bool = False,
    also: tuple[Prompt, ...] = (),
) -> Prompt:
    """A prompt whose ids are known."""
    count = sum([len(segment.ids) for segment in segments])
    return Prompt(How.EXACT, tuple(segments), count, "", new_tokens, seconds, off_loop, also)


def approximate(tokens: "array[int]", reason: str, seconds: float = 0.0) -> Prompt:
    """A prompt of pseudo-tokens (`gateway.prompt.approximate`); without any it is none at all."""
    if not tokens:
        return Prompt(How.NONE, reason=reason, seconds=seconds)
    return Prompt(How.APPROXIMATE, (Segment(tokens),), len(tokens), reason=reason, seconds=seconds)
