"""The examples run as their first lines say, and stay small enough to read."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_minimal_loop_learns_and_prints_a_table():
    script = EXAMPLES / "minimal_loop.py"
    assert len(script.read_text().splitlines()) <= 150
    command = [sys.executable, script, "--updates", "64", "--seeds", "1"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    success = {line[:14].strip(): line[14:].split() for line in lines if line}
    before = float(success["before"][0])
    assert {"grpo", "clip_higher", "bapo"} <= success.keys()
    assert all(float(success[name][0]) > before + 0.1 for name in ("grpo", "clip_higher", "bapo"))
