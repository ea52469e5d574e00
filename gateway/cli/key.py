"""``warmroute key``: makes an API key and the hash of it that goes into the configuration."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from gateway.cli.running import complain

if TYPE_CHECKING:
    from typing import Any

_EPILOG = """\
The key is shown once and kept nowhere: give it to whoever is to use it. The hash goes below the tenant, or on a line of its keys_file:

  tenants:
    shop:
      keys: ["sha256:..."]

`warmroute key --hash` reads a key that exists already from standard input and prints its hash only.
"""


def add_parser(commands: "Any") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "key",
        help="make an API key for a tenant",
        description="Make an API key and its hash.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tenant", nargs="?", default="NAME", help="whose it is to be; shown in the lines for the file only"
    )
    parser.add_argument("--hash", action="store_true", help="hash the key on standard input instead of making one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a key and its hash; 2 when the given one can't be used."""
    from gateway.admission.keys import MIN_LENGTH, hashed, new_key, usable  # noqa: PLC0415 - keeps `--help` quick

    if arguments.hash:
        key = sys.stdin.readline().strip()
        if not usable(key):
            complain(
                f"a key has at least {MIN_LENGTH} characters, all of them visible ASCII; give it on standard input"
            )
            return 2
        print(hashed(key))
        return 0
    key = new_key()
    print(f"key (shown only now):  {key}")
    print(f"for the configuration: tenants: {{{json.dumps(arguments.tenant)}: {{keys: [{json.dumps(hashed(key))}]}}}}")
    return 0
