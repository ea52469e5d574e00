"""What identifies a session, and what a prompt begins with, taken from a request as it came.

Bodies are parsed but not validated: every value may be of any JSON type, and what does not fit counts as absent.
"""

from collections.abc import Sequence
from typing import Any, Final

from policies.base import RouteRequest

SESSION_HEADER: Final = "x-session-id"
SESSION_COOKIE: Final = "session_id"
SESSION_FIELDS: Final = ("session_id", "prompt_cache_key", "user")
"""In this order: vLLM's and production-stack's extra field, OpenAI's hint for its own prompt cache, OpenAI's end user."""


def encode(text: str) -> bytes:
    """UTF-8; JSON may carry lone surrogates, which are kept."""
    return text.encode("utf-8", "surrogatepass")


def session_key(
    request: RouteRequest, header: str | None, body_fields: Sequence[tuple[str, ...]], cookie: str | None
) -> bytes | None:
    """The request's session: the first of header, body fields (each a path of keys) and cookie that is not empty."""
    if header is not None and (value := request.headers.get(header)):
        return encode(value)
    for path in body_fields:
        found: Any = request.body
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if found and isinstance(found, str):
            return encode(found)
        if isinstance(found, int) and not isinstance(found, bool):
            return encode(str(found))
    if cookie is not None and (cookies := request.headers.get("cookie")):
        for pair in cookies.split(";"):
            name, _, value = pair.partition("=")
            if name.strip() == cookie and (value := value.strip().strip('"')):
                return encode(value)
    return None


def prefix_key(request: RouteRequest, length: int) -> bytes | None:
    """What the prompt begins with, or None when there is no text: tokens, audio, nothing.

    Of a conversation: `length` characters of its system prompt and as many of its first user message, neither of which
    changes from turn to turn. Of a plain prompt or an input: its first `length` characters (tokens, if it comes as ids).
    """
    body = request.body
    messages = body.get("messages")
    if isinstance(messages, list):
        return _conversation(body.get("system"), messages, length)
    source = body.get("input")
    if isinstance(source, list) and source and isinstance(source[0], dict):
        return _conversation(body.get("instructions"), source, length)
    for name in ("prompt", "input", "query", "text_1", "text"):
        key = _plain(body.get(name), length)
        if key is not None:
            return (
                encode(instructions[:length]) + b"\0" + key
                if (instructions := _text(body.get("instructions"), length))
                else key
            )
    return None


def _conversation(system: Any, messages: list[Any], length: int) -> bytes | None:
    """The key of a list of messages; `system` is the system prompt where the API has a field of its own for it."""
    head = _text(system, length)
    first = ""
    for message in messages:
        if not isinstance(message, dict):
            continue
        if message.get("role") in ("system", "developer"):  # a tuple, for a role may be unhashable
            head = (head + _text(message.get("content"), length))[:length]
        elif text := _text(message.get("content"), length):
            first = text
            break
    return encode(f"{head}\0{first}") if head or first else None


def _text(content: Any, length: int) -> str:
    """The first `length` characters of a message's text: a string, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content[:length]
    text = ""
    if isinstance(content, list):
        for part in content:
            piece = part.get("text") if isinstance(part, dict) else part
            if isinstance(piece, str):
                text += piece[:length]
                if len(text) >= length:
                    break
    return text[:length]


def _plain(value: Any, length: int) -> bytes | None:
    """The key of a prompt: text, token ids, or a list of either, whose first one counts."""
    while isinstance(value, list) and value and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return encode(value[:length])
    if isinstance(value, list) and value and isinstance(value[0], int):
        return repr(value[:length]).encode()
    return None


def wanted_tokens(request: RouteRequest) -> int:
    """How many tokens of an answer the request wants room for: the largest limit that its body names; 0 when none."""
    body = request.body
    most = 0
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            most = value
    return most


def adapter_of(request: RouteRequest) -> str:
    """The LoRA adapter that the body's `model` may name: empty when that is the fleet's own name or no text."""
    model = request.body.get("model")
    return model if isinstance(model, str) and model != request.model else ""
