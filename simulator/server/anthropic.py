"""``/v1/messages`` as vLLM answers it: a chat request in other clothes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from simulator.server import openai, service
from simulator.server.conversation import template_messages, template_tools, text_of
from simulator.server.errors import Violations, bad_request
from simulator.server.parameters import Body, check_types, require
from simulator.server.pump import Choice
from simulator.server.service import Job
from simulator.server.stream import EventStream, StreamBrokenError

if TYPE_CHECKING:
    from simulator.server.worker import SimulatedWorker

Json = dict[str, Any]

_COPIED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt", "kv_transfer_params")


def as_chat(body: Body) -> Body:
    """The chat request that vLLM makes of a messages request.

    Raises:
        ApiError: a message or a tool is malformed.
    """
    chat: Body = {name: body[name] for name in _COPIED if name in body}
    chat["stop"] = body.get("stop_sequences")
    chat["chat_template_kwargs"] = body.get("chat_template_kwargs")
    messages: list[Json] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _joined(body["system"])})
    for message in body["messages"]:
        if not isinstance(message, dict):
            raise bad_request("Each message must be an object with a role.", "messages")
        messages.extend(_messages(message))
    chat["messages"] = messages
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
        choice = body.get("tool_choice") or {}
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "any":
            chat["tool_choice"] = "required"
        elif kind == "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    return chat


def _joined(content: Any) -> str:
    """A system prompt: a text, or the texts of its blocks run together."""
    return content if isinstance(content, str) else "".join(text_of([part]) for part in content or ())


def _messages(message: Json) -> list[Json]:
    """The chat messages of one message: results of tools each become one of their own, before what else it says."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    results: list[Json] = []
    parts: list[Json] = []
    calls: list[Json] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": block.get("text", "")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input") or {}).decode()}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text_of(block.get("content"))}
            )
    if parts or calls or not results:
        results.append({"role": message.get("role"), "content": parts, "tool_calls": calls})
    return results


def _tool(tool: Any) -> Json:
    """A tool in OpenAI's shape."""
    if not isinstance(tool, dict):
        raise bad_request("Each tool must be an object.", "tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _checked(body: Body, **required: type) -> Body:
    """The chat request of a body whose fields were checked.

    Raises:
        ApiError: a field is missing or of the wrong type.
    """
    violations = Violations()
    require(body, violations, messages=list, **required)
    check_types({name: value for name, value in body.items() if name not in required}, violations)
    violations.raise_if_any()
    return as_chat(body)


def start(worker: "SimulatedWorker", body: Body, headers: Mapping[str, str]) -> Job:
    """Check a messages request and start it.

    Raises:
        ApiError: it can't be answered.
    """
    return openai.chat_job(worker, _checked(body, max_tokens=int), headers)


async def messages(worker: "SimulatedWorker", request: web.Request, body: Body) -> web.StreamResponse:
    """Answer a messages request.

    Raises:
        ApiError: it can't be answered.
    """
    job = start(worker, body, request.headers)
    if job.parameters.stream:
        return await _stream(worker, request, job)
    await service.complete(worker, job)
    choice = job.generation.choices[0]
    reason, sequence = _stop_reason(choice)
    answer: Json = {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "content": _content(worker, choice),
        "model": job.model,
        "stop_reason": reason,
        **({"stop_sequence": sequence} if sequence is not None else {}),
        "usage": _usage(worker, choice),
    }
    return service.json_response(answer)


def _content(worker: "SimulatedWorker", choice: Choice) -> list[Json]:
    """The blocks of a finished answer."""
    answer = choice.answer
    if answer.call is None or answer.finish_reason != "stop":
        return [{"type": "text", "text": answer.text()}]
    call_id = openai.TOOL_CALL_ID + worker.new_id()
    arguments = orjson.loads(answer.call.arguments)
    return [{"type": "tool_use", "id": call_id, "name": answer.call.name, "input": arguments}]


def _stop_reason(choice: Choice) -> tuple[str, str | None]:
    """Anthropic's stop reason, and the stop sequence if one was met."""
    answer = choice.answer
    if answer.finish_reason == "length":
        return "max_tokens", None
    if answer.call is not None:
        return "tool_use", None
    if isinstance(answer.stop_reason, str):
        return "stop_sequence", answer.stop_reason
    return "end_turn", None


def _usage(worker: "SimulatedWorker", choice: Choice) -> Json:
    """Anthropic's usage: what was read from the cache or newly put there is no part of `input_tokens`."""
    prompt = len(choice.prompt_ids)
    if not worker.options.prompt_tokens_details:
        return {"input_tokens": prompt, "output_tokens": choice.produced}
    created = service.created_tokens(worker, choice)
    return {
        "input_tokens": max(0, prompt - choice.cached - created),
        "output_tokens": choice.produced,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": choice.cached,
    }


def _event(name: str, **fields: Any) -> bytes:
    """One event with its name in both places."""
    return b"event: %s\ndata: " % name.encode() + orjson.dumps({"type": name, **fields}) + b"\n\n"


class _Blocks:
    """The one content block of a streamed answer, text or tool use, opened once it is known which."""

    def __init__(self, worker: "SimulatedWorker", choice: Choice) -> None:
        self._worker = worker
        self._choice = choice
        self.open = False

    def tokens(self, index: int, count: int) -> bytes:
        """The events for `count` tokens from `index`; empty while a tool call's name is incomplete."""
        answer = self._choice.answer
        if answer.call is None:
            text = "".join(answer.pieces[index : index + count])
            head = self._open({"type": "text", "text": ""})
            delta = {"type": "text_delta", "text": text}
            return head + (_event("content_block_delta", delta=delta, index=0) if text else b"")
        begin, end = len(answer.text(index)), len(answer.text(index + count))
        first = len(answer.call.head)
        if end < first:
            return b""
        call_id = openai.TOOL_CALL_ID + self._worker.new_id() if not self.open else ""
        head = self._open({"type": "tool_use", "id": call_id, "name": answer.call.name, "input": {}})
        part = (
            answer.call.arguments[max(0, begin - first) : end - first]
            if begin - first < len(answer.call.arguments)
            else ""
        )
        delta = {"type": "input_json_delta", "partial_json": part}
        return head + (_event("content_block_delta", delta=delta, index=0) if part else b"")

    def _open(self, block: Json) -> bytes:
        if self.open:
            return b""
        self.open = True
        return _event("content_block_start", content_block=block, index=0)


async def _stream(worker: "SimulatedWorker", request: web.Request, job: Job) -> web.StreamResponse:
    """Write the events as they come."""
    stream = EventStream(request, worker.faults, worker.answer_headers(request))
    generation, choice = job.generation, job.generation.choices[0]
    blocks = _Blocks(worker, choice)
    begun = False
    try:
        await stream.start()
        while True:
            await generation.wait()
            news = generation.take()
            if news and not begun:
                begun = True
                await stream.send(_event("message_start", message=_opening(job, choice)))
            if news:
                await stream.send_tokens([blocks.tokens(index, count) for _, index, count in news])
            elif not generation.open:
                break
        if choice.finished == "error":
            error = {"type": "InternalServerError", "message": service.engine_failure().message}
            await stream.end(_event("error", error=error))
            return stream.response
        reason, sequence = _stop_reason(choice)
        closing = [_event("content_block_stop", index=0)] if blocks.open else []
        closing.append(
            _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=_usage(worker, choice),
            )
        )
        await stream.end(*closing, _event("message_stop"))
    except StreamBrokenError:
        pass
    finally:
        worker.abort(generation)
    return stream.response


def _opening(job: Job, choice: Choice) -> Json:
    """The message as it is announced, before any content."""
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": job.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(choice.prompt_ids), "output_tokens": 0},
    }


async def count_tokens(worker: "SimulatedWorker", request: web.Request, body: Body) -> web.Response:
    """Answer how many tokens a messages request would have.

    Raises:
        ApiError: it is malformed.
    """
    del request
    chat = _checked(body)
    service.served_model(worker, chat.get("model"))
    tools = template_tools(chat)
    ids = openai.chat_prompt(worker, chat, template_messages(chat["messages"]), tools)
    return service.json_response({"input_tokens": len(ids), "context_management": {"original_input_tokens": len(ids)}})
