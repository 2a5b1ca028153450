"""A real pretrained model learns a real task on CPU: the recipes of the README, as they stand.

Needs the model: BAPO_SMOLLM2=DIR, as `bapo fetch-smollm2 DIR` writes it. `make test-integrations` does both.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("BAPO_SMOLLM2")
pytestmark = pytest.mark.skipif(MODEL is None, reason="needs SmolLM2: bapo fetch-smollm2 DIR, then BAPO_SMOLLM2=DIR")


def bapo(directory, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-m", "bapo.cli", *arguments], cwd=directory, env=environment, check=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the README's commands have been given."""
    path = tmp_path_factory.mktemp("sums")
    (path / "smollm2").symlink_to(MODEL)
    subprocess.run([sys.executable, ROOT / "examples" / "two_digit_sums.py", "sums"], cwd=path, check=True)
    bapo(path, "sft", "sums_sft")
    bapo(path, "train", "sums", "--steps", "20")  # half of it is enough to see
    yield path
    shutil.rmtree(path / "runs")  # gigabytes of checkpoints


def test_imitation_teaches_the_form(directory):
    summary = json.loads((directory / "runs/sums-sft/summary.json").read_text())
    assert summary["after"]["held_out/loss"] < 0.5 * summary["before"]["held_out/loss"]


def test_trying_teaches_the_sums(directory):
    summary = json.loads((directory / "runs/sums/summary.json").read_text())
    before, after = summary["before"], summary["after"]
    assert after["eval/avg"] > before["eval/avg_high"], (before["eval/avg"], after["eval/avg"])
    assert after["eval/avg"] > 1.5 * before["eval/avg"]


def test_the_exported_model_evaluates_by_itself(directory):
    out = directory / "greedy"
    options = ["--k", "1", "--temperature", "0", "--max-tokens", "5", "--problems", "64", "--chat", "no"]
    bapo(directory, "eval", "--model", "runs/sums/model", "--data", "sums/test.jsonl", *options, "--out", str(out))
    results = json.loads((out / "results.json").read_text())
    assert "SmolLM" in (directory / "smollm2" / "README.md").read_text()
    assert results["overall"]["avg"]["value"] > 0.1, results["overall"]
