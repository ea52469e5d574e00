"""``warmroute check``: says whether a configuration is right, and if not, what to change where."""

import argparse
import sys
from typing import TYPE_CHECKING

from gateway.config.dump import dump
from gateway.config.load import load
from gateway.config.problems import ConfigError
from gateway.config.schema import Address, Config, Model

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPILOG = """\
Nothing is started and no worker is contacted. Variables (${NAME}) must be set as they will be for `serve`.
Exit status: 0 when the file can be used, 2 when not; then every problem is on standard error with its line.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "check",
        help="check a configuration file and show what it means",
        description="Check a configuration file without starting anything.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file to check")
    parser.add_argument(
        "--print",
        dest="print_config",
        action="store_true",
        help="print the whole configuration as it will be used, defaults included and secrets left out, as YAML",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the file; 0 when it can be used, else 2."""
    try:
        config = load(arguments.config)
    except ConfigError as error:
        count = len(error.problems)
        print(error, file=sys.stderr)
        print(f"\n{count} problem{'s' if count > 1 else ''} in {arguments.config}", file=sys.stderr)
        return 2
    print(dump(config) if arguments.print_config else summary(arguments.config, config), end="")
    return 0


def summary(name: str, config: Config) -> str:
    """A short text about what a configuration would do."""
    rows = [("MODEL", "ALIASES", "POLICY", "WORKERS", "DRIVERS"), *(_row(model, config) for model in config.models)]
    workers = sum(len(model.workers) for model in config.models)
    return (
        f"{name} is right: {_count(len(config.models), 'model')}, {_count(workers, 'worker')}\n"
        f"listen {_address(config.listen)}  admin {_address(config.admin)}  traces {config.telemetry.traces.exporter}\n\n"
        f"{_table(rows)}\n"
    )


def _row(model: Model, config: Config) -> tuple[str, ...]:
    policy = model.policy
    if (section := config.policies.get(policy)) is not None:
        policy += f" ({section.preset})" if section.preset else " (own steps)"
    drivers = sorted({worker.driver for worker in model.workers})
    return (model.name, ", ".join(model.aliases) or "-", policy, str(len(model.workers)), ", ".join(drivers))


def _table(rows: "Sequence[tuple[str, ...]]") -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _address(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host and not address.host.startswith("[") else address.host
    return f"{host}:{address.port}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
