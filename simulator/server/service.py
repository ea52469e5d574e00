"""What every generating endpoint does: choose the model, limit the length, make the answers, wait for the engine."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from simulator.server.errors import ApiError, bad_request, internal_error, too_long, unknown_model
from simulator.server.parameters import Body, Parameters
from simulator.server.pump import Choice, Generation
from simulator.server.writing import Answer, FunctionCall, apply_stops, natural_length, write, write_call

if TYPE_CHECKING:
    from simulator.server.worker import SimulatedWorker

JSON = "application/json"
LOAD_FORMAT = "endpoint-load-metrics-format"


@dataclass(slots=True)
class Job:
    """A request that is ready to run.

    Attributes:
        id: of the answer.
        created: Unix time in seconds.
        model: the name to answer with.
        parameters: how to generate.
        prompts: token ids of each prompt; one for chat.
        generation: its choices, in the order of the prompts and then of n.
    """

    id: str
    created: int
    model: str
    parameters: Parameters
    prompts: list[Sequence[int]]
    generation: Generation

    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(choice.produced for choice in self.generation.choices)

    def first_choices(self) -> list[Choice]:
        """The first choice of each prompt."""
        return self.generation.choices[:: self.parameters.n]


def served_model(worker: "SimulatedWorker", name: str | None) -> str:
    """The model to answer with.

    Raises:
        ApiError: `name` is not served here.
    """
    served = worker.options.served_names
    if name is None or name == "":
        return served[0]
    if name in served or worker.lora(name) is not None:
        return name
    raise unknown_model(name, served)


def prompt_from_transfer(body: Body) -> list[int] | None:
    """The token ids in `kv_transfer_params.prompt_token_ids`, taken out of the body; None when there are none.

    Raises:
        ApiError: they are no list of numbers.
    """
    parameters = body.get("kv_transfer_params")
    if not parameters or "prompt_token_ids" not in parameters:
        return None
    ids = parameters.pop("prompt_token_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise bad_request("kv_transfer_params.prompt_token_ids must be a non-empty list of integers.")
    return ids


def check_prompt(worker: "SimulatedWorker", ids: Sequence[int], *, is_text: bool) -> None:
    """Refuse a prompt that is too long, or has ids that mean nothing.

    Raises:
        ApiError: says what is wrong.
    """
    limit = worker.profile.max_model_len
    if len(ids) > limit:
        raise too_long(len(ids), limit, at_least=is_text)
    if len(ids) == limit:
        raise bad_request("max_tokens must be at least 1, got 0.", "max_tokens", 0)
    if not is_text:
        size = worker.tokenizer.vocabulary_size
        for token in ids:
            if not 0 <= token < size:
                raise bad_request(f"Token id {token} is out of vocabulary")


def answers_for(
    worker: "SimulatedWorker",
    ids: Sequence[int],
    parameters: Parameters,
    *,
    call: FunctionCall | None = None,
    default_tokens: int | None = None,
) -> list[Answer]:
    """The answers to one prompt, one per choice.

    Args:
        worker: whose tokenizer and limits count.
        ids: the prompt.
        parameters: of the request.
        call: the function call to write, when one is required.
        default_tokens: the limit when the request sets none; default: up to the model's.
    """
    room = worker.profile.max_model_len - len(ids)
    asked = parameters.max_tokens if parameters.max_tokens is not None else default_tokens
    limit = room if asked is None else min(asked, room)
    answers = []
    for choice in range(parameters.n):
        if call is not None:
            answer = write_call(worker.tokenizer, call)
            if len(answer.ids) > limit:
                answer = Answer(answer.ids[:limit], answer.pieces[:limit], "length", call=call)
        else:
            length, reason = limit, "length"
            if asked is None and not parameters.ignore_eos:
                natural = max(natural_length(ids, choice), parameters.min_tokens)
                if natural <= limit:
                    length, reason = natural, "stop"
            answer = write(worker.tokenizer, ids, length, choice)
            answer.finish_reason = reason
            if parameters.stops or parameters.stop_ids:
                answer = apply_stops(
                    answer,
                    parameters.stops,
                    parameters.stop_ids,
                    minimum=parameters.min_tokens,
                    keep=parameters.keep_stop,
                )
        answers.append(answer)
    return answers


def begin(
    worker: "SimulatedWorker",
    prefix: str,
    model: str,
    parameters: Parameters,
    prompts: list[Sequence[int]],
    answers: Sequence[Sequence[Answer]],
) -> Job:
    """Send all prompts to the engine; `prefix` begins the id of the answer.

    Raises:
        ApiError: the engine could never run one of them.
    """
    generation = Generation(parameters.stream, parameters.cache_salt, worker.lora(model))
    identity = parameters.request_id or worker.new_id()
    job = Job(f"{prefix}-{identity}", int(time.time()), model, parameters, prompts, generation)
    worker.metrics.request_n.observe(parameters.n)
    try:
        for ids, choices in zip(prompts, answers, strict=True):
            worker.generate(ids, choices, parameters, generation)
    except ValueError as error:
        worker.abort(generation)
        raise bad_request(str(error)) from None
    return job


async def complete(worker: "SimulatedWorker", job: Job) -> None:
    """Wait until every choice has ended; whoever is cancelled here takes the request out of the engine.

    Raises:
        ApiError: the engine failed.
    """
    try:
        while job.generation.open:
            await job.generation.wait()
            job.generation.take()
    finally:
        worker.abort(job.generation)
    check_finished(job)


def check_finished(job: Job) -> None:
    """Raise when a choice ended in an error.

    Raises:
        ApiError: the engine has no compiled shape for the prompt.
    """
    if any(choice.finished == "error" for choice in job.generation.choices):
        raise engine_failure()


def engine_failure() -> ApiError:
    """What a client hears of an exception in the engine."""
    return internal_error("EngineCore encountered an issue. See stack trace (above) for the root cause.")


def load_headers(worker: "SimulatedWorker", request_headers: Mapping[str, str]) -> dict[str, str]:
    """The load report that a request may ask for, as a header (ORCA's format)."""
    kind = request_headers.get(LOAD_FORMAT, "").upper()
    if kind not in ("TEXT", "JSON"):
        return {}
    stats = worker.stats()
    values = {"num_requests_waiting": float(stats.waiting), "kv_cache_usage_perc": stats.kv_usage}
    if kind == "JSON":
        pairs = ", ".join(f'"{name}": {value}' for name, value in values.items())
        return {"endpoint-load-metrics": f'JSON {{"named_metrics": {{{pairs}}}}}'}
    pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
    return {"endpoint-load-metrics": f"TEXT {pairs}"}


def json_response(value: object, headers: Mapping[str, str] | None = None) -> web.Response:
    """A 200 with a JSON body."""
    return web.Response(body=orjson.dumps(value), content_type=JSON, headers=headers)


def created_tokens(worker: "SimulatedWorker", choice: Choice) -> int:
    """Tokens of the prompt in full blocks that were not cached before."""
    size = worker.profile.block_size
    return max(0, len(choice.prompt_ids) // size * size - choice.cached)
