"""The jinja environment in which Hugging Face renders chat templates, with short cuts that change nothing but the time.

Templates read a few dozen attributes per message, and jinja's sandbox takes about a microsecond for each, mostly to
raise and catch an AttributeError on a dict and to ask whether a string's method is safe. `_Compiler` and
`SandboxedEnvironment` answer those cases first, with exactly what the sandbox would answer, and leave all others to it.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class JsonObject(dict[str, Any]):
    """A JSON object that remembers its own text, for objects that are rendered again in every turn.

    Attributes:
        text: what `tojson` without arguments makes of it, once asked.
    """

    __slots__ = ("text",)

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.text: str | None = None


_ABSENT = object()
_DICT_ATTRIBUTES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_LOOP_ATTRIBUTES = frozenset({"index", "index0", "first", "last", "length", "revindex", "revindex0"})
_PLAIN = frozenset({str, int, float, bool, type(None), list, dict, JsonObject})
_BUILTIN_METHOD: Any = type("".strip)


def _namespace_values(namespace: Namespace) -> dict[str, Any]:
    """What a template's ``namespace()`` holds; its own attribute access runs in Python, a dozen times per look."""
    values: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return values


class Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what the assistant wrote, for training; when serving it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Turn the tag into a call of `_body` with what it encloses."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _Compiler(jinja2.compiler.CodeGenerator):
    """Compiles the commonest of ``obj.name`` and ``obj['name']`` to Python's own, where `obj` turns out to be what it mostly is.

    A plain dict that has the key, a loop, or a string and one of its safe methods: `SandboxedEnvironment` would answer the
    same, and is asked in all other cases. An attribute of `dict` itself, which ``obj.name`` finds first, is left to it too.
    """

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write ``obj.name``."""
        name = node.attr
        kind = "LoopContext" if name in _LOOP_ATTRIBUTES else "str" if name in _STR_METHODS else None
        if name in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
        else:
            direct = f"obj.{name} if type(obj) is {kind} else " if kind else ""
            self._look(node.node, name, f"{direct}environment.getattr", frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write ``obj['name']``."""
        if isinstance(node.arg, jinja2.nodes.Const) and type(node.arg.value) is str:
            self._look(node.node, node.arg.value, "environment.getitem", frame)
        else:
            super().visit_Getitem(node, frame)

    def _look(self, node: jinja2.nodes.Expr, key: str, otherwise: str, frame: jinja2.compiler.Frame) -> None:
        self.write(f"(obj[{key!r}] if type(obj := ")
        self.visit(node, frame)
        self.write(f") is dict and {key!r} in obj else {otherwise}(obj, {key!r}))")


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment: immutable sandbox, trimmed blocks, loop controls, the generation tag, plain `tojson`.

    Args:
        now: the clock behind `strftime_now`, local time.
    """

    code_generator_class = _Compiler

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute`` in a template."""
        kind = type(obj)
        if kind is Namespace:
            value = _namespace_values(obj).get(attribute, _ABSENT)
            if type(value) in _PLAIN and attribute[:1] != "_":
                return value
        elif (kind is dict or kind is JsonObject) and attribute not in _DICT_ATTRIBUTES:
            value = obj.get(attribute, _ABSENT)
            return value if value is not _ABSENT else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any | Undefined:
        """``obj[argument]`` in a template."""
        kind = type(obj)
        if (kind is dict or kind is JsonObject) and type(argument) is str:
            value = obj.get(argument, _ABSENT)
            if value is not _ABSENT:
                return value
            if argument not in _DICT_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def call(
        self, context: Context, obj: Any, *args: Any, _loop_vars: Any = None, _block_vars: Any = None, **kwargs: Any
    ) -> Any:
        """``obj(...)`` in a template."""
        if type(obj) is _BUILTIN_METHOD and type(obj.__self__) is str and obj.__name__ in _STR_METHODS:
            return obj(*args, **kwargs)
        if _loop_vars is not None:
            kwargs["_loop_vars"] = _loop_vars
        if _block_vars is not None:
            kwargs["_block_vars"] = _block_vars
        return super().call(context, obj, *args, **kwargs)


def bare_environment() -> ImmutableSandboxedEnvironment:
    """The environment in which vLLM looks which variables a template reads: without Hugging Face's own globals."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Hugging Face's `tojson`: unlike jinja's own it does not escape HTML. The order of its arguments is theirs."""
    if type(value) is JsonObject and not (ensure_ascii or indent is not None or separators or sort_keys):
        if value.text is None:
            value.text = json.dumps(value, ensure_ascii=False)
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
