"""The small endpoints: model cards, tokens, embeddings, and where KV events come from."""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from simulator.server import openai, service
from simulator.server.conversation import template_messages, template_tools
from simulator.server.errors import Violations, bad_request
from simulator.server.events import BUFFERED_BATCHES, HIGH_WATER_MARK
from simulator.server.metrics import cache_config
from simulator.server.parameters import Body, check_types, require

if TYPE_CHECKING:
    from simulator.server.worker import SimulatedWorker

EMBEDDING_DIMENSIONS = 32

Json = dict[str, Any]


def model_cards(worker: "SimulatedWorker") -> Json:
    """What ``GET /v1/models`` answers."""
    options = worker.options
    cards = [_card(worker, name, options.model, None) for name in options.served_names]
    cards += [_card(worker, name, name, options.served_names[0]) for name in options.lora_modules]
    return {"object": "list", "data": cards}


def _card(worker: "SimulatedWorker", name: str, root: str, parent: str | None) -> Json:
    created = int(worker.metrics.started)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": worker.profile.max_model_len if parent is None else None,
        "permission": [
            {
                "id": f"modelperm-{worker.new_id()}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def kv_event_sources(worker: "SimulatedWorker") -> Json:
    """What ``GET /kv_event_sources`` answers: one source per data-parallel rank, none without KV events."""
    publisher = worker.publisher
    if publisher is None:
        return {}
    return {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": BUFFERED_BATCHES,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": publisher.topic,
        }
    }


def server_info(worker: "SimulatedWorker") -> Json:
    """What ``GET /server_info`` answers: vLLM's three parts, with what a simulated worker has."""
    options, profile = worker.options, worker.profile
    configuration = {
        "model": options.model,
        "served_model_name": options.served_names[0],
        "max_seq_len": profile.max_model_len,
        "max_num_seqs": profile.slots,
        "enable_prefix_caching": profile.prefix_caching,
        "device_config": f"simulated {profile.name}",
        "seed": options.seed,
        **{name: value for name, value in cache_config(worker).items() if not name.startswith("_")},
    }
    text = ", ".join(f"{name}={value!r}" for name, value in configuration.items())
    return {"vllm_config": text, "vllm_env": {}, "system_env": {}}


async def tokenize(worker: "SimulatedWorker", request: web.Request, body: Body) -> web.Response:
    """The token ids of a text or of a conversation.

    Raises:
        ApiError: there is neither, or it is malformed.
    """
    del request
    violations = Violations()
    if "messages" in body:
        require(body, violations, messages=list)
    elif "prompt" in body:
        require(body, violations, prompt=str)
    else:
        require(body, violations, prompt=str, messages=list)
    check_types(body, violations)
    violations.raise_if_any()
    service.served_model(worker, body.get("model"))
    if "messages" in body:
        ids = openai.chat_prompt(worker, body, template_messages(body["messages"]), template_tools(body))
    else:
        ids = worker.tokenizer.encode(body["prompt"])
    strings = worker.tokenizer.token_strings(ids) if body.get("return_token_strs") else None
    answer = {"count": len(ids), "max_model_len": worker.profile.max_model_len, "tokens": ids, "token_strs": strings}
    return service.json_response(answer)


async def detokenize(worker: "SimulatedWorker", request: web.Request, body: Body) -> web.Response:
    """The text of token ids.

    Raises:
        ApiError: they are missing or mean nothing.
    """
    del request
    violations = Violations()
    require(body, violations, tokens=list)
    violations.raise_if_any()
    service.served_model(worker, body.get("model"))
    try:
        text = worker.tokenizer.decode(body["tokens"])
    except ValueError as error:
        raise bad_request(str(error), "tokens") from None
    return service.json_response({"prompt": text})


async def embeddings(worker: "SimulatedWorker", request: web.Request, body: Body) -> web.Response:
    """A small vector of each input, of length 1, that depends on its tokens alone.

    It costs no engine time: what it is for is that the route exists.

    Raises:
        ApiError: there is no input, or it is too long.
    """
    del request
    violations = Violations()
    if "input" not in body:
        require(body, violations, input=str)
    check_types(body, violations)
    violations.raise_if_any()
    model = service.served_model(worker, body.get("model"))
    inputs = openai.completion_prompts(worker, {"prompt": body["input"]})
    data = [{"index": index, "object": "embedding", "embedding": _vector(ids)} for index, ids in enumerate(inputs)]
    tokens = sum(map(len, inputs))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    return service.json_response(
        {
            "id": f"embd-{worker.new_id()}",
            "object": "list",
            "created": int(worker.metrics.started),
            "model": model,
            "data": data,
            "usage": usage,
        }
    )


def _vector(ids: Any) -> list[float]:
    """A unit vector from a hash."""
    digest = hashlib.shake_128(repr(list(ids)).encode()).digest(EMBEDDING_DIMENSIONS)
    values = [byte - 127.5 for byte in digest]
    length = sum(value * value for value in values) ** 0.5
    return [round(value / length, 6) for value in values]


def openapi(worker: "SimulatedWorker", routes: Iterable[str]) -> Json:
    """FastAPI's description of the server, as far as it tells what requests may carry."""
    fields: Json = {"kv_transfer_params": {"anyOf": [{"type": "object"}, {"type": "null"}]}}
    if worker.options.kv_hints:
        fields["kv_hints"] = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    request = {"type": "object", "properties": fields}
    return {
        "openapi": "3.1.0",
        "info": {"title": "FastAPI", "version": "0.1.0"},
        "paths": {path: {"post": {"responses": {"200": {"description": "Successful Response"}}}} for path in routes},
        "components": {"schemas": {"ChatCompletionRequest": request, "CompletionRequest": request}},
    }
