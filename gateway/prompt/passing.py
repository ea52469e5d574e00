"""Sending token ids along, so that a worker neither renders nor tokenizes: only where it was seen to use them.

vLLM honours ``kv_transfer_params.prompt_token_ids`` of a chat request since mid-2026; older ones ignore it, and it would travel for nothing. There is no version to go by, so
each worker is asked once: a request for one token whose ids differ from its messages, and whose answer names the ids that were used.
"""

from typing import TYPE_CHECKING, Final, Literal

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
_PROBE_SECONDS: Final = 10.0
_PROBE_TOKENS: Final = 8


class TokenPassing:
    """Says for each request whether its ids go along. One per fleet."""

    def __init__(self, mode: Literal["auto", "on", "off"], parity: "Parity", session: "aiohttp.ClientSession") -> None:
        """`mode` as configured: ``auto`` for long prompts to workers that are proven, ``on`` for all exact prompts of chats."""
        self._mode = mode
        self._parity = parity
        self._session = session
        self._tasks = TaskGroup("token-passing")
        self._honours: dict[Worker, bool | None] = {}  # None: being asked

    def ids(self, worker: "Worker", path: str, prompt: Prompt) -> bytes | None:
        """The prompt's ids as JSON if they are to go along with a request to `worker`, else None."""
        if self._mode == "off" or path != CHAT_PATH or prompt.how is not How.EXACT or prompt.also:
            return None
        if self._mode == "on":
            return prompt.json
        if prompt.token_count < LONG or not self._parity.proven(worker.id):
            return None
        if worker not in self._honours:
            self._honours[worker] = None
            self._tasks.spawn(worker.id, self._probe(worker, prompt))
        return prompt.json if self._honours[worker] else None

    def keep(self, workers: "set[Worker]") -> None:
        """Forget workers that are gone."""
        for worker in self._honours.keys() - workers:
            del self._honours[worker]

    async def stop(self) -> None:
        """End every question."""
        await self._tasks.cancel()

    async def _probe(self, worker: "Worker", prompt: Prompt) -> None:
        ids = prompt.ids[:_PROBE_TOKENS].tolist()
        body = {
            "model": worker.model,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 1,
            "return_token_ids": True,
            "kv_transfer_params": {"prompt_token_ids": ids},
        }
        answer = await ask(self._session, worker, CHAT_PATH, _PROBE_SECONDS, json=orjson.dumps(body))
        self._honours[worker] = answer.status == 200 and _used(answer.body) == ids


def _used(body: bytes) -> object:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return payload.get("prompt_token_ids") if isinstance(payload, dict) else None
