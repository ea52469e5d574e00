"""Questions to workers about token ids: what a request's prompt becomes when the worker itself templates and tokenizes it."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
RESPONSES: Final = "/v1/responses"


@dataclass(frozen=True, slots=True)
class TokenQuestion:
    """What to POST to learn a prompt's ids.

    Attributes:
        path: of the worker.
        body: to be sent as JSON.
    """

    path: str
    body: Mapping[str, Any]


def token_ids(payload: Any) -> "list[array[int]] | None":
    """The ids of each prompt (uint32) in an answer, whichever shape it has; None when it names none.

    The shapes are those of `/tokenize` (``tokens``, a list of ids or of lists), of `/render` (``token_ids``, one object or a
    list of them), and of generated answers to which ``return_token_ids`` was asked (``prompt_token_ids``, in the answer or in
    its choices). Prompts with images and the like have `features` beside the ids, and the ids alone do not tell them
    apart: those count as none.
    """
    try:
        lists = _lists(payload)
        return [array("I", ids) for ids in lists] if lists else None
    except (TypeError, ValueError, OverflowError, KeyError):
        return None


def _lists(payload: Any) -> list[Any]:
    """The lists of ids in an answer.

    Raises:
        TypeError: it is shaped otherwise.
        KeyError: as above.
    """
    if isinstance(payload, list):
        return [ids for each in payload for ids in _lists(each)]
    if not isinstance(payload, dict):
        raise TypeError
    if "tokens" in payload:
        tokens = payload["tokens"]
        return tokens if tokens and isinstance(tokens[0], list) else [tokens]
    if "token_ids" in payload:
        return [] if payload.get("features") else [payload["token_ids"]]
    if payload.get("prompt_token_ids") is not None:
        return [payload["prompt_token_ids"]]
    choices = sorted(payload["choices"], key=lambda choice: int(choice["index"]))
    return [choice["prompt_token_ids"] for choice in choices]


def picked(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of `body` with these names that are there and not null."""
    return {name: body[name] for name in names if body.get(name) is not None}


def texts(body: Mapping[str, Any]) -> Sequence[str] | None:
    """The prompts of a completion when all are texts; None otherwise."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) for each in prompt):
        return prompt
    return None
