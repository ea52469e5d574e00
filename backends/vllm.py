"""vLLM's own API server, on any accelerator."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from backends.capability_facts import CapabilityFacts, count_in
from backends.kv_events import MAX_SOURCES, CacheFacts, EventSource, facts, reachable
from backends.openai import OpenAIDriver
from backends.token_ids import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, TokenQuestion, picked, texts

_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')
_CHAT_FIELDS = (
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "tools",
)
"""What `/tokenize` reads of a chat request."""
_IGNORED = ("documents", "reasoning_effort", "truncate_prompt_tokens", "chat_template")
"""What changes a prompt and `/tokenize` does not read, or (the template) may be refused in a way of its own."""
_STATEFUL = ("previous_response_id", "conversation", "prompt")
"""What makes a response depend on what the worker keeps."""
_STARTED = re.compile(rb"^process_start_time_seconds ([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)$", re.MULTILINE)

_SPECULATED = re.compile(
    rb"^vllm:spec_decode_num_(drafts|accepted_tokens)_total\{[^\n]*\} ([0-9]{1,15}(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)$",
    re.MULTILINE,
)
_READ = (b"vllm:cache_config_info{", b"vllm:spec_decode_num_", b"vllm_neuron:", b"process_start_time_seconds ")
"""How the lines of `/metrics` begin that are read."""
ENOUGH_DRAFTS = 100
"""Steps with drafts after which their mean is believed."""


class VLLMDriver(OpenAIDriver):
    """vLLM answers `/health` with an empty 200, or 503 once its engine is dead.

    The socket opens only when the model is loaded, so a starting worker refuses connections. `start_up` is three times
    vLLM's own `VLLM_ENGINE_READY_TIMEOUT_S` default (600 s): weights from a slow disk and graph capture come on top.

    `/kv_event_sources` is younger than KV events are: older ones answer 404, and their endpoint has to be configured.
    """

    name = "vllm"
    health_path = "/health"
    start_up = 1800.0
    sources_path = "/kv_event_sources"
    facts_path = "/metrics"

    def parse_sources(self, payload: Any, host: str) -> Sequence[EventSource]:
        """The answer maps data-parallel ranks to their publishers' settings, ports already shifted by rank."""
        if not isinstance(payload, dict):
            return ()
        sources = []
        for rank, each in list(payload.items())[:MAX_SOURCES]:
            if not (isinstance(each, dict) and rank.isdecimal() and len(rank) < 6):
                continue
            endpoint = reachable(each.get("endpoint"), host)
            if endpoint is None or each.get("publisher") != "zmq" or each.get("enable_kv_cache_events") is False:
                continue
            topic = each.get("topic")
            sources.append(
                EventSource(
                    endpoint=endpoint,
                    replay_endpoint=reachable(each.get("replay_endpoint"), host),
                    topic=topic if isinstance(topic, str) else "",
                    rank=int(rank),
                )
            )
        return sources

    def parse_facts(self, body: bytes) -> CacheFacts:
        """The labels of `vllm:cache_config_info`; of several ranks the smallest cache."""
        body = lines_read(body)
        rows = _cache_configs(body)
        if not rows:
            return CacheFacts()
        blocks = [count for row in rows if (count := count_in(row.get("num_gpu_blocks")))]
        started = _STARTED.search(body)
        return facts(
            self.facts_path,
            block_size=count_in(rows[0].get("block_size")),
            blocks=min(blocks) if blocks else None,
            prefix_caching=_caching(rows),
            started=float(started[1]) if started else None,
        )

    def capability_facts(self, path: str, body: bytes, model: str) -> CapabilityFacts:
        """The model cards, and of `/metrics` the cache's configuration and what speculation brought.

        `max_num_seqs` is not among them: on GPUs it has to be configured, where it matters.
        """
        return (
            self._facts_of_metrics(lines_read(body)) if path == self.facts_path else self._facts_of_cards(body, model)
        )

    def _facts_of_metrics(self, body: bytes) -> CapabilityFacts:
        rows = _cache_configs(body)
        # Hybrid models have several groups of blocks: there only vLLM's own sum is right.
        device = [count_in(row.get("kv_cache_size_tokens")) or _tokens(row, "num_gpu_blocks") for row in rows]
        host = [_tokens(row, "num_cpu_blocks") for row in rows]
        steps = _tokens_per_step(body)
        started = _STARTED.search(body)
        return CapabilityFacts(
            block_size=count_in(rows[0].get("block_size")) if rows else None,
            kv_capacity_tokens=sum(filter(None, device)) or None,
            l1_capacity_tokens=sum(filter(None, host)) or None,
            prefix_caching=_caching(rows),
            tokens_per_step=steps,
            decoder="speculative" if steps is not None else None,
            started=float(started[1]) if started else None,
        )

    def token_questions(self, path: str, body: Mapping[str, Any]) -> Sequence[TokenQuestion]:
        """`/render` since 2026 and only with ``--enable-scale-out``, and `/tokenize` on all versions.

        `/render` does what the request itself would have done. `/tokenize` does less: fields that it does not read make it
        no answer, and for gpt-oss it uses the Jinja template where requests go through harmony; parity checks see that.
        """
        if path == CHAT:
            render = TokenQuestion(f"{CHAT}/render", body)
            hides = bool(body.get("tools")) and body.get("tool_choice") == "none"  # a flag of the worker decides
            if hides or any(body.get(name) is not None for name in _IGNORED):
                return (render,)
            return (render, TokenQuestion("/tokenize", picked(body, _CHAT_FIELDS)))
        if path == COMPLETIONS:
            render = TokenQuestion(f"{COMPLETIONS}/render", body)
            prompts = texts(body)
            if prompts is None or len(prompts) != 1 or body.get("truncate_prompt_tokens") is not None:
                return (render,)
            plain = {**picked(body, ("model", "add_special_tokens")), "prompt": prompts[0]}
            return (render, TokenQuestion("/tokenize", plain))
        if path in (MESSAGES, COUNT_TOKENS):
            return (TokenQuestion(f"{MESSAGES}/render", {**body, "max_tokens": 1}),)
        if path == RESPONSES and not any(body.get(name) is not None for name in _STATEFUL):
            return (TokenQuestion(f"{RESPONSES}/render", body),)
        return ()

    def generation_question(self, path: str, body: Mapping[str, Any]) -> TokenQuestion | None:
        """With `return_token_ids`, which older versions ignore: then the answer names none."""
        if path not in (CHAT, COMPLETIONS):
            return None
        return TokenQuestion(path, {**body, "max_tokens": 1, "stream": False, "return_token_ids": True})


def lines_read(body: bytes) -> bytes:
    """The lines of `/metrics` that matter here: patterns over all 60 KiB of them would take five times as long."""
    return b"\n".join(line for line in body.splitlines() if line.startswith(_READ))


def _cache_configs(body: bytes) -> list[dict[str, str]]:
    """The labels of `vllm:cache_config_info`, one row per data-parallel rank."""
    found = _CACHE_CONFIG.findall(body)[:MAX_SOURCES]
    return [dict(_LABEL.findall(labels.decode("utf-8", "replace"))) for labels in found]


def _caching(rows: Sequence[Mapping[str, str]]) -> bool | None:
    said = {row.get("enable_prefix_caching") for row in rows}
    return True if "True" in said else False if "False" in said else None


def _tokens(row: Mapping[str, str], blocks: str) -> int | None:
    """Tokens in so many blocks of one rank's cache."""
    size, many = count_in(row.get("block_size")), count_in(row.get(blocks))
    return size * many if size and many else None


def _tokens_per_step(body: bytes) -> float | None:
    """1 + accepted draft tokens per step with drafts, over all ranks; None without enough of them."""
    sums = {b"drafts": 0.0, b"accepted_tokens": 0.0}
    for name, value in _SPECULATED.findall(body):
        sums[name] += float(value)
    drafts = sums[b"drafts"]
    return min(64.0, 1 + sums[b"accepted_tokens"] / drafts) if drafts >= ENOUGH_DRAFTS else None
