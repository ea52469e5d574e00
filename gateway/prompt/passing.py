"""Sending token ids along, so that a worker neither renders nor tokenizes: only where it was seen to use them.

vLLM honours ``kv_transfer_params.prompt_token_ids`` of a chat request since mid-2026; older ones ignore it, and it would travel for nothing. There is no version to go by, so
each worker is asked once: a request for one token whose ids differ from its messages, and whose answer names the ids that were used.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from gateway.fleet.asking import ask
from gateway.prompt.prompt import How, Prompt
from gateway.tasks import TaskGroup

if TYPE_CHECKING:
    import aiohttp

    from gateway.fleet.worker import Worker
    from gateway.prompt.parity import Parity

CHAT_PATH: Final = "/v1/chat/completions"
LONG: Final = 2048
"""Tokens from which on it pays: rendering and tokenizing less than this costs a worker about a millisecond."""
PROBE_AGAIN: Final = 30.0
"""Seconds until a worker that did not answer the question is asked again."""
_PROBE_SECONDS: Final = 10.0
_PROBE_TOKENS: Final = 8
_TEXT_WANTED: Final = frozenset(
    {
        "add_special_tokens",
        "continue_final_message",
        "documents",
        "echo",
        "return_prompt_text",
        "truncate_prompt_tokens",
    }
)
"""Members of a request with which the worker does more with its text, or with its tokens, than to read them."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What one worker answered. `since`: what `Parity` had proven then; `honours`: None as long as it is asked, or after `again` is to be."""

    since: float
    honours: bool | None = None
    again: float = float("inf")


class TokenPassing:
    """Says for each request whether its ids go along. One per fleet."""

    def __init__(self, mode: Literal["auto", "on", "off"], parity: "Parity", session: "aiohttp.ClientSession") -> None:
        """`mode` as configured: ``auto`` for long prompts to workers that are proven, ``on`` for all exact prompts of chats."""
        self._mode = mode
        self._parity = parity
        self._session = session
        self._tasks = TaskGroup("token-passing")
        self._told: dict[Worker, _Told] = {}

    def ids(self, worker: "Worker", path: str, prompt: Prompt, body: Mapping[str, Any]) -> bytes | None:
        """The prompt's ids as JSON if they are to go along with a request to `worker`, else None. `body`: the client's."""
        if self._mode == "off" or path != CHAT_PATH or prompt.how is not How.EXACT or prompt.also:
            return None
        if self._mode == "on":
            return prompt.json if _TEXT_WANTED.isdisjoint(body) else None
        if prompt.token_count < LONG or not _TEXT_WANTED.isdisjoint(body):
            return None
        since = self._parity.proven_since(worker.id)
        if since is None:
            return None
        told = self._told.get(worker)
        if told is None or told.since != since or told.again <= asyncio.get_running_loop().time():
            told = self._told[worker] = _Told(since)
            self._tasks.spawn(worker.id, self._probe(worker, prompt, told))
        return prompt.json if told.honours else None

    def keep(self, workers: "set[Worker]") -> None:
        """Forget workers that are gone."""
        for worker in self._told.keys() - workers:
            del self._told[worker]

    async def stop(self) -> None:
        """End every question."""
        await self._tasks.cancel()

    async def _probe(self, worker: "Worker", prompt: Prompt, asked: _Told) -> None:
        ids = prompt.ids[:_PROBE_TOKENS].tolist()
        body = {
            "model": worker.model,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 1,
            "return_token_ids": True,
            "kv_transfer_params": {"prompt_token_ids": ids},
        }
        answer = await ask(self._session, worker, CHAT_PATH, _PROBE_SECONDS, json=orjson.dumps(body))
        if self._told.get(worker) is not asked:  # it is gone, or was started again meanwhile
            return
        if answer.status == 200 or (400 <= answer.status < 500 and answer.status != 429):
            self._told[worker] = _Told(asked.since, answer.status == 200 and _used(answer.body) == ids)
        else:
            self._told[worker] = _Told(asked.since, again=asyncio.get_running_loop().time() + PROBE_AGAIN)


def _used(body: bytes) -> object:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return payload.get("prompt_token_ids") if isinstance(payload, dict) else None
