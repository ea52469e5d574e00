"""Which file formats and generators there are, by name, and their parameters."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from simulator.workloads.formats.azure import azure
from simulator.workloads.formats.mooncake import mooncake
from simulator.workloads.formats.request_log import request_log
from simulator.workloads.formats.vidur import vidur
from simulator.workloads.formats.weka import weka
from simulator.workloads.generators.chat import chat
from simulator.workloads.generators.documents import documents
from simulator.workloads.generators.groups import groups
from simulator.workloads.generators.rufus import rufus
from simulator.workloads.generators.unique import unique
from simulator.workloads.workload import Workload, WorkloadError

FORMATS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {"azure": azure, "mooncake": mooncake, "vidur": vidur, "warmroute": request_log, "weka": weka}
)
"""Format's name to the function that reads a path."""

GENERATORS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {"chat": chat, "documents": documents, "groups": groups, "rufus": rufus, "unique": unique}
)
"""Generator's name to the function that makes a workload."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a format or generator: its name, its type as written, and its default."""

    name: str
    type: str
    default: Any


def load(path: str | Path, format: str, *, seed: int = 0, **options: Any) -> Workload:  # noqa: A002 - the contract's name
    """Read recorded traffic.

    Args:
        path: the file, plain or gzip (Weka: or a folder).
        format: a name in `FORMATS`.
        seed: of all random parts.
        options: parameters of that format's function; text is converted.

    Raises:
        WorkloadError: an unknown format or option, or a file that cannot be read: names file, line and remedy.
    """
    function = _named(FORMATS, "format", format)
    workload = function(Path(path), seed=seed, **_converted(function, format, options))
    if not workload.requests:
        raise WorkloadError.at(
            path, None, f"no request is left to replay ({format}: {', '.join(workload.notes) or 'empty'})"
        )
    try:
        workload.validate()
    except WorkloadError as error:
        raise WorkloadError.at(path, None, str(error)) from None
    return workload


def generate(name: str, *, seed: int = 0, **numbers: Any) -> Workload:
    """Make traffic up.

    Args:
        name: a name in `GENERATORS`.
        seed: equal seeds and numbers make equal workloads.
        numbers: parameters of that generator's function; text is converted.

    Raises:
        WorkloadError: an unknown name or number, or one out of bounds.
    """
    function = _named(GENERATORS, "generator", name)
    workload = function(seed=seed, **_converted(function, name, numbers))
    workload.validate()
    return workload


def parameters(name: str) -> list[Parameter]:
    """What `load` or `generate` accept beside the seed for this format or generator."""
    function = FORMATS.get(name) or _named(GENERATORS, "generator", name)
    return [
        Parameter(parameter.name, inspect.formatannotation(parameter.annotation), parameter.default)
        for parameter in _parameters(function).values()
    ]


def _named(table: Mapping[str, Callable[..., Workload]], kind: str, name: str) -> Callable[..., Workload]:
    try:
        return table[name]
    except KeyError:
        raise WorkloadError(f"unknown {kind} {name!r}; there are {', '.join(sorted(table))}") from None


def _parameters(function: Callable[..., Workload]) -> dict[str, inspect.Parameter]:
    signature = inspect.signature(function, eval_str=True)
    return {name: value for name, value in signature.parameters.items() if name not in {"path", "seed"}}


def _converted(function: Callable[..., Workload], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with text converted to the type of the parameter, and whole numbers where real ones are wanted."""
    known = _parameters(function)
    converted: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            raise WorkloadError(f"{name} has no {key!r}; there are {', '.join(known)}")
        converted[key] = _value(f"{name}: {key}", known[key].annotation, value)
    return converted


def _value(place: str, annotation: Any, value: Any) -> Any:
    if get_origin(annotation) is Literal:
        accepted = get_args(annotation)
        if value not in accepted:
            raise WorkloadError(f"{place} is {value!r}; {', '.join(accepted)} are accepted")
        return value
    if annotation is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in {"true", "yes", "false", "no"}:
            return str(value).lower() in {"true", "yes"}
        raise WorkloadError(f"{place} is {value!r}; true and false are accepted")
    if annotation in {int, float}:
        try:
            return annotation(value)
        except (TypeError, ValueError, OverflowError):
            kind = "a whole number" if annotation is int else "a number"
            raise WorkloadError(f"{place} is {value!r}; {kind} is accepted") from None
    return value
