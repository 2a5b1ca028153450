"""The GPU benchmark's script works: on CPU with very small sizes, and with TRL where it is installed."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.processes import script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments):
    return script(SCRIPT, *arguments, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def test_help_names_every_section_and_needs_no_gpu():
    result = run("--help")
    assert result.returncode == 0, result.stderr
    assert all(f"    {section} " in result.stdout for section in ("engine", "learner", "bounds", "step"))


def test_an_unknown_section_is_refused():
    result = run("engines")
    assert result.returncode == 2
    assert "no section engines" in result.stderr


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "numbers.json"
    result = run("--tiny", "--generate-batches", "4", "--json", path)
    assert result.returncode == 0, result.stderr
    assert "ended early" not in result.stdout
    measured = json.loads(path.read_text())["records"]
    return {(record["section"], record["case"], record["name"]): record for record in measured}


def test_tiny_sizes_measure_our_side_of_every_section(records):
    ours = {key: record for key, record in records.items() if key[2].startswith("ours")}
    assert {section for section, _, _ in ours} == {"engine", "learner", "step"}
    assert all(record.get("tokens_per_s", 0) > 0 for record in ours.values()), ours
    assert records["bounds", "4,096", "loss, forward + backward"]["ours, gradient"].endswith("x")


def test_tiny_sizes_measure_the_references_that_need_nothing_installed(records):
    for key in [("engine", "tiny x 4", "generate"), ("learner", "tiny", "padded, full logits")]:
        assert records[key].get("tokens_per_s", 0) > 0, records[key]


def test_trl_is_measured_or_said_to_be_missing(records):
    for section in ("learner", "step"):
        record = records[section, "tiny", "TRL"]
        if importlib.util.find_spec("trl") is None:
            assert "No module named" in record["unavailable"]
        else:
            assert record.get("tokens_per_s", 0) > 0, record
