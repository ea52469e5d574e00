"""Anything that speaks OpenAI's API: a hosted endpoint, another gateway, a server that has no driver of its own."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from backends.capability_facts import MAX_ADAPTERS, MAX_NAME, CapabilityFacts, count
from backends.kv_events import CacheFacts, EventSource
from backends.profiles.assumed import ASSUMED_GPU
from backends.token_ids import TokenQuestion, token_ids

if TYPE_CHECKING:
    from array import array


class OpenAIDriver:
    """Knows only what OpenAI's API promises. The other drivers start from it.

    There is no health path in that API, so the list of models is asked; `health.path` in the configuration names a
    better one where the worker has it.
    """

    name = "openai"
    usage_by_default = True
    credits_blocks = True
    health_path = "/v1/models"
    models_path = "/v1/models"
    assumed = ASSUMED_GPU
    runs_medusa_alone = False
    start_up = 600.0
    sources_path: str | None = None
    facts_path: str | None = None

    def is_healthy(self, status: int, body: bytes) -> bool:  # noqa: ARG002 - the Protocol's signature
        """Exactly 200: a redirect, an empty 204 or a 401 say that requests would fail as well."""
        return status == 200

    def parse_model_cards(self, payload: Any) -> list[Mapping[str, Any]]:
        """The objects in ``{"data": [...]}`` that have a non-empty string as `id`."""
        data = payload.get("data") if isinstance(payload, dict) else None
        if not isinstance(data, list):
            return []
        return [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str) and card["id"]]

    def parse_sources(self, payload: Any, host: str) -> Sequence[EventSource]:  # noqa: ARG002 - as above
        """None: OpenAI's API knows no KV events."""
        return ()

    def parse_facts(self, body: bytes) -> CacheFacts:  # noqa: ARG002 - as above
        """Nothing: OpenAI's API does not speak of caches."""
        return CacheFacts()

    def capability_facts(self, path: str, body: bytes, model: str) -> CapabilityFacts:
        """From the model cards: `max_model_len`, and as adapters those cards that name `model` as their parent."""
        return self._facts_of_cards(body, model) if path == self.models_path else CapabilityFacts()

    def _facts_of_cards(self, body: bytes, model: str) -> CapabilityFacts:
        try:
            cards = self.parse_model_cards(orjson.loads(body))
        except orjson.JSONDecodeError:
            return CapabilityFacts()
        own = next((card for card in cards if card["id"] == model), None)
        if own is None:
            return CapabilityFacts()
        adapters = (card["id"] for card in cards if card.get("parent") == model and card is not own)
        return CapabilityFacts(
            max_model_len=count(own.get("max_model_len")),
            lora_adapters=tuple(name for name in adapters if len(name) <= MAX_NAME)[:MAX_ADAPTERS],
        )

    def token_questions(self, path: str, body: Mapping[str, Any]) -> Sequence[TokenQuestion]:  # noqa: ARG002 - as above
        """None: OpenAI's API does not name token ids."""
        return ()

    def generation_question(self, path: str, body: Mapping[str, Any]) -> TokenQuestion | None:  # noqa: ARG002 - as above
        """None: as above, and a hosted endpoint asks money for what it generates."""
        return None

    def parse_tokens(self, payload: Any) -> "list[array[int]] | None":
        """Any shape that is known; see `backends.token_ids`."""
        return token_ids(payload)
