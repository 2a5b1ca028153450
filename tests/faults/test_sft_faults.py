"""The same bad days for a supervised run: killed, interrupted, damaged, or its data changed in between."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from bapo.runs.write import RunDirectory
from tests.processes import PATIENCE, bapo, bapo_anew, started
from tests.supervised import saved_model, sums, write_rows

UPDATES = 60
LEARN = [
    *("--device", "cpu", "--threads", "1", "--epochs", "10", "--task.holdout", "0.05"),
    *("--learn.batch-sequences", "16", "--learn.lr", "3e-3", "--eval.every", "7", "--checkpoint-every", "5"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    data = write_rows(root / "sums.jsonl", sums())
    return ["--model.path", str(saved_model(root / "model")), "--task.train", str(data)]


@pytest.fixture(scope="module")
def uninterrupted(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    result = bapo_anew("sft", *sources, *LEARN, "--out", out)
    assert result.returncode == 0, result.stderr
    assert json.loads((out / "data.json").read_text())["updates"] == UPDATES
    return out


def stopped(sources, out, number, at):
    """A run that gets a signal once it has logged so many updates."""
    process = started("sft", *sources, *LEARN, "--out", out, log=out.with_suffix(".log"))
    timing = out / "timing.jsonl"
    while process.is_alive() and not (timing.exists() and timing.read_bytes().count(b"\n") >= at):
        time.sleep(0.002)
    os.kill(process.pid, number)
    process.join(PATIENCE)
    assert not (out / "summary.json").exists(), out.with_suffix(".log").read_text()
    return process.exitcode


def assert_same_run(out, expected):
    assert (out / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (out, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("attempt", [0, 1])
def test_kill_9_at_a_random_moment_then_resume_is_the_uninterrupted_run(attempt, sources, uninterrupted, tmp_path):
    out = tmp_path / "run"
    stopped(sources, out, signal.SIGKILL, random.Random().randint(1, UPDATES - 15))
    result = bapo("resume", out)
    assert result.returncode == 0, result.stderr
    assert_same_run(out, uninterrupted)
    assert "complete" in bapo("resume", out).stdout


def test_a_signal_saves_the_update_and_exits_130(sources, uninterrupted, tmp_path):
    out = tmp_path / "run"
    assert stopped(sources, out, signal.SIGTERM, 8) == 130
    assert f"bapo resume {out}" in out.with_suffix(".log").read_text()
    assert bapo("resume", out).returncode == 0
    assert_same_run(out, uninterrupted)


def test_a_learning_rate_that_could_make_weights_infinite_is_refused_with_a_sentence(sources, tmp_path):
    diverging = [*LEARN, "--learn.lr", "1e30", "--learn.warmup", "0", "--out", tmp_path / "run"]
    result = bapo("sft", *sources, *diverging)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "learn.lr = 1e+30: give 1000.0 or less" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_killed_after_its_export_can_be_completed(uninterrupted, tmp_path):
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    (out / "summary.json").unlink()
    assert bapo("resume", out).returncode == 0
    assert_same_run(out, uninterrupted)


def test_a_damaged_account_of_the_data_is_written_again(uninterrupted, tmp_path):
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    (out / "summary.json").unlink()
    (out / "data.json").write_text('{"updates": 7}')
    assert bapo("resume", out).returncode == 0
    assert (out / "data.json").read_bytes() == (uninterrupted / "data.json").read_bytes()


def test_a_run_at_work_is_not_resumed(uninterrupted, tmp_path):
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    (out / "summary.json").unlink()
    before = (out / "metrics.jsonl").read_bytes()
    with RunDirectory(out).held():
        result = bapo("resume", out)
    assert (result.returncode, f"another process is at work on the run in {out}" in result.stderr) == (2, True)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_changed_data_and_damaged_checkpoints_are_refused(sources, uninterrupted, tmp_path):
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    (out / "summary.json").unlink()
    config = json.loads((out / "config.json").read_text())
    before = (out / "metrics.jsonl").read_bytes()

    def resumed_with(rows):
        data = write_rows(tmp_path / "other.jsonl", rows)
        changed = config | {"task": config["task"] | {"train": [str(data)]}}
        (out / "config.json").write_text(json.dumps(changed))
        return bapo("resume", out)

    result = resumed_with(sums()[::-1])
    assert (result.returncode, "changed since" in result.stderr) == (3, True)
    assert resumed_with(sums()).returncode == 0  # the same rows in another file are the same data
    assert (out / "metrics.jsonl").read_bytes() == before
    (out / "summary.json").unlink()
    (tmp_path / "other.jsonl").unlink()
    result = bapo("resume", out)
    assert (result.returncode, "other.jsonl" in result.stderr) == (2, True)
    (out / "config.json").write_text(json.dumps(config))
    weights = sorted((out / "checkpoints").glob("step-*"))[-1] / "shard-00001.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    result = bapo("resume", out)
    assert (result.returncode, "changed since it was written" in result.stderr) == (3, True)
