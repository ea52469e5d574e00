"""Short conversations of a kind that was seen before, rendered without their template.

Most requests differ from the ones before in the texts of their messages only: the same roles, no tools, nothing else. For
such a shape the template is traced once (`gateway.prompt.tracing`); from then on its output is put together from the trace,
as long as the template would be told the same about the new texts. So are the places where the text is cut: a special token
in a literal part of the output is always there, and none begins in a text without the character that all of them begin
with. Measured with Qwen3's template on a system prompt and a question: 3 us instead of 22 us.

What a shape is, and so what a trace may take for granted: the roles, no key but `role` and `content`, texts as contents, no
tools, documents or open last message, `add_generation_prompt`, and the other variables. All else that templates read belongs
to the model. Once in `CHECK_EVERY` times the template is rendered as well and has the last word: if the texts differ, which
would be a mistake here, shapes are not used for this model any more.
"""

from collections.abc import Sequence
from typing import Any, Final

import structlog

from gateway.prompt.chat import ChatRequest
from gateway.prompt.conversation import BILLING_HEADER
from gateway.prompt.splitting import MAX_PIECES, Splitter
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tracing import Trace

_log = structlog.get_logger(__name__)

MAX_MESSAGES: Final = 512
"""Tracing more would hold up the loop for too long (7 us a message, once for a shape)."""

_SEEN_BEFORE: Final = 64
"""A shape is traced when it is seen for the second time, or once more for each this many messages: the longer a conversation,
the fewer have its shape."""

CHECK_EVERY: Final = 256

_MAX_KEPT: Final = 16 * 1024
"""Messages of all shapes and traces together. Each takes half a KB (tracemalloc)."""

_MAX_VARIABLE: Final = 64
"""Characters of a text in `chat_template_kwargs`; longer ones are not of one shape with anything."""

_MAX_TRACES: Final = 4
"""Traces of one shape, each for other answers (a trace costs three renderings)."""

_ROLES: Final = frozenset({"system", "user", "assistant"})

Key = tuple[Any, ...]
"""All of a request that its template reads besides the contents; hashable, and equal only for what templates cannot tell apart."""


def read_shape(request: ChatRequest) -> tuple[Key, list[str]] | None:
    """The shape of a request and its contents, or None if it is not one of plain texts."""
    messages = request.messages
    if (
        len(messages) > MAX_MESSAGES
        or request.tools is not None
        or request.documents is not None
        or request.continue_final_message
    ):
        return None
    roles: list[Any] = [request.add_generation_prompt]
    contents: list[str] = []
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or role not in _ROLES or type(content) is not str:
            return None
        if role == "system" and content.startswith(BILLING_HEADER):
            return None
        roles.append(role)
        contents.append(content)
    for name, value in request.variables.items():
        # Of these two types alone: 1, 1.0 and True are one key of a dict, but not one to a template.
        if type(value) is not bool and (type(value) is not str or len(value) > _MAX_VARIABLE):
            return None
        roles += (name, value)
    return tuple(roles), contents


class Shape:
    """One trace, ready for other contents.

    Args:
        trace: from a conversation of this shape.
        splitter: cuts its texts; None if they are not cut.
    """

    __slots__ = ("_derived", "_guards", "_parts", "_pieces", "_slots")

    def __init__(self, trace: Trace, splitter: Splitter | None) -> None:
        self._parts = tuple(trace.parts)
        self._derived = [(derived.source, derived.make) for derived in trace.derived]
        self._guards = [(guard.slot, guard.ask, guard.answer) for guard in trace.guards]
        self._slots = sorted({part for part in trace.parts if isinstance(part, int)})
        self._pieces = None if splitter is None else _pieces(trace.parts, splitter)

    def texts(self, contents: list[str]) -> list[str] | None:
        """The texts of all slots, or None if the template would not do what it did in the trace."""
        for source, make in self._derived:
            contents = [*contents, make(contents[source])]
        for slot, ask, answer in self._guards:
            if ask(contents[slot]) is not answer:
                return None
        return contents

    def whole(self, texts: Sequence[str]) -> str:
        """The output with these texts of its slots."""
        return _filled(self._parts, texts)

    def pieces(self, texts: Sequence[str], splitter: Splitter) -> list[str] | None:
        """What `splitter` makes of the output, if that is known without looking for special tokens."""
        if self._pieces is None:
            return None
        for slot in self._slots:
            if splitter.begins_in(texts[slot]):
                return None
        return [
            piece
            if type(piece) is str
            else f"{piece[0]}{texts[piece[1]]}{piece[2]}"
            if type(piece) is tuple
            else _filled(piece, texts)
            for piece in self._pieces
        ]


def _filled(parts: Sequence[str | int], texts: Sequence[str]) -> str:
    return "".join([part if type(part) is str else texts[part] for part in parts])  # type: ignore[index]


_Piece = str | tuple[str, int, str] | list[str | int]
"""A piece of an output: a text, or what is before and after the one slot in it, or its parts."""


def _pieces(parts: Sequence[str | int], splitter: Splitter) -> list[_Piece] | None:
    """Where an output is cut if no special token begins in one of its slots.

    None if a token might begin in a literal and end in the slot that follows. If none does, each token lies in a literal, and
    is found there by looking at this literal alone.
    """
    pieces: list[list[str | int]] = [[]]
    for part in parts:
        if isinstance(part, int):
            pieces[-1].append(part)
            continue
        if splitter.reaches_over(part):
            return None
        first, *others = splitter.split(part)
        # A literal's first piece goes on with what is before it, unless it begins with a token itself.
        if splitter.cuts_before(first):
            others = [first, *others]
        else:
            pieces[-1].append(first)
        pieces += [[piece] for piece in others]
    if not pieces[0]:
        del pieces[0]
    if len(pieces) >= MAX_PIECES or not pieces or not any(isinstance(part, str) for part in pieces[0]):
        return None  # thinned out, or a first piece that may be empty
    return [_simplest(piece) for piece in pieces]


def _simplest(parts: list[str | int]) -> _Piece:
    """A piece in the form that is put together fastest."""
    slots = [at for at, part in enumerate(parts) if isinstance(part, int)]
    if not slots:
        return "".join([part for part in parts if isinstance(part, str)])
    if len(slots) > 1:
        return parts
    (at,) = slots
    slot = parts[at]
    assert isinstance(slot, int)
    return "".join(map(str, parts[:at])), slot, "".join(map(str, parts[at + 1 :]))


class _Known:
    """What is known of one key."""

    __slots__ = ("shapes", "traces", "wanted")

    def __init__(self, messages: int) -> None:
        self.shapes: list[Shape] = []
        self.traces = 0
        self.wanted = 1 + messages // _SEEN_BEFORE  # sightings before it is traced


class Shapes:
    """The shapes of one model. Belongs to one event loop.

    Args:
        template: the one for requests without tools.
        splitter: the tokenizer's.
        check_every: how many conversations are rendered without the template until one is rendered both ways.

    Attributes:
        hits: conversations that were rendered without the template.
        checks: those that were rendered both ways.
        differences: checks that failed; after the first one there are no more hits.
    """

    __slots__ = ("_check_every", "_kept", "_known", "_splitter", "_template", "checks", "differences", "hits")

    def __init__(self, template: ChatTemplate, splitter: Splitter | None, *, check_every: int = CHECK_EVERY) -> None:
        self._template = template
        self._splitter = splitter
        self._known: dict[Key, _Known] = {}
        self._kept = 0
        self._check_every = check_every
        self.hits = 0
        self.checks = 0
        self.differences = 0

    def render(self, key: Key, contents: list[str]) -> str | list[str] | None:
        """The text, or its pieces if they are known too; None if the template has to be asked, and `learn` told."""
        known = self._known.get(key)
        if known is None:
            return None
        for shape in known.shapes:
            texts = shape.texts(contents)
            if texts is not None:
                self.hits += 1
                if self.hits % self._check_every == 0:
                    return None
                pieces = None if self._splitter is None else shape.pieces(texts, self._splitter)
                return shape.whole(texts) if pieces is None else pieces
        return None

    def learn(
        self, key: Key, contents: list[str], text: str, messages: Sequence[dict[str, Any]], values: dict[str, Any]
    ) -> None:
        """Take note of what the template made of a conversation.

        Args:
            key: its shape.
            contents: its contents.
            text: what the template made of it.
            messages: as the template saw them.
            values: the variables as the template saw them.
        """
        if self.differences:
            return
        known = self._known.get(key)
        if known is None:
            if self._kept > _MAX_KEPT:
                self._known.clear()
                self._kept = 0
            self._kept += len(key)
            known = self._known[key] = _Known(len(contents))
        for shape in known.shapes:
            texts = shape.texts(contents)
            if texts is not None:
                self._check(shape, texts, text)
                return
        if known.wanted:
            known.wanted -= 1
        elif known.traces < _MAX_TRACES:
            known.traces += 1
            trace = self._template.trace(messages, contents, add_generation_prompt=key[0], variables=values)
            if trace is not None:
                shape = Shape(trace, self._splitter)
                texts = shape.texts(contents)
                assert texts is not None, "a trace's guards hold for its own texts"
                known.shapes.append(shape)
                self._kept += len(key)
                self._check(shape, texts, text)

    def _check(self, shape: Shape, texts: Sequence[str], text: str) -> None:
        self.checks += 1
        splitter = self._splitter
        pieces = None if splitter is None else shape.pieces(texts, splitter)
        if shape.whole(texts) == text and (splitter is None or pieces is None or pieces == splitter.split(text)):
            return
        self.differences += 1
        self._known.clear()
        _log.error(
            "a prompt differs from what its template renders; every prompt of this model is rendered in full now"
        )
