"""``/v1/chat/completions`` and ``/v1/completions``, field by field as vLLM 0.32 answers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from simulator.server import service
from simulator.server.conversation import chosen_function, template_messages, template_tools
from simulator.server.errors import Violations, bad_request
from simulator.server.parameters import Body, Parameters, check_types, parse, require
from simulator.server.pump import Choice
from simulator.server.service import Job
from simulator.server.stream import DONE, EventStream, StreamBrokenError
from simulator.server.writing import FunctionCall, arguments_for
from simulator.tokenizer import TemplateError

if TYPE_CHECKING:
    from simulator.server.worker import SimulatedWorker

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say."""
TOOL_CALL_ID = "chatcmpl-tool-"

Json = dict[str, Any]


def chat_job(worker: "SimulatedWorker", body: Body, headers: Mapping[str, str]) -> Job:
    """Check a chat request and start it.

    Raises:
        ApiError: it can't be answered.
    """
    violations = Violations()
    require(body, violations, messages=list)
    check_types(body, violations)
    violations.raise_if_any()
    model = service.served_model(worker, body.get("model"))
    parameters = parse(body, headers, worker.profile.max_model_len)
    tools = template_tools(body)
    function = chosen_function(body, tools)
    messages = template_messages(body["messages"])
    given = service.prompt_from_transfer(body)
    ids = given if given is not None else chat_prompt(worker, body, messages, tools)
    service.check_prompt(worker, ids, is_text=given is None)
    call = None
    if function is not None:
        call = FunctionCall(function["name"], arguments_for(function.get("parameters"), len(ids)))
    answers = service.answers_for(worker, ids, parameters, call=call)
    return service.begin(worker, "chatcmpl", model, parameters, [ids], [answers])


def chat_prompt(worker: "SimulatedWorker", body: Body, messages: list[Json], tools: list[Json] | None) -> list[int]:
    """The token ids of a conversation.

    Raises:
        ApiError: the chat template refuses it.
    """
    add, go_on = body.get("add_generation_prompt", True), body.get("continue_final_message", False)
    if add is True and go_on is True and "add_generation_prompt" in body:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    try:
        text = worker.tokenizer.render(
            messages,
            tools,
            add_generation_prompt=bool(add),
            continue_final_message=bool(go_on),
            extra=body.get("chat_template_kwargs") or {},
        )
    except TemplateError as error:
        raise bad_request(str(error)) from None
    return worker.tokenizer.encode(text)


async def chat(worker: "SimulatedWorker", request: web.Request, body: Body) -> web.StreamResponse:
    """Answer a chat request.

    Raises:
        ApiError: it can't be answered.
    """
    load = service.load_headers(worker, request.headers)
    job = chat_job(worker, body, request.headers)
    named = isinstance(body.get("tool_choice"), dict)
    if job.parameters.stream:
        return await _stream(worker, request, job, ChatChunks(worker, job, named=named))
    await service.complete(worker, job)
    return service.json_response(chat_answer(worker, job, named=named), load)


def chat_answer(worker: "SimulatedWorker", job: Job, *, named: bool) -> Json:
    """The body of a finished chat request; `named`: a tool was chosen by name, which changes the finish reason."""
    ids = job.parameters.return_token_ids
    choices = []
    for choice in job.generation.choices:
        answer = choice.answer
        message: Json = {
            "role": "assistant",
            "content": answer.text(),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        reason = answer.finish_reason
        if answer.call is not None and reason == "stop":
            message["content"] = None
            message["tool_calls"] = [
                {
                    "id": TOOL_CALL_ID + worker.new_id(),
                    "type": "function",
                    "function": {"name": answer.call.name, "arguments": answer.call.arguments},
                }
            ]
            reason = "stop" if named else "tool_calls"
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": answer.stop_reason,
                "token_ids": answer.ids if ids else None,
                "routed_experts": None,
            }
        )
    return {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": worker.fingerprint,
        "usage": usage(worker, job),
        "prompt_logprobs": None,
        "prompt_token_ids": job.prompts[0] if ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def usage(worker: "SimulatedWorker", job: Job, *, chat: bool = True) -> Json:
    """The usage of a whole answer that is not streamed."""
    prompt, completion = job.prompt_tokens(), job.completion_tokens()
    details = None
    if worker.options.prompt_tokens_details:
        first = job.first_choices()[-1]
        details = {
            "cached_tokens": first.cached,
            "created_cache_tokens": service.created_tokens(worker, first) if chat else None,
            "multimodal_tokens": None,
        }
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


class Chunks:
    """The events of one streamed answer; what does not change from one to the next is encoded once."""

    kind = ""

    def __init__(self, worker: "SimulatedWorker", job: Job) -> None:
        self.worker = worker
        self.job = job
        head = {"id": job.id, "object": self.kind, "created": job.created, "model": job.model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._fingerprint = b',"system_fingerprint":' + orjson.dumps(worker.fingerprint)
        self.ids = job.parameters.return_token_ids

    def opening(self) -> list[bytes]:
        """What comes before the first token."""
        return []

    def tokens(self, choice: Choice, index: int, count: int) -> bytes:
        """The event for `count` tokens from `index`."""
        raise NotImplementedError

    def event(self, choice: bytes, *, tail: bytes = b"", last: bool = False) -> bytes:
        """One event with one choice (or none) in it; the last one of a choice has the fingerprint unless usage follows."""
        end = b"]" + tail
        if last and not self.job.parameters.include_usage:
            end += self._fingerprint
        return self._head + choice + end + b"}\n\n"

    def running_usage(self, choice: Choice | None, produced: int) -> bytes:
        """The usage in each chunk, where asked for."""
        if not self.job.parameters.continuous_usage:
            return b""
        prompt = len(choice.prompt_ids if choice else self.job.prompts[0])
        numbers = {"prompt_tokens": prompt, "total_tokens": prompt + produced, "completion_tokens": produced}
        return b',"usage":' + orjson.dumps({**numbers, "completion_tokens_details": None})

    def closing(self) -> list[bytes]:
        """What comes after the last token."""
        if not self.job.parameters.include_usage:
            return [DONE]
        prompt, completion = self.job.prompt_tokens(), self.job.completion_tokens()
        numbers: Json = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        if self.worker.options.prompt_tokens_details:
            numbers["prompt_tokens_details"] = self.details(self.job.first_choices()[-1])
        tail = b',"usage":' + orjson.dumps(numbers)
        return [self.event(b"", tail=tail + self._fingerprint), DONE]

    def details(self, choice: Choice) -> Json:
        """Where the prompt's tokens came from."""
        return {"cached_tokens": choice.cached}


class ChatChunks(Chunks):
    """The events of a streamed chat answer."""

    kind = "chat.completion.chunk"

    def __init__(self, worker: "SimulatedWorker", job: Job, *, named: bool) -> None:
        super().__init__(worker, job)
        self._named = named
        self._arguments_sent: dict[int, int] = {}
        """Characters of its arguments that a choice has sent; from when its function's name is out."""

    def opening(self) -> list[bytes]:
        """The role, once a choice."""
        prompt = orjson.dumps(self.job.prompts[0]) if self.ids else b"null"
        tail = self.running_usage(None, 0) + b',"prompt_token_ids":' + prompt + b',"prompt_text":null'
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return [self.event(b'{"index":%d,' % index + delta, tail=tail) for index in range(self.job.parameters.n)]

    def tokens(self, choice: Choice, index: int, count: int) -> bytes:
        """A piece of text or of a tool call."""
        answer = choice.answer
        end = index + count
        last = end >= len(answer.ids)
        if answer.call is not None:
            call_delta = self._call_delta(choice, answer.call, end)
            if not call_delta and not last:
                return b""  # vLLM's parser has nothing to say yet
            delta = orjson.dumps(call_delta)
        else:
            text = "".join(answer.pieces[index:end])
            delta = b'{"content":' + orjson.dumps(text) + b"}" if text else b"{}"
        finish = b'"finish_reason":null'
        if last:
            reason = answer.finish_reason
            if answer.call is not None and reason == "stop" and not self._named:
                reason = "tool_calls"
            finish = b'"finish_reason":"%s","stop_reason":' % reason.encode() + orjson.dumps(answer.stop_reason)
        ids = orjson.dumps(answer.ids[index:end]) if self.ids else b"null"
        body = b'{"index":%d,"delta":' % choice.index + delta + b',"logprobs":null,' + finish
        return self.event(body + b',"token_ids":' + ids + b"}", tail=self.running_usage(choice, end), last=last)

    def details(self, choice: Choice) -> Json:
        """With what was newly put into the cache."""
        return {
            "cached_tokens": choice.cached,
            "created_cache_tokens": service.created_tokens(self.worker, choice),
        }

    def _call_delta(self, choice: Choice, call: FunctionCall, end: int) -> Json:
        """The name once it is complete, in a piece of its own, then the arguments as they come; nothing for the tags."""
        written = len(choice.answer.text(end)) - len(call.head)
        if written < 0:
            return {}
        sent = self._arguments_sent.get(choice.index)
        if sent is None:
            self._arguments_sent[choice.index] = 0
            call_id = TOOL_CALL_ID + self.worker.new_id()
            entry = {"id": call_id, "type": "function", "index": 0, "function": {"name": call.name}}
        else:
            part = call.arguments[sent:written]
            if not part:
                return {}
            self._arguments_sent[choice.index] = sent + len(part)
            entry = {"index": 0, "function": {"arguments": part}}
        return {"content": None, "tool_calls": [entry]}


class CompletionChunks(Chunks):
    """The events of a streamed completion."""

    kind = "text_completion"

    def tokens(self, choice: Choice, index: int, count: int) -> bytes:
        """A piece of text; the prompt's ids, and its text with `echo`, before the first."""
        answer = choice.answer
        end = index + count
        last = end >= len(answer.ids)
        text = "".join(answer.pieces[index:end])
        if index == 0 and self.job.parameters.echo:
            text = self.worker.tokenizer.decode(choice.prompt_ids) + text
        body: Json = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": answer.finish_reason if last else None,
            "stop_reason": answer.stop_reason if last else None,
            "prompt_token_ids": choice.prompt_ids if self.ids and index == 0 else None,
            "token_ids": answer.ids[index:end] if self.ids else None,
        }
        return self.event(orjson.dumps(body), tail=self.running_usage(choice, end), last=last)


async def _stream(worker: "SimulatedWorker", request: web.Request, job: Job, chunks: Chunks) -> web.StreamResponse:
    """Write an answer as it comes; whoever leaves takes the request out of the engine."""
    stream = EventStream(request, worker.faults, worker.answer_headers(request))
    generation = job.generation
    opened = False
    try:
        await stream.start()
        while True:
            await generation.wait()
            news = generation.take()
            if not opened and news:
                opened = True
                await stream.send(*chunks.opening())
            if news:
                await stream.send_tokens([chunks.tokens(*item) for item in news])
            elif not generation.open:
                break
        if any(choice.finished == "error" for choice in generation.choices):
            await stream.end(b"data: " + service.engine_failure().body() + b"\n\n", DONE)
        else:
            await stream.end(*chunks.closing())
    except StreamBrokenError:
        pass
    finally:
        worker.abort(generation)
    return stream.response


def completion_job(worker: "SimulatedWorker", body: Body, headers: Mapping[str, str]) -> Job:
    """Check a completion request and start it.

    Raises:
        ApiError: it can't be answered.
    """
    violations = Violations()
    check_types(body, violations)
    violations.raise_if_any()
    model = service.served_model(worker, body.get("model"))
    parameters = parse(body, headers, worker.profile.max_model_len)
    prompts = completion_prompts(worker, body)
    answers = [service.answers_for(worker, ids, parameters, default_tokens=COMPLETION_TOKENS) for ids in prompts]
    return service.begin(worker, "cmpl", model, parameters, prompts, answers)


def completion_prompts(worker: "SimulatedWorker", body: Body) -> list[Sequence[int]]:
    """The token ids of each prompt: of a text, of several, or given as ids.

    Raises:
        ApiError: there is none, or one is too long.
    """
    given: Any = service.prompt_from_transfer(body) or body.get("prompt")
    if not given:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    items = [given] if isinstance(given, str) or (isinstance(given, list) and isinstance(given[0], int)) else given
    prompts: list[Sequence[int]] = []
    for item in items if isinstance(items, list) else [None]:
        is_text = False
        if isinstance(item, str):
            is_text = True
            ids = worker.tokenizer.encode(item)
        elif isinstance(item, list) and all(type(token) is int for token in item):
            ids = item
        else:
            raise bad_request("prompt must be a string, a list of strings, a list of tokens, or a list of such lists.")
        if not ids:
            raise bad_request("The decoder prompt cannot be empty")
        service.check_prompt(worker, ids, is_text=is_text)
        prompts.append(ids)
    return prompts


async def completion(worker: "SimulatedWorker", request: web.Request, body: Body) -> web.StreamResponse:
    """Answer a completion request.

    Raises:
        ApiError: it can't be answered.
    """
    load = service.load_headers(worker, request.headers)
    job = completion_job(worker, body, request.headers)
    if job.parameters.stream:
        return await _stream(worker, request, job, CompletionChunks(worker, job))
    await service.complete(worker, job)
    return service.json_response(completion_answer(worker, job), load)


def completion_answer(worker: "SimulatedWorker", job: Job) -> Json:
    """The body of a finished completion request."""
    parameters: Parameters = job.parameters
    choices = []
    for choice in job.generation.choices:
        answer = choice.answer
        text = answer.text()
        if parameters.echo:
            text = worker.tokenizer.decode(choice.prompt_ids) + text
        choices.append(
            {
                "index": choice.index,
                "text": text,
                "logprobs": None,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "token_ids": answer.ids if parameters.return_token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": choice.prompt_ids if parameters.return_token_ids else None,
                "routed_experts": None,
            }
        )
    return {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": worker.fingerprint,
        "usage": usage(worker, job, chat=False),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
