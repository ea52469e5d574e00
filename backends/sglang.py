"""SGLang's server."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from backends.capability_facts import CapabilityFacts, count
from backends.kv_events import MAX_SOURCES, CacheFacts, EventSource, facts, reachable, tcp
from backends.openai import OpenAIDriver
from backends.token_ids import COMPLETIONS, TokenQuestion, picked, texts

_ROLES: Mapping[str, Literal["both", "prefill", "decode"]] = {"null": "both", "prefill": "prefill", "decode": "decode"}
"""What SGLang calls the part of a worker."""


class SGLangDriver(OpenAIDriver):
    """SGLang answers `/health` with 200 when it serves, 503 while it starts or shuts down.

    `/health_generate` would run a token through the engine at each check: on a busy worker it queues behind real
    prefills and times out, so it is not asked.

    Since May 2026 `/server_info` has a `kv_events` block, null when none are published. It names no replay socket.
    """

    name = "sglang"
    usage_by_default = False
    health_path = "/health"
    start_up = 1800.0
    sources_path = "/server_info"
    facts_path = "/server_info"

    def parse_sources(self, payload: Any, host: str) -> Sequence[EventSource]:
        """One socket per data-parallel rank, on consecutive ports."""
        block = payload.get("kv_events") if isinstance(payload, dict) else None
        if not isinstance(block, dict) or block.get("publisher") != "zmq":
            return ()
        port, bound, ranks, topic = (
            block.get("endpoint_port_base"),
            block.get("endpoint_host"),
            block.get("dp_size"),
            block.get("topic"),
        )
        if type(port) is not int or not 0 < port < 65536:
            return ()
        many = min(ranks, MAX_SOURCES, 65536 - port) if type(ranks) is int and ranks > 0 else 1
        address = bound.strip("[]") if isinstance(bound, str) else "*"
        endpoints = [reachable(tcp(address, port + rank), host) for rank in range(many)]
        return [
            EventSource(
                endpoint=endpoint,
                topic=topic if isinstance(topic, str) else "",
                rank=rank,
                block_size=count(block.get("block_size")),
            )
            for rank, endpoint in enumerate(endpoints)
            if endpoint is not None
        ]

    def parse_facts(self, body: bytes) -> CacheFacts:
        """From the server's arguments and what its scheduler found: `page_size`, `max_total_num_tokens`."""
        payload = _mapping(body)
        block_size, tokens = count(payload.get("page_size")), count(payload.get("max_total_num_tokens"))
        return facts(
            self.facts_path,
            block_size=block_size,
            blocks=tokens // block_size if tokens and block_size else None,
            prefix_caching=_caching(payload),
        )

    def capability_facts(self, path: str, body: bytes, model: str) -> CapabilityFacts:
        """The model cards, and the server's arguments with what its scheduler found.

        Without chunked prefill a whole prompt is one batch, and decodes wait for it.
        """
        if path != self.facts_path:
            return self._facts_of_cards(body, model)
        payload = _mapping(body)
        states = payload.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        chunk = payload.get("chunked_prefill_size")
        accepted = state.get("avg_spec_accept_length")
        steps = float(accepted) if isinstance(accepted, int | float) and 1 <= accepted <= 64 else None
        return CapabilityFacts(
            block_size=count(payload.get("page_size")),
            kv_capacity_tokens=count(payload.get("max_total_num_tokens")),
            max_model_len=count(payload.get("context_length")),
            slots=count(payload.get("max_running_requests"))
            or count(state.get("effective_max_running_requests_per_dp")),
            prefill=("chunked" if chunk > 0 else "exclusive") if type(chunk) is int else None,
            max_num_batched_tokens=count(chunk),
            prefix_caching=_caching(payload),
            tokens_per_step=steps,
            decoder="speculative" if payload.get("speculative_algorithm") else None,
            role=_ROLES.get(str(payload.get("disaggregation_mode"))),
        )

    def token_questions(self, path: str, body: Mapping[str, Any]) -> Sequence[TokenQuestion]:
        """`/v1/tokenize` takes texts, one or several; of chats SGLang tells nothing."""
        if path != COMPLETIONS or texts(body) is None or body.get("add_special_tokens") is not None:
            return ()
        return (TokenQuestion("/v1/tokenize", picked(body, ("model", "prompt"))),)


def _mapping(body: bytes) -> dict[str, Any]:
    """The answer's JSON object; empty when it is none."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return payload if isinstance(payload, dict) else {}


def _caching(payload: Mapping[str, Any]) -> bool | None:
    disabled = payload.get("disable_radix_cache")
    return not disabled if isinstance(disabled, bool) else None
