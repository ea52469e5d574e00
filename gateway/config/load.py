"""Reads a configuration file: strictly, with every problem reported at once, each with its line and a remedy.

`load` and `loads` either return a `Config` that can be built from, or raise `ConfigError`; nothing else is ever raised.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from backends.registry import DRIVERS
from gateway.config.checks import Checker
from gateway.config.policies import PolicyCheck, registry_check, usable_part, used_policies
from gateway.config.problems import NOWHERE, ConfigError, Mark, Problem, Where, format_path
from gateway.config.schema import PROFILES, Config
from gateway.config.source import MAX_BYTES, Source
from gateway.config.walk import INVALID, Walker
from policies.registry import Registry


def load(
    path: str | os.PathLike[str],
    *,
    environ: Mapping[str, str] = os.environ,
    known_policies: PolicyCheck | None = None,
    drivers: Collection[str] = DRIVERS,
    profiles: Collection[str] = PROFILES,
) -> Config:
    """The configuration in the file `path`.

    Args:
        path: a UTF-8 YAML file; it is named in complaints as given here.
        environ: where ``${NAME}`` comes from.
        known_policies: checks policies' names and parameters; None: with what is built in and installed.
        drivers: names of drivers that exist.
        profiles: names of capability profiles that exist.

    Raises:
        ConfigError: with everything that is wrong.
    """
    name = os.fspath(path)
    try:
        raw = _read(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "; give the right one with --config FILE" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError([Problem(name, NOWHERE, "", f"cannot be read: {reason}{remedy}")]) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8-sig", "replace")
        mark = Mark(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise ConfigError([Problem(name, mark, "", "not UTF-8 text; save the file as UTF-8")]) from None
    return loads(text, name, environ=environ, known_policies=known_policies, drivers=drivers, profiles=profiles)


def loads(
    text: str,
    name: str = "config.yaml",
    *,
    environ: Mapping[str, str] = os.environ,
    known_policies: PolicyCheck | None = None,
    drivers: Collection[str] = DRIVERS,
    profiles: Collection[str] = PROFILES,
) -> Config:
    """The configuration in `text`; `name` stands for it in complaints. Otherwise as `load`."""
    source = Source(name, text, environ)
    config = _convert(source, known_policies, drivers, profiles)
    if config is None or source.complaints:
        raise ConfigError(
            Problem(
                name,
                complaint.mark,
                format_path(complaint.where),
                complaint.message,
                source.excerpt(complaint.mark.line),
            )
            for complaint in {(it.mark, it.message): it for it in reversed(source.complaints)}.values()
        )
    return config


def _read(path: Path) -> bytes:
    if path.is_dir():
        msg = "it is a directory; give the file in it"
        raise ValueError(msg)
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        msg = f"it is larger than {MAX_BYTES >> 20} MiB; is this the right file?"
        raise ValueError(msg)
    return raw


def _convert(
    source: Source, known_policies: PolicyCheck | None, drivers: Collection[str], profiles: Collection[str]
) -> Config | None:
    root = source.parse()
    if root is None:
        return None
    walker = Walker(source)
    data = walker.convert(root, Config)
    if not isinstance(data, dict):
        return None
    checker = Checker(source, walker.marks, walker.key_marks, drivers=drivers, profiles=profiles)
    checker.check(data)
    _check_policies(data, checker, known_policies)
    if source.complaints:
        return None
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:  # the walker knows less than the schema: say it, if without a line
        source.complain(NOWHERE, (), str(error))
        return None


def _check_policies(data: dict[str, Any], checker: Checker, known_policies: PolicyCheck | None) -> None:
    uses: dict[str, list[Where]] = {}
    models = data.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        for name, where in used_policies(model):
            uses.setdefault(name, []).append(("models", index, *where))
    sections = data.get("policies", {})
    if not isinstance(sections, dict):
        return
    policies = {name: usable_part(section, INVALID) for name, section in sections.items()}
    whole = {name: policy for name, policy in policies.items() if policy is not None}
    check = known_policies or registry_check(Registry.default())
    for where, message in check(whole, uses.keys() - (sections.keys() - whole.keys())):
        if where[:1] == ("use",):
            for place in uses.get(str(where[1]), ()):
                checker.complain(place, message)
        else:
            checker.complain(where, message, at_key=where[-2:-1] == ("parameters",))
