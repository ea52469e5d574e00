"""All benchmarks, one after the other: `make bench`."""

import importlib
import pkgutil
import sys

import bench

FIRST = ("overhead", "streams")
HELPERS = ("clients", "processes", "schedule", "study_rows", "worker")
LONG = ("prime_day", "soak", "study", "agreement", "kill_one", "truth", "hits")


def main() -> None:
    """Run each benchmark with its defaults; arguments go to the first one (`make bench ARGS="--peers DIR"`)."""
    arguments = sys.argv[1:]
    found = [module.name for module in pkgutil.iter_modules(bench.__path__)]
    rest = [name for name in found if not name.startswith("_") and name not in (*FIRST, *HELPERS, *LONG)]
    for name in (*FIRST, *rest):
        print(f"\n== bench.{name} ==", flush=True)
        sys.argv = [f"bench.{name}", *(arguments if name == "overhead" else [])]
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
