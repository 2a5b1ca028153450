"""The examples run as their first lines say, and stay small enough to read."""

from pathlib import Path

from tests.processes import script

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_minimal_loop_learns_and_prints_a_table():
    example = EXAMPLES / "minimal_loop.py"
    assert len(example.read_text().splitlines()) <= 150
    done = script(example, "--updates", "64", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    success = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines() if line}
    before = float(success["before"][0])
    assert {"grpo", "clip_higher", "bapo"} <= success.keys()
    assert all(float(success[name][0]) > before + 0.1 for name in ("grpo", "clip_higher", "bapo"))
