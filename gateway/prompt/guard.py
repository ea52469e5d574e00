"""Exact prompts only as long as they are known to be right."""

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Protocol

from gateway.prompt.approximate import pseudo_tokens
from gateway.prompt.asked_bodies import resolved
from gateway.prompt.chat import UnrenderableError
from gateway.prompt.given import given_ids
from gateway.prompt.prompt import How, Prompt, approximate
from gateway.prompt.rendering import COMPLETIONS, PATHS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.prompt.parity import Parity

APPROXIMATE: Final = 4 * 1024 * 1024
"""Bytes of a request that count when it is matched by its bytes."""


class PromptMaker(Protocol):
    """What turns bodies into prompts: `Prompter`, `OraclePrompter`, or one of them under guard."""

    def now(self, path: str, body: Any, size: int = 0) -> Prompt | None:
        """The prompt, or None if `prompt` must be awaited."""

    async def prompt(self, path: str, body: Any, size: int = 0) -> Prompt:
        """The prompt, waiting if need be."""

    @property
    def counts(self) -> "Mapping[tuple[str, str], int]":
        """Prompts so far by how they are known and why not better."""

    @property
    def stats(self) -> "Mapping[str, int]":
        """Counters of what it keeps."""

    def close(self) -> None:
        """End what it does in the background."""


class GuardedPrompter:
    """A prompter whose prompts are approximate while a worker disagrees with its tokens.

    Ids that clients send stay exact: they are what the worker gets.
    """

    __slots__ = ("_own", "_parity", "_prompter")

    def __init__(self, prompter: PromptMaker, parity: "Parity") -> None:
        self._prompter = prompter
        self._parity = parity
        self._own: Counter[tuple[str, str]] = Counter()

    def now(self, path: str, body: Any, size: int = 0) -> Prompt | None:
        """See `Prompter.now`."""
        if self._parity.trusted:
            return self._prompter.now(path, body, size)
        return self._approximate(path, body)

    async def prompt(self, path: str, body: Any, size: int = 0) -> Prompt:
        """See `Prompter.prompt`."""
        prompt = await self._prompter.prompt(path, body, size) if self._parity.trusted else None
        # It may have been distrusted while this one waited.
        return prompt if prompt is not None and self._parity.trusted else self._approximate(path, body)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Prompts so far by how they are known and why not better."""
        return self._own + Counter(self._prompter.counts)

    @property
    def stats(self) -> "Mapping[str, int]":
        """Those of the prompter."""
        return self._prompter.stats

    def close(self) -> None:
        """Close the prompter."""
        self._prompter.close()

    def _approximate(self, path: str, body: Any) -> Prompt:
        if path not in PATHS or not isinstance(body, dict):
            return Prompt(How.NONE, reason="no prompt")
        prompt = None
        with contextlib.suppress(UnrenderableError):
            prompt = given_ids(body) if resolved(path, body) == COMPLETIONS else None
        if prompt is None:
            prompt = approximate(pseudo_tokens(body, APPROXIMATE), "tokenizer mismatch")
        self._own[prompt.how.value, prompt.reason] += 1
        return prompt
