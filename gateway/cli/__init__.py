"""The command line: one file a command.

Exit status 0 when all went well, 1 when the work failed, 2 for wrong use or a wrong configuration.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from gateway import __version__

COMMANDS = ("serve", "demo", "check", "tokens", "explain", "top", "replay", "key", "simulate-worker")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's own arguments) names and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="warmroute",
        description="A cache-aware gateway in front of fleets of LLM inference workers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Start with `warmroute demo`: a whole fleet on this machine, no accelerator needed.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"gateway.cli.{name.replace('-', '_')}").add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return status
