"""What clients themselves say about caching, in the words of the APIs that they know, read from a body for `words.ClientWords`.

================================  ==========================================================================================
``cache_control``                 Anthropic's: on tools, system blocks, messages and their content parts, or on the whole body;
                                  also on OpenAI chat messages and content parts, where LiteLLM and others put it
``prompt_cache_key``              OpenAI's: requests with the same key share a prefix
``prompt_cache_retention``        OpenAI's: ``24h`` or ``in_memory``
================================  ==========================================================================================

A breakpoint ends somewhere in a prompt whose text is the template's, not the client's. Its place is estimated by the share of the
text before it, and moved to the nearest place where the rendered prompt has a special token: there messages end.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gateway.residency.words import ClientWords

if TYPE_CHECKING:
    from gateway.prompt.prompt import Prompt

CONTROL: Final = "cache_control"
SHORT_TTL: Final = 300.0
"""Seconds of an ``ephemeral`` breakpoint without a `ttl`."""
TTLS: Final[Mapping[str, float]] = {"5m": SHORT_TTL, "1h": 3600.0}
RETENTIONS: Final[Mapping[str, float]] = {"24h": 86_400.0, "in_memory": 600.0, "in-memory": 600.0}
MAX_BREAKPOINTS: Final = 4
"""As many as Anthropic takes; of more the last count."""
MAX_KEY: Final = 256

_Marked = tuple[int, float]
"""Characters before the end of a breakpoint, and its seconds."""


def client_words(body: Mapping[str, Any], prompt: "Prompt", *, session_end: bool = False) -> ClientWords | None:
    """What the body says; None where it says nothing. Costs 0.1 us a message where there is no ``cache_control``.

    Args:
        body: parsed, of any API that has messages or a prompt.
        prompt: what it became.
        session_end: the client has said that this is the conversation's last request.
    """
    key = body.get("prompt_cache_key")
    retention = body.get("prompt_cache_retention")
    breakpoints = _breakpoints(body, prompt) if _has_control(body) else ()
    if not (breakpoints or key or retention or session_end):
        return None
    return ClientWords(
        breakpoints=breakpoints,
        key=key if isinstance(key, str) and 0 < len(key) <= MAX_KEY else None,
        retention_seconds=RETENTIONS.get(retention) if isinstance(retention, str) else None,
        session_end=session_end,
    )


def _has_control(body: Mapping[str, Any]) -> bool:
    """Whether ``cache_control`` stands anywhere that counts. Never raises, whatever the types are."""
    if CONTROL in body:
        return True
    system, tools, messages = body.get("system"), body.get("tools"), body.get("messages")
    if type(system) is list and any(type(block) is dict and CONTROL in block for block in system):
        return True
    if type(tools) is list and any(type(tool) is dict and CONTROL in tool for tool in tools):
        return True
    if type(messages) is not list:
        return False
    for message in messages:
        if type(message) is not dict:
            continue
        if CONTROL in message:
            return True
        content = message.get("content")
        if type(content) is list:
            for part in content:
                if type(part) is dict and CONTROL in part:
                    return True
    return False


def _breakpoints(body: Mapping[str, Any], prompt: "Prompt") -> tuple[tuple[int, float], ...]:
    """Where to, in tokens, and for how many seconds; rising."""
    marks: list[_Marked] = []
    size = _walk(body.get("tools"), 0, marks)
    size = _walk(body.get("system"), size, marks)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        size = _walk(content, size, marks)
        size += sum(_size(value) for name, value in message.items() if name not in {"content", "role", CONTROL})
        if (ttl := _ttl(message)) is not None:
            marks.append((size, ttl))
    if (ttl := _ttl(body)) is not None:
        marks.append((size, ttl))
    tokens = prompt.token_count
    ends = prompt.boundaries
    found: dict[int, float] = {}
    for at, ttl in marks:
        stop = tokens if at >= size else _snapped(round(at / size * tokens), ends)
        if stop:
            found[stop] = max(ttl, found.get(stop, 0.0))
    return tuple(sorted(found.items())[-MAX_BREAKPOINTS:])


def _walk(value: Any, size: int, marks: list[_Marked]) -> int:
    """Go through a text or a list of blocks that begins after `size` characters, and take down breakpoints; where it ends."""
    if not isinstance(value, list):
        return size + _size(value)
    for block in value:
        size += _size(block)
        if isinstance(block, dict) and (ttl := _ttl(block)) is not None:
            marks.append((size, ttl))
    return size


def _ttl(block: Mapping[str, Any]) -> float | None:
    """Seconds of the breakpoint that `block` carries; None: it carries none."""
    control = block.get(CONTROL)
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return None
    ttl = control.get("ttl")
    return TTLS.get(ttl, SHORT_TTL) if isinstance(ttl, str) else SHORT_TTL


def _size(value: Any, depth: int = 32) -> int:
    """Characters of all texts in `value`, down to `depth` levels; of objects, their names count as well."""
    if isinstance(value, str):
        return len(value)
    if not depth:
        return 0
    if isinstance(value, dict):
        names = sum(len(name) for name in value.keys() - _BARE)
        return names + sum(_size(each, depth - 1) for name, each in value.items() if name not in _FRAME)
    if isinstance(value, list):
        return sum(_size(each, depth - 1) for each in value)
    return 0


_FRAME: Final = frozenset({CONTROL, "type", "role"})
_BARE: Final = _FRAME | {"text", "content"}
"""Members whose names are not in the prompt; a tool's are."""


def _snapped(at: int, ends: Sequence[int]) -> int:
    """The one of `ends` that is nearest to `at`; `at` itself where the prompt is in one piece."""
    if len(ends) < 2:
        return at
    index = bisect_left(ends, at)
    near = ends[max(0, index - 1) : index + 1]
    return min(near, key=lambda end: abs(end - at))
