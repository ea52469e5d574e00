"""What a request's body says, checked the way vLLM checks it: its defaults, its limits, its words for what is wrong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from simulator.server.errors import ApiError, Violations, bad_request

LARGEST_N = 128

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How to generate and how to answer.

    Attributes:
        model: as named in the body; None: the first one.
        n: choices per prompt.
        max_tokens: None when the request does not say.
        min_tokens: tokens before which nothing stops it.
        stops: stop strings; `stop_ids`: stop tokens; `keep_stop`: leave the stop string in the text.
        ignore_eos: go on to the limit.
        stream: answer with server-sent events.
        include_usage: usage in a last chunk; `continuous_usage`: in every chunk.
        return_token_ids: the ids of prompt and answer beside the texts.
        cache_salt: who may share the cached prefix.
        priority: lower is earlier.
        request_id: base of the answer's id.
        echo: completions: the prompt before the answer.
        kv_hints, kv_transfer_params: as they came, see `simulator.server.hints`.
    """

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    keep_stop: bool = False
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    echo: bool = False
    kv_hints: Any = None
    kv_transfer_params: Any = None


def decode_body(raw: bytes, content_type: str) -> Body:
    """The JSON object in a request's body.

    Raises:
        ApiError: it is empty, no JSON, no object, or not called JSON.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, message, error_type="Bad Request")
    violations = Violations()
    if not raw:
        violations.add("missing", "body", "Field required", None)
        violations.raise_if_any()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as found:
        error = _json_error(raw) or found
        violation = {
            "type": "json_invalid",
            "loc": f"body.{error.pos}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": error.msg},
        }
        message = f"1 validation error:\n  {violation}"
        raise ApiError(400, message, error_type="Bad Request", param=f"body.{error.pos}") from None
    if not isinstance(body, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        violations.add("model_attributes_type", "body", text, body)
        violations.raise_if_any()
    checked: Body = body
    return checked


def _json_error(raw: bytes) -> json.JSONDecodeError | None:
    """What Python's own decoder says is wrong, as vLLM quotes it; None when it finds nothing."""
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        return error
    except UnicodeDecodeError:
        return None
    return None


def require(body: Body, violations: Violations, **kinds: type) -> None:
    """Note which of the named fields are missing or of another type."""
    for name, kind in kinds.items():
        if name not in body:
            violations.add("missing", f"body.{name}", "Field required", body)
        else:
            _check(body[name], kind, f"body.{name}", violations)


_WORDS: dict[type, tuple[str, str]] = {
    list: ("list_type", "Input should be a valid list"),
    str: ("string_type", "Input should be a valid string"),
    dict: ("dict_type", "Input should be a valid dictionary"),
}
_PARSED: dict[type, tuple[str, str]] = {
    int: ("int", "integer"),
    float: ("float", "number"),
    bool: ("bool", "boolean"),
}


def _check(value: Any, kind: type, location: str, violations: Violations) -> bool:
    """Whether `value` is of a kind, or a string or number that pydantic would take for one; notes it when not."""
    if kind in _WORDS:
        if isinstance(value, kind):
            return True
        violations.add(_WORDS[kind][0], location, _WORDS[kind][1], value)
        return False
    name, word = _PARSED[kind]
    try:
        if kind is bool:
            if isinstance(value, bool) or value in (0, 1, "true", "false"):
                return True
        elif isinstance(value, str | int | float):
            number = float(value)
            if kind is float or number.is_integer():
                return True
    except ValueError:
        pass
    if isinstance(value, str):
        verb = "interpret input" if kind is bool else f"parse string as {'an' if kind is int else 'a'} {word}"
        violations.add(f"{name}_parsing", location, f"Input should be a valid {word}, unable to {verb}", value)
    else:
        violations.add(f"{name}_type", location, f"Input should be a valid {word}", value)
    return False


_TYPES: dict[str, type] = {
    "model": str,
    "n": int,
    "max_tokens": int,
    "max_completion_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
    "stream": bool,
    "stream_options": dict,
    "stop_token_ids": list,
    "ignore_eos": bool,
    "include_stop_str_in_output": bool,
    "return_token_ids": bool,
    "echo": bool,
    "priority": int,
    "cache_salt": str,
    "request_id": str,
    "kv_transfer_params": dict,
    "tools": list,
}


def check_types(body: Body, violations: Violations) -> None:
    """Note every known field that has a value of the wrong type."""
    for name in _TYPES.keys() & body.keys():
        if body[name] is not None:
            _check(body[name], _TYPES[name], f"body.{name}", violations)


def parse(body: Body, headers: Mapping[str, str], limit: int) -> Parameters:
    """The parameters of a body whose types were checked.

    Args:
        body: the request's JSON.
        headers: the request's; X-Request-Id and X-Vllm-Priority win over the body.
        limit: the model's context in tokens.

    Raises:
        ApiError: a value is out of range.
    """
    n = int(_given(body, "n", 1))
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > LARGEST_N:
        raise bad_request(f"n must be at most {LARGEST_N}, got {n}.")
    temperature = float(_given(body, "temperature", 1))
    if temperature < 0:
        raise bad_request(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    max_tokens = _given(body, "max_completion_tokens", _given(body, "max_tokens", None))
    if max_tokens is not None:
        max_tokens = int(max_tokens)
        if max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
        if max_tokens > limit:
            message = f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
            raise bad_request(message, "max_tokens", max_tokens)
    stream = _truth(body.get("stream"))
    options = body.get("stream_options")
    if options and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    options = options or {}
    salt = body.get("cache_salt")
    if salt == "":
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    return Parameters(
        model=body.get("model"),
        n=n,
        max_tokens=max_tokens,
        min_tokens=int(_given(body, "min_tokens", 0)),
        stops=_stops(body.get("stop")),
        stop_ids=tuple(int(token) for token in body.get("stop_token_ids") or ()),
        keep_stop=_truth(body.get("include_stop_str_in_output")),
        ignore_eos=_truth(body.get("ignore_eos")),
        stream=stream,
        include_usage=_truth(options.get("include_usage")),
        continuous_usage=_truth(options.get("include_usage")) and _truth(options.get("continuous_usage_stats")),
        return_token_ids=_truth(body.get("return_token_ids")),
        cache_salt=salt,
        priority=_priority(body, headers),
        request_id=headers.get("X-Request-Id") or body.get("request_id"),
        echo=_truth(body.get("echo")),
        kv_hints=body.get("kv_hints"),
        kv_transfer_params=body.get("kv_transfer_params"),
    )


def _given(body: Body, name: str, default: Any) -> Any:
    """A field's value; `default` when it is absent or null."""
    value = body.get(name)
    return default if value is None else value


def _truth(value: Any) -> bool:
    """A boolean, or what pydantic takes for one."""
    return value in (True, "true")


def _stops(stop: Any) -> tuple[str, ...]:
    """The non-empty stop strings."""
    if isinstance(stop, str):
        stop = [stop]
    return tuple(item for item in stop or () if isinstance(item, str) and item) if isinstance(stop, list) else ()


def _priority(body: Body, headers: Mapping[str, str]) -> int:
    """The request's priority; a header that is no number is ignored, as vLLM does."""
    try:
        return int(headers.get("X-Vllm-Priority") or _given(body, "priority", 0))
    except ValueError:
        return int(_given(body, "priority", 0))
