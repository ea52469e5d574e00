"""Asks the policies' registry whether what the configuration says about policies makes sense, and where it does not."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gateway.config.problems import Where
from gateway.config.schema import DEFAULT_POLICY, Policy, Step
from policies.registry import PolicyError, Registry

PolicyCheck = Callable[[Mapping[str, Policy], Collection[str]], Iterable[tuple[Where, str]]]
"""Given the sections by name and the names that models use, yields (where, what is wrong).

`where` is the way from the top of the file, such as ``("policies", "mine", "scorers", 0, "type")``, or ``("use", name)`` for
a name that a model uses and that does not exist: each place that uses it is then complained about.
"""

_MAX_PROBLEMS = 50
"""Of one policy."""
_STAND_INS = {"filters": Step(type="healthy"), "scorers": Step(type="random"), "picker": Step(type="lowest-cost")}
"""What takes the place of a step that was complained about, so that the ones behind it are looked at too."""


def registry_check(registry: Registry) -> PolicyCheck:
    """A check that builds every policy once with `registry` and throws it away."""

    def check(sections: Mapping[str, Policy], used: Collection[str]) -> Iterator[tuple[Where, str]]:
        for name in sections:
            yield from _problems(registry, name, dict(sections))
        for name in sorted(used):
            if name not in sections:
                yield from _problems(registry, name, dict(sections))

    return check


def used_policies(model: Any) -> Iterator[tuple[str, Where]]:
    """The policies that a model's data names, each with its place in there; what is no text is somebody else's complaint."""
    if not isinstance(model, dict):
        return
    places: list[tuple[Any, Where]] = [(model.get("policy", DEFAULT_POLICY), ("policy",))]
    stages = model.get("stage_policies")
    if isinstance(stages, dict):
        places += [(name, ("stage_policies", stage)) for stage, name in stages.items()]
    choice = model.get("policy_choice")
    if isinstance(choice, dict) and isinstance(allowed := choice.get("allowed"), list):
        places += [(name, ("policy_choice", "allowed", index)) for index, name in enumerate(allowed)]
    yield from ((name, where) for name, where in places if isinstance(name, str))


def usable_part(section: Any, invalid: object) -> Policy | None:
    """A section's data as a `Policy`, with stand-ins where `invalid` is; None when nothing is left to look at."""
    if not isinstance(section, dict):
        return None
    kept = _without_invalid(section, invalid)
    for kind in kept.keys() & {"filters", "scorers"}:
        kept[kind] = [_usable_step(step, kind, invalid) for step in kept[kind]]
    if "picker" in kept:
        kept["picker"] = _usable_step(section["picker"], "picker", invalid)
    if kept != section and not any(kept.get(key) for key in ("preset", "filters", "scorers", "picker")):
        return None
    return msgspec.convert(kept, Policy)


def _usable_step(step: Any, kind: str, invalid: object) -> Any:
    if step is None:
        return None
    kept = _without_invalid(step, invalid) if isinstance(step, dict) else {}
    return kept if "type" in kept else msgspec.to_builtins(_STAND_INS[kind])


def _without_invalid(data: dict[str, Any], invalid: object) -> dict[str, Any]:
    """`data` without the keys whose value is `invalid`, at any depth of mappings."""
    return {
        key: _without_invalid(value, invalid) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not invalid and not (isinstance(value, list) and invalid in value and key not in _STAND_INS)
    }


def _problems(registry: Registry, name: str, sections: dict[str, Policy]) -> Iterator[tuple[Where, str]]:
    """All that is wrong with one policy: after each complaint the part is replaced and the rest looked at again."""
    last: Where | None = None
    for _ in range(_MAX_PROBLEMS):
        try:
            registry.build(name, sections)
        except PolicyError as error:
            where = error.where or ("use", name)
            if where == last:
                return
            yield where, error.message
            last = where
            repaired = _without(sections[name], where[2:]) if name in sections else None
            if repaired is None:
                return
            sections[name] = repaired
        else:
            return


def _without(policy: Policy, rest: Where) -> Policy | None:
    """`policy` without the part that `rest` leads to, or None when nothing would be left to look at."""
    match rest:
        case ("parameters", str(parameter), *_):
            return msgspec.structs.replace(policy, parameters=_without_key(policy.parameters, parameter))
        case ("filters" | "scorers" as kind, int(index), *inside):
            steps: list[Step] = list(getattr(policy, kind))
            steps[index] = _without_in_step(steps[index], inside) or _STAND_INS[kind]
            return msgspec.structs.replace(policy, **{kind: tuple(steps)})
        case ("picker", *inside) if policy.picker is not None:
            picker = _without_in_step(policy.picker, inside) or _STAND_INS["picker"]
            return msgspec.structs.replace(policy, picker=picker)
        case _:
            return None


def _without_in_step(step: Step, inside: list[str | int]) -> Step | None:
    match inside:
        case ["parameters", str(parameter), *_]:
            return msgspec.structs.replace(step, parameters=_without_key(step.parameters, parameter))
        case ["weight"]:
            return msgspec.structs.replace(step, weight=1.0)
        case _:
            return None


def _without_key(parameters: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != key}
