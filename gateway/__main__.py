"""`python -m gateway` is the same as the installed command `warmroute`."""

import sys

from gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
