"""What a chat template does with texts that it does not know: its output with holes, and what it asked about them.

A template is run once with a `Traced` in the place of each message's content. Whatever it does to one is either

* putting it into the output, alone or joined to other texts: a part of the result;
* making a new text of it (``trim``, ``.lstrip()``, ...): a derived slot;
* a question with a yes or no (``'</think>' in content``, ``content.startswith(...)``, ``if content``): answered for the text at
  hand, and recorded as a `Guard`;
* anything else: `UntraceableError`, and the template is rendered in full for such conversations.

**What has to be true**, so that other texts with the same answers give the recorded parts with those texts in them: a run
of a template is a function of what it reads. All that it can read besides the contents is the same (the caller sees to
that), clocks and chance refuse, and a content shows itself by no other way than the above. The last is what this file must
hold: `Traced` is no `str`, so that code written in C refuses it; each special method that `object` answers by itself
(``==``, ``hash``, ``bool``, ``repr``, ...) is taken over here; filters, tests and functions, which might ask for its type,
see one only if they are known not to (`_BLIND_FILTERS`, `_BLIND_TESTS`, `_ANSWERS`); and a refusal that somebody swallows is remembered.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from gateway.prompt.sandbox import JsonObject, SandboxedEnvironment

_DERIVING: Final = frozenset(
    {"capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip", "strip", "title", "upper"}
)
"""Methods of `str` that make a text of a text."""

_ASKING: Final = frozenset({"endswith", "startswith"})
"""Methods of `str` that answer yes or no."""

_BLIND_FILTERS: Final = frozenset(
    {"count", "first", "last", "length", "list", "reject", "rejectattr", "select", "selectattr"}
)
"""Filters that do not look into the items of a sequence, other than by tests and by ``if``."""

_ANSWERS: Final = {
    "boolean": False,
    "defined": True,
    "false": False,
    "float": False,
    "integer": False,
    "iterable": True,
    "mapping": False,
    "none": False,
    "number": False,
    "sequence": True,
    "string": True,
    "true": False,
    "undefined": False,
}
"""What jinja's tests say of every text. Of containers they ask the type only."""

_BLIND_TESTS: Final = frozenset({"!=", "==", "eq", "equalto", "in", "ne"})
"""Tests that are operators of Python."""

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})


class UntraceableError(Exception):
    """The template did something with a content that cannot be followed."""


class Guard(msgspec.Struct, frozen=True):
    """A question that the template asked about a text, and the answer that the recorded output depends on.

    Attributes:
        slot: which text.
        ask: gives the answer for a text.
        answer: what it was.
    """

    slot: int
    ask: Callable[[str], Any]
    answer: bool


class Derived(msgspec.Struct, frozen=True):
    """A text that is made of another one.

    Attributes:
        source: the slot of that one.
        make: how.
    """

    source: int
    make: Callable[[str], str]


class Trace(msgspec.Struct, frozen=True):
    """A template's output with holes.

    Attributes:
        parts: literal texts, and slots; put together they are the output.
        derived: the texts of the slots that follow those of the contents.
        guards: what must be answered alike.
    """

    parts: Sequence[str | int]
    derived: Sequence[Derived]
    guards: Sequence[Guard]


class _Recorder:
    """What is known of one run.

    Args:
        contents: the texts at hand, which answer the template's questions.
    """

    __slots__ = ("_asked", "_made", "derived", "guards", "refused", "texts")

    def __init__(self, contents: Sequence[str]) -> None:
        self.texts = list(contents)
        self.derived: list[Derived] = []
        self.guards: list[Guard] = []
        self.refused = False
        self._made: dict[tuple[Any, ...], int] = {}
        self._asked: set[tuple[Any, ...]] = set()

    def refuse(self) -> NoReturn:
        self.refused = True
        raise UntraceableError

    def ask(self, slot: int, method: str, *args: str) -> bool:
        answer = bool(getattr(self.texts[slot], method)(*args)) if method else bool(self.texts[slot])
        if (slot, method, args) not in self._asked:
            self._asked.add((slot, method, args))
            self.guards.append(Guard(slot, methodcaller(method, *args) if method else bool, answer))
        return answer

    def derive(self, slot: int, method: str, *args: str) -> int:
        known = self._made.get((slot, method, args))
        if known is None:
            make: Callable[[str], str] = methodcaller(method, *args)
            self.derived.append(Derived(slot, make))
            self.texts.append(make(self.texts[slot]))
            known = self._made[slot, method, args] = len(self.texts) - 1
        return known


class _Opaque:
    """An object that refuses all that `object` would answer by itself."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def _refuse(self, *_args: object) -> NoReturn:
        self._recorder.refuse()

    _refused: Any = _refuse
    __bool__ = __call__ = __contains__ = __format__ = __getitem__ = __iter__ = __len__ = _refused
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = __repr__ = __str__ = _refused


class Traced(_Opaque):
    """A text that is not known: slots and literals, joined.

    Args:
        recorder: takes down what is asked.
        parts: what it is put together from; at least one slot, and no empty literal.
    """

    __slots__ = ("parts",)

    def __init__(self, recorder: _Recorder, parts: tuple[str | int, ...]) -> None:
        super().__init__(recorder)
        self.parts = parts

    def _slot(self) -> int:
        """Its slot, if it is nothing but that."""
        (first, *others) = self.parts
        if others or isinstance(first, str):
            self._recorder.refuse()
        return first

    def __add__(self, other: object) -> "Traced":
        return joined(self._recorder, (self, other))

    def __radd__(self, other: object) -> "Traced":
        return joined(self._recorder, (other, self))

    def __bool__(self) -> bool:
        if any(isinstance(part, str) for part in self.parts):
            return True
        return self._recorder.ask(self._slot(), "")

    def __contains__(self, other: object) -> bool:
        if type(other) is not str:
            self._recorder.refuse()
        return self._recorder.ask(self._slot(), "__contains__", other)

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        if type(other) is str:
            return self._recorder.ask(self._slot(), "__eq__", other)
        if type(other) not in _SCALARS:
            self._recorder.refuse()
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = _Opaque.__hash__  # defining __eq__ would undo it

    def call(self, method: str, *args: Any) -> "Traced | bool":
        """``text.method(*args)``."""
        recorder = self._recorder
        if method not in _DERIVING | _ASKING or not all(type(argument) is str for argument in args):
            recorder.refuse()
        slot = self._slot()
        if method in _ASKING:
            return recorder.ask(slot, method, *args)
        return Traced(recorder, (recorder.derive(slot, method, *args),))


class _Method(_Opaque):
    """A method of a `Traced` that is about to be called."""

    __slots__ = ("name", "text")

    def __init__(self, recorder: _Recorder, text: Traced, name: str) -> None:
        super().__init__(recorder)
        self.text = text
        self.name = name


def joined(recorder: _Recorder, texts: Iterable[object]) -> Traced:
    """Texts, one of them a `Traced`, put together."""
    parts: list[str | int] = []
    for text in texts:
        if type(text) is Traced:
            parts += text.parts
        elif type(text) is not str:
            recorder.refuse()
        elif text:
            parts.append(text)
    return Traced(recorder, tuple(parts))


class TracingEnvironment(SandboxedEnvironment):
    """The environment of chat templates for runs with `Traced` contents.

    Attributes:
        recorder: that of the run at hand.
    """

    def __init__(self) -> None:
        self.recorder = _Recorder(())
        super().__init__(self._refuse)
        self.globals["lipsum"] = self._refuse
        self.filters = {name: self._filter(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._test(name, function) for name, function in tests.items()}
        self.concat = self.put_together  # type: ignore[method-assign,assignment]

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        self.recorder.refuse()

    def text(self, value: object) -> object:
        """``str(value)`` of what is printed."""
        return value if type(value) is Traced else str(value)

    def put_together(self, texts: Iterable[object]) -> object:
        """``"".join(texts)`` of what was printed."""
        texts = list(texts)
        if any(type(text) is Traced for text in texts):
            return joined(self.recorder, texts)
        return "".join(texts)  # type: ignore[arg-type]  # anything but a str raises

    def concatenated(self, texts: Iterable[object]) -> object:
        """``a ~ b``."""
        return self.put_together(map(self.text, texts))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute`` in a template."""
        if isinstance(obj, _Opaque):
            return self._method(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]`` in a template."""
        if isinstance(obj, _Opaque) or isinstance(argument, _Opaque):
            return self._method(obj, argument)
        return super().getitem(obj, argument)

    def _method(self, obj: Any, attribute: Any) -> _Method:
        if type(obj) is not Traced or type(attribute) is not str or attribute not in _DERIVING | _ASKING:
            self.recorder.refuse()
        return _Method(self.recorder, obj, attribute)

    def call(
        self, context: Any, obj: Any, *args: Any, _loop_vars: Any = None, _block_vars: Any = None, **kwargs: Any
    ) -> Any:
        """``obj(...)`` in a template."""
        if type(obj) is _Method:
            if kwargs:
                self.recorder.refuse()
            return obj.text.call(obj.name, *args)
        # A macro is the template's own code, and a namespace only keeps what it is given.
        if not (
            type(obj) is Macro or obj is Namespace or (all(map(_known, args)) and all(map(_known, kwargs.values())))
        ):
            self.recorder.refuse()
        return super().call(context, obj, *args, _loop_vars=_loop_vars, _block_vars=_block_vars, **kwargs)

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[skip:]
            if name == "random" or not (all(map(_known, others)) and all(map(_known, kwargs.values()))):
                self.recorder.refuse()
            if type(value) is Traced:
                if name == "trim":
                    return value.call("strip", *others, *kwargs.values())
                if name == "string" or (name in ("d", "default") and len(others) <= 1 and not kwargs):
                    return value
                self.recorder.refuse()
            if name not in _BLIND_FILTERS and not _known(value):
                self.recorder.refuse()
            return function(*args, **kwargs)

        return filtered

    def _test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def tested(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[skip:]
            if type(value) is Traced and name in _ANSWERS:
                return _ANSWERS[name]
            blind = name in _BLIND_TESTS or (name in _ANSWERS and not isinstance(value, _Opaque))
            if not (blind or (_known(value) and all(map(_known, others)) and not kwargs)):
                self.recorder.refuse()
            return function(*args, **kwargs)

        return tested


def _known(value: object) -> bool:
    """Whether there is certainly no `Traced` in a value."""
    kind = type(value)
    if kind in _SCALARS or kind is jinja2.Undefined:
        return True
    if kind is list or kind is tuple:
        return all(map(_known, value))  # type: ignore[call-overload]
    if kind is dict or kind is JsonObject:
        return all(map(_known, value)) and all(map(_known, value.values()))  # type: ignore[call-overload,attr-defined]
    return False


class Tracer:
    """One template, compiled for being traced.

    Args:
        source: the template's text.
    """

    __slots__ = ("_environment", "_globals", "_template")

    def __init__(self, source: str) -> None:
        environment = TracingEnvironment()
        self._environment = environment
        self._template = environment.from_string(source)
        self._globals = dict(self._template.globals)
        # Compiled templates print with `str` and join with `str_join`, which must let a `Traced` through.
        compiled = self._template.root_render_func.__globals__
        compiled["str"] = environment.text
        compiled["str_join"] = compiled["markup_join"] = environment.concatenated

    def trace(
        self, messages: Sequence[dict[str, Any]], contents: Sequence[str], values: dict[str, Any]
    ) -> Trace | None:
        """The run with these messages, or None if it cannot be followed.

        Args:
            messages: as `gateway.prompt.conversation` leaves them. Not changed.
            contents: their texts, each the only thing of its message that may be another one next time.
            values: the other variables.
        """
        recorder = self._environment.recorder = _Recorder(contents)
        seen = [_hollow(message, Traced(recorder, (slot,)), contents[slot]) for slot, message in enumerate(messages)]
        if len(seen) != len(contents) or None in seen:
            return None
        context = self._environment.context_class(
            self._environment,
            {**self._globals, **values, "messages": seen},
            self._template.name,
            self._template.blocks,
        )
        try:
            output = self._environment.put_together(self._template.root_render_func(context))
        except Exception:  # noqa: BLE001  # templates fail in any way on what they do not know
            return None
        if recorder.refused:
            return None
        parts = output.parts if isinstance(output, Traced) else (output,)
        return Trace(_merged(parts), recorder.derived, recorder.guards)


def _hollow(message: dict[str, Any], text: Traced, content: str) -> dict[str, Any] | None:
    """A message with `text` in the place of its content, which is `content` or one part with that text."""
    given = message["content"]
    if given == content:
        return {**message, "content": text}
    if given == [{"type": "text", "text": content}]:
        return {**message, "content": [{"type": "text", "text": text}]}
    return None


def _merged(parts: Iterable[Any]) -> list[str | int]:
    """Parts without empty literals, and with neighbouring ones in one."""
    merged: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return merged
