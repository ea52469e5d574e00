"""SGLang's server."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from backends.kv_events import MAX_SOURCES, CacheFacts, EventSource, facts, reachable, tcp
from backends.openai import OpenAIDriver
from backends.token_ids import COMPLETIONS, TokenQuestion, picked, texts


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
        count = min(ranks, MAX_SOURCES, 65536 - port) if type(ranks) is int and ranks > 0 else 1
        address = bound.strip("[]") if isinstance(bound, str) else "*"
        endpoints = [reachable(tcp(address, port + rank), host) for rank in range(count)]
        return [
            EventSource(
                endpoint=endpoint,
                topic=topic if isinstance(topic, str) else "",
                rank=rank,
                block_size=_count(block.get("block_size")),
            )
            for rank, endpoint in enumerate(endpoints)
            if endpoint is not None
        ]

    def parse_facts(self, body: bytes) -> CacheFacts:
        """From the server's arguments and what its scheduler found: `page_size`, `max_total_num_tokens`."""
        try:
            payload = orjson.loads(body)
        except orjson.JSONDecodeError:
            return CacheFacts()
        if not isinstance(payload, dict):
            return CacheFacts()
        block_size, tokens = _count(payload.get("page_size")), _count(payload.get("max_total_num_tokens"))
        disabled = payload.get("disable_radix_cache")
        return facts(
            self.facts_path,
            block_size=block_size,
            blocks=tokens // block_size if tokens and block_size else None,
            prefix_caching=not disabled if isinstance(disabled, bool) else None,
        )

    def token_questions(self, path: str, body: Mapping[str, Any]) -> Sequence[TokenQuestion]:
        """`/v1/tokenize` takes texts, one or several; of chats SGLang tells nothing."""
        if path != COMPLETIONS or texts(body) is None or body.get("add_special_tokens") is not None:
            return ()
        return (TokenQuestion("/v1/tokenize", picked(body, ("model", "prompt"))),)


def _count(value: Any) -> int | None:
    """A positive whole number, or None."""
    return value if type(value) is int and value > 0 else None
