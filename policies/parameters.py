"""Check configured parameters against the signature of what they are for."""

import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec

RNG: Final = "rng"
"""The constructor argument that the registry gives itself: the policy's random generator."""

Where = tuple[str | int, ...]
"""Keys and indices that lead from the top of the configuration to a value."""


class PolicyError(Exception):
    """A policy that cannot be built.

    Attributes:
        message: what is wrong and what was expected, with the nearest valid name where there is one.
        where: the path to the value in the configuration, such as ``("policies", "mine", "scorers", 0, "type")``; empty
            when the policy's own name is unknown, for then only the caller knows where that name stood.
    """

    def __init__(self, message: str, where: Where = ()) -> None:
        super().__init__(message)
        self.message = message
        self.where = where


def nearest(name: str, names: Collection[str]) -> str:
    """``; did you mean "x"?`` for the most similar of `names`, else the list of all of them, else nothing."""
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; there are: {', '.join(sorted(names))}" if names else ""


def construct(factory: Callable[..., Any], parameters: Mapping[str, Any], where: Where, rng: object = None) -> Any:
    """Call `factory` with `parameters` as keywords, and with `rng` if its signature has an argument of that name.

    Values are checked against the annotations as msgspec does strictly: an int passes for a float, a list for a tuple or
    a Sequence, nothing else is converted. Arguments without annotation, or with one that msgspec does not know, take
    anything.

    Raises:
        PolicyError: a parameter is unknown, missing or of a wrong type, or the constructor refused its values.
    """
    try:
        signature = inspect.signature(factory)
        hints = _hints(factory)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise PolicyError(f"cannot read the parameters of {_name(factory)}: {error}", where) from error
    accepted = {
        name: argument
        for name, argument in signature.parameters.items()
        if argument.kind in {argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD} and name != RNG
    }
    takes_any = any(argument.kind == argument.VAR_KEYWORD for argument in signature.parameters.values())
    keywords: dict[str, Any] = {}
    for name, value in parameters.items():
        here = (*where, name)
        if name == RNG or (name not in accepted and not takes_any):
            raise PolicyError(f'unknown parameter "{name}" of {_name(factory)}{nearest(name, accepted)}', here)
        keywords[name] = _checked(name, value, hints.get(name, Any) if name in accepted else Any, here)
    for name, argument in accepted.items():
        if argument.default is argument.empty and name not in keywords:
            raise PolicyError(f'{_name(factory)} needs the parameter "{name}"', where)
    if RNG in signature.parameters:
        keywords[RNG] = rng
    try:
        return factory(**keywords)
    except PolicyError:
        raise
    except Exception as error:  # a plug-in's constructor may raise anything; all of it means: wrong configuration
        raise PolicyError(f"{_name(factory)} refused its parameters: {error}", where) from error


def _checked(name: str, value: Any, hint: Any, where: Where) -> Any:
    """`value` as `hint` wants it; raises PolicyError when it is of another type."""
    try:
        return msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError as error:
        raise PolicyError(f'parameter "{name}": {error}', where) from error
    except (TypeError, NotImplementedError):
        return value  # an annotation that msgspec cannot check


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function's or a constructor's arguments, with `Annotated` constraints."""
    target = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc] # the class's own signature
    return typing.get_type_hints(target, include_extras=True)


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", type(factory).__qualname__)
