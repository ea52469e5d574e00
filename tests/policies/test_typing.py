import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_third_party_policies_type_check_and_wrong_ones_do_not():
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=.mypy_cache/typing-api"]
    target = str(Path(__file__).with_name("typing_api.py"))
    done = subprocess.run([*command, target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
