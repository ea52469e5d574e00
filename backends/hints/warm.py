"""A warm request: the prompt itself, with one token to generate. Every worker understands it, and it costs a prefill.

Whatever of the prompt the worker holds is loaded or reused, the rest is computed, and all of it is in device memory afterwards, as the
latest to be used. The caller sees to it that the worker has nothing better to do.
"""

from typing import Any, Final

import orjson

from backends.hints.base import Answer, HintCall
from backends.hints.model import Action, Hint, TierName
from backends.hints.one_way import BesideOnly

PATH: Final = "/v1/completions"


class WarmDriver(BesideOnly):
    """See the module. Says prefetches to the device, of prompts whose ids are known exactly."""

    name = "warm"

    def __init__(self, model: str, *, priority: int | None = None) -> None:
        """What the worker calls its model, and its ``priority`` for such requests (larger is later).

        The priority must be None for a worker that does not schedule by priority: vLLM refuses any other number then.
        """
        self._model = model
        self._priority = priority

    def probe(self) -> HintCall | None:
        """None: whoever takes requests takes these."""
        return None

    def speaks(self, status: int, body: bytes) -> bool:  # noqa: ARG002 - the Protocol's signature
        """True."""
        return True

    def beside(self, action: Action, source: TierName | None, target: TierName) -> bool:  # noqa: ARG002 - as above
        """Prefetches to the device, from wherever."""
        return action is Action.PREFETCH and target == "device"

    def call(self, hint: Hint) -> HintCall | None:
        """The request; None where the ids are not known."""
        subject = hint.subject
        if subject.ids is None or hint.stop < 1:
            return None
        body: dict[str, Any] = {
            "model": subject.lora or self._model,
            "prompt": subject.ids()[: hint.stop].tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
        }
        if subject.salt is not None:
            body["cache_salt"] = subject.salt
        if self._priority is not None:
            body["priority"] = self._priority
        return HintCall("POST", PATH, body, prefills=hint.stop)

    def read(self, hint: Hint, status: int, body: bytes) -> Answer:
        """Accepted with a 200, which also says how much was there already."""
        if status != 200:
            return Answer("refused", detail=f"status {status}")
        return Answer("accepted", moved_tokens=_computed(hint, body))


def _computed(hint: Hint, body: bytes) -> int | None:
    """Tokens that were not in the device's memory; None where the answer does not tell."""
    try:
        usage = orjson.loads(body)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return max(0, hint.stop - cached) if isinstance(cached, int) else None
