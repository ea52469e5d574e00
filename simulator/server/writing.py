"""What the simulated model says: a pure function of the prompt's token ids, so that tests know every answer beforehand."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from simulator.tokenizer import WorkerTokenizer

SHORTEST, LONGEST = 16, 64
"""Tokens of an answer whose length the request does not give, both included."""


@dataclass(slots=True)
class Answer:
    """Everything that one choice will hold.

    Attributes:
        ids: generated token ids.
        pieces: the text that each token adds; same length as `ids`.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string or stop token id that ended it, if one did.
        call: the function call that the text spells out, or None.
    """

    ids: list[int]
    pieces: list[str]
    finish_reason: str
    stop_reason: str | int | None = None
    call: "FunctionCall | None" = None

    def text(self, count: int | None = None) -> str:
        """The text of the first `count` tokens (default: all)."""
        return "".join(self.pieces if count is None else self.pieces[:count])


@dataclass(frozen=True)
class FunctionCall:
    """A call as the model writes it: a JSON object between tags.

    Attributes:
        name: the function.
        arguments: a JSON object as text.
    """

    name: str
    arguments: str

    @cached_property
    def head(self) -> str:
        """The text before the arguments."""
        return '<tool_call>\n{"name": ' + orjson.dumps(self.name).decode() + ', "arguments": '

    @property
    def text(self) -> str:
        """The whole text."""
        return self.head + self.arguments + "}\n</tool_call>"


def _random_numbers(prompt_ids: Sequence[int], choice: int, count: int) -> Sequence[int]:
    """`count` numbers of 16 bits from a hash of the prompt; more of them begin with the same ones."""
    key = hashlib.blake2b(array("Q", prompt_ids).tobytes(), digest_size=16, salt=choice.to_bytes(8, "little")).digest()
    return array("H", hashlib.shake_128(key).digest(2 * count))


def natural_length(prompt_ids: Sequence[int], choice: int = 0) -> int:
    """How many tokens the answer has when the request sets no limit: 16 to 64."""
    return SHORTEST + _random_numbers(prompt_ids, choice, 1)[0] % (LONGEST - SHORTEST + 1)


def write(tokenizer: WorkerTokenizer, prompt_ids: Sequence[int], length: int, choice: int = 0) -> Answer:
    """An answer of `length` tokens, each one a word; a longer one to the same prompt begins with a shorter one."""
    first_words, words = tokenizer.first_words or tokenizer.words, tokenizer.words
    numbers = _random_numbers(prompt_ids, choice, length + 1)
    chosen = [words[number % len(words)] for number in numbers[2:]]
    chosen.insert(0, first_words[numbers[1] % len(first_words)])
    return Answer([token for token, _ in chosen], [text for _, text in chosen], "length")


def write_call(tokenizer: WorkerTokenizer, call: FunctionCall) -> Answer:
    """The tokens that spell out a function call; it ends by itself."""
    ids = list(tokenizer.encode(call.text))
    pieces, written = [], ""
    for count in range(1, len(ids) + 1):  # a character may take several tokens: it belongs to its last one
        text = tokenizer.decode(ids[:count])
        text = text.rstrip("\ufffd") if count < len(ids) else call.text
        pieces.append(text[len(written) :])
        written = text
    return Answer(ids, pieces, "stop", call=call)


def apply_stops(answer: Answer, stops: Sequence[str], stop_ids: Sequence[int], *, minimum: int, keep: bool) -> Answer:
    """`answer` up to the first stop string or stop token.

    Args:
        answer: what would be said without them.
        stops: texts that end the answer where they begin (where they end with `keep`).
        stop_ids: token ids that end it.
        minimum: tokens before which nothing stops it.
        keep: leave the stop string in the text (``include_stop_str_in_output``).
    """
    text = ""
    for index, (token, piece) in enumerate(zip(answer.ids, answer.pieces, strict=True)):
        before = len(text)
        text += piece
        if index + 1 < minimum:
            continue
        if token in stop_ids:
            return Answer(answer.ids[: index + 1], [*answer.pieces[:index], ""], "stop", token)
        for stop in stops:
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                end = start + len(stop) if keep else start
                return Answer(answer.ids[: index + 1], _cut(answer.pieces[: index + 1], end), "stop", stop)
    return answer


def _cut(pieces: list[str], length: int) -> list[str]:
    """`pieces` without what lies beyond the first `length` characters."""
    result = []
    for piece in pieces:
        result.append(piece[: max(0, length)])
        length -= len(piece)
    return result


def expected_output(
    tokenizer: WorkerTokenizer, prompt_ids: Sequence[int], max_tokens: int | None = None, choice: int = 0
) -> tuple[list[int], str]:
    """The token ids and the text that a worker with this tokenizer answers to a prompt without stops or tools."""
    length = natural_length(prompt_ids, choice) if max_tokens is None else max_tokens
    answer = write(tokenizer, prompt_ids, length, choice)
    return answer.ids, answer.text()


def arguments_for(schema: Any, number: int) -> str:
    """JSON arguments that satisfy a function's JSON schema as far as it is simple; `number` seeds the values."""
    value = _value_for(schema if isinstance(schema, dict) else {}, number, 0)
    return orjson.dumps(value if isinstance(value, dict) else {}).decode()


def _value_for(schema: dict[str, Any], number: int, depth: int) -> Any:
    """One value for a (sub)schema."""
    if "const" in schema:
        return schema["const"]
    options = schema.get("enum")
    if isinstance(options, list) and options:
        return options[number % len(options)]
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list) and schema[union] and isinstance(schema[union][0], dict):
            return _value_for(schema[union][0], number, depth)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object" or (kind is None and depth == 0):
        properties = schema.get("properties")
        if not isinstance(properties, dict) or depth > 8:
            return {}
        return {
            name: _value_for(item if isinstance(item, dict) else {}, number + position, depth + 1)
            for position, (name, item) in enumerate(properties.items())
        }
    if kind == "array":
        items = schema.get("items")
        return [_value_for(items if isinstance(items, dict) else {}, number, depth + 1)] if depth <= 8 else []
    if kind == "integer":
        return int(schema.get("minimum", 0)) + number % 10
    if kind == "number":
        return float(schema.get("minimum", 0)) + number % 10 / 2
    if kind == "boolean":
        return number % 2 == 0
    if kind == "null":
        return None
    return f"value {number % 100}"
