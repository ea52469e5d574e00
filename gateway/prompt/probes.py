"""Small requests whose ids are compared with a worker's, each for one thing in which tokenizers and templates differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.prompt.rendering import CHAT, COMPLETIONS


@dataclass(frozen=True, slots=True)
class Probe:
    """One request.

    Attributes:
        name: for people.
        path, body: of the request, without a model.
    """

    name: str
    path: str
    body: Mapping[str, Any]


_UNICODE: Final = (
    "na\u00efve cafe\u0301, \u6771\u4eac\u90fd\u3067 12345.678 \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u00a0x\u2028y\tz\r\n\n\n    deep  indent \u200b. "
    "I'll we'VE __init__(self) <|im_start|> </s> [INST] <think>"
)
_SEARCH: Final = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find pages, \u201cbest\u201d first.",
        "parameters": {
            "type": "object",
            "required": ["query"],
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "default": 5}},
        },
    },
}


def _chat(name: str, *messages: Mapping[str, Any], **fields: Any) -> Probe:
    return Probe(name, CHAT, {"messages": list(messages), **fields})


def _say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": arguments}}


def probes() -> list[Probe]:
    """All of them; together some 700 tokens. Templates refuse some (a system message, tools): those prove nothing there."""
    return [
        _chat("user", _say("user", "Hello there.")),
        _chat("system", _say("system", "Be brief.\n"), _say("user", " What is 17 \u00d7 23? ")),
        _chat("unicode", _say("user", _UNICODE)),
        _chat(
            "turns",
            _say("system", "You help."),
            _say("user", "First question"),
            _say("assistant", "First answer.\n"),
            _say("user", "And the second?"),
        ),
        _chat(
            "tools",
            _say("user", "Search for owls."),
            _say("assistant", None, tool_calls=[_call('{"query": "owls \u00e9", "limit": 3}')]),
            _say("tool", '{"pages": ["a", "b"]}', tool_call_id="call_1"),
            _say("user", "Thanks. More?"),
            tools=[_SEARCH],
        ),
        _chat("parts", _say("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])),
        _chat(
            "reasoning",
            _say("user", "Think."),
            _say("assistant", "Done.", reasoning_content="First this, then that."),
            _say("user", "Again."),
        ),
        _chat(
            "continued",
            _say("user", "Count."),
            _say("assistant", "One, two,"),
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        Probe("text", COMPLETIONS, {"prompt": f"Once upon a time {_UNICODE}"}),
    ]


GENERATED: Final = "turns"
"""The probe that is also sent as a request of one token: the only proof of what the worker does to real requests."""
