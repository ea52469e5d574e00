"""The short form of `make soak`: every kind of fault once, under clients of which a third leaves early."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory and descriptors are read from /proc")
def test_under_every_kind_of_fault_no_request_is_lost_and_no_error_is_unexplained():
    command = [sys.executable, "-m", "bench.soak", "--schedule", "all", "--pause", "1", "--think", "1"]
    done = subprocess.run(
        [*command, "--seconds", "40", "--clients", "60"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "nothing is left over" in said
    assert "upstream_timeout_first_byte" in said or "upstream_timeout_idle" in said, "a worker that hangs was noticed"
