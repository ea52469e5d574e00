"""The same targets, led by coverage: ``python tests/fuzz/coverage_guided.py events -max_total_time=600``.

Needs ``pip install atheris``, which is in no lock: it is for whoever wants to fuzz for hours, and the suite does without.
"""

import logging
import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
with atheris.instrument_imports(include=["gateway", "yaml", "python_multipart"]):
    from targets import TARGETS
from seeds import SEEDS  # noqa: E402


def main() -> None:
    """Fuzz one target from its good inputs; further arguments are libFuzzer's."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: coverage_guided.py {{{'|'.join(TARGETS)}}} [libFuzzer's options]")
    name = sys.argv.pop(1)
    logging.disable()
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS[name]):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([*sys.argv, corpus], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
