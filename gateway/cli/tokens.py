"""`warmroute tokens`: the ids that a worker makes of a request body, and where a worker says otherwise."""

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.prompt import hub
from gateway.prompt.chat import UnrenderableError
from gateway.prompt.prompt import How, Prompt
from gateway.prompt.prompter import Prompter, PromptLimits
from gateway.prompt.template import TemplateError
from gateway.prompt.tokenizer import PromptTokenizer, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_AROUND = 8
_TIMEOUT = 120.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser of `warmroute`."""
    parser = commands.add_parser(
        "tokens",
        help="print the token ids of a request body",
        description="Print the token ids that a worker makes of a request body, as a JSON list; for several prompts, a list of lists.",
    )
    parser.add_argument("file", metavar="FILE", help="the body, as JSON; - for standard input")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="the model's directory, or owner/name@revision on the Hugging Face Hub",
    )
    parser.add_argument(
        "--path", choices=_PATHS, default=_PATHS[0], help="the path of the request (default: %(default)s)"
    )
    parser.add_argument("--text", action="store_true", help="print the rendered text instead of the ids")
    parser.add_argument(
        "--against",
        metavar="URL",
        help="ask the worker at this address too (it generates one token) and print the first difference; exit status 1 if there is one",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says; the exit status."""
    try:
        raw = sys.stdin.buffer.read() if arguments.file == "-" else Path(arguments.file).read_bytes()
        body = json.loads(raw)
    except (OSError, ValueError) as error:
        return _fail(f"{arguments.file}: {error}", 2)
    try:
        tokenizer = hub.load(arguments.tokenizer)
    except TokenizerError as error:
        return _fail(str(error), 2)
    prompter = Prompter(tokenizer, limits=PromptLimits(inline_new=2**62, inline_body=2**62, inline_items=2**62))
    if arguments.text:
        return _print_text(prompter, arguments.path, body)
    prompt = prompter.now(arguments.path, body)
    assert prompt is not None, "nothing is too big for these limits"
    if prompt.how is not How.EXACT:
        return _fail(f"the tokens of this body cannot be known: {prompt.reason}", 1)
    ids = _ids(prompt)
    if arguments.against is None:
        print(json.dumps(ids if prompt.also else ids[0]))
        return 0
    return _compare(ids, tokenizer, arguments.against, arguments.path, body)


def _print_text(prompter: Prompter, path: str, body: Any) -> int:
    try:
        texts = prompter.texts(path, body)
    except (UnrenderableError, TemplateError) as error:
        return _fail(f"the text of this body cannot be known: {error}", 1)
    print("\n".join(texts))
    return 0


def _ids(prompt: Prompt) -> list[list[int]]:
    return [one.ids.tolist() for one in (prompt, *prompt.also)]


def _compare(ids: list[list[int]], tokenizer: PromptTokenizer, url: str, path: str, body: dict[str, Any]) -> int:
    try:
        theirs = _ask(url.rstrip("/"), path, body)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _fail(f"{url}: no token ids from there: {error}", 1)
    if isinstance(theirs, int):
        count = sum(map(len, ids))
        print(f"{count} tokens here, {theirs} there (this path names no ids)")
        return 0 if count == theirs else 1
    if ids == theirs:
        print(f"equal: {sum(map(len, ids))} tokens")
        return 0
    if len(ids) != len(theirs):
        print(f"{len(ids)} prompts here, {len(theirs)} there")
        return 1
    which = next(index for index, (our, their) in enumerate(zip(ids, theirs, strict=True)) if our != their)
    print(_difference(ids[which], theirs[which], tokenizer, f"prompt {which}, " if len(ids) > 1 else ""))
    return 1


def _ask(url: str, path: str, body: dict[str, Any]) -> list[list[int]] | int:
    """The worker's ids of each prompt, or the number of tokens where its answers name none."""
    if path == "/v1/messages":
        counted = _post(f"{url}/v1/messages/count_tokens", {name: body[name] for name in body if name != "max_tokens"})
        return int(counted["input_tokens"])
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {name: value for name, value in body.items() if name not in ("max_completion_tokens", "stream_options")}
    answer = _post(f"{url}{path}", {**asked, limit: 1, "stream": False, "return_token_ids": True})
    if path == "/v1/responses":
        return int(answer["usage"]["input_tokens"])
    if path == "/v1/chat/completions":
        return [answer["prompt_token_ids"]]
    return [choice["prompt_token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")
    request = urllib.request.Request(  # noqa: S310  # the scheme was looked at
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310  # as above
        answer = json.load(response)
    if not isinstance(answer, dict):
        raise TypeError("the answer is no object")
    return answer


def _difference(ours: "Sequence[int]", theirs: "Sequence[int]", tokenizer: PromptTokenizer, which: str) -> str:
    at = next((i for i, (our, their) in enumerate(zip(ours, theirs, strict=False)) if our != their), None)
    if at is None:
        at = min(len(ours), len(theirs))

    def shown(ids: "Sequence[int]") -> str:
        part = list(ids[at : at + _AROUND])
        return f"{part} {tokenizer.decode(part)!r}" if part else "(ends)"

    before = tokenizer.decode(list(ours[max(0, at - _AROUND) : at]))
    return (
        f"{which}token {at} of {len(ours)} here and {len(theirs)} there is the first that differs\n"
        f"after {before!r}\n"
        f"  here:  {shown(ours)}\n"
        f"  there: {shown(theirs)}"
    )


def _fail(message: str, status: int) -> int:
    print(f"warmroute tokens: {message}", file=sys.stderr)
    return status
