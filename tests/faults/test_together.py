"""Two ranks live one run: it is that of one process, it stops and resumes as a whole, and no rank is left waiting."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.processes import PATIENCE, bapo, started_together, torchrun
from tests.supervised import saved_model, sums, write_rows

KEYS = {
    "steps": 3,
    "threads": 1,
    "device": "cpu",
    "checkpoint_every": 100,
    "checkpoint_minutes": 1e-9,  # the clocks of the ranks differ, and the first one decides
    "checkpoint_keep": 9,
    "rollout": {"prompts": 4, "responses": 4, "max_tokens": 48},
    "offpolicy": {"reuse": 2, "partial_budget": 350, "max_staleness": 8},
    "learn": {"batch_groups": 4, "micro_tokens": 1024},
    "eval": {"problems": 3, "k": 2, "every": 2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("together")
    (directory / "recipe.json").write_text(json.dumps(KEYS))
    return directory


def begun(place, name, *keys):
    command = ["train", place / "recipe.json", "--out", place / name, *keys]
    return started_together(2, *command, log=place / f"{name}.log")


def ended(processes):
    until = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def steps_of(path):
    log = path / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if line["kind"] == "rollout"]


def wait_for_step(path, step, processes):
    until = time.monotonic() + PATIENCE
    while len(steps_of(path)) < step:
        assert time.monotonic() < until
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)


def said(place, name, rank=0):
    return Path(f"{place}/{name}.log.{rank}").read_text()


@pytest.fixture(scope="module")
def whole(place):
    """A run of two ranks that nobody disturbed."""
    assert ended(begun(place, "whole")) == [0, 0], said(place, "whole") + said(place, "whole", 1)
    return place / "whole"


@pytest.fixture(scope="module")
def killed(place):
    """A run of two ranks after whose first step one was killed: its directory, and what became of the other when."""
    processes = begun(place, "killed")
    wait_for_step(place / "killed", 1, processes)
    os.kill(processes[0].pid, signal.SIGKILL)
    began = time.monotonic()
    codes = ended(processes)
    assert not (place / "killed/summary.json").exists()
    return place / "killed", codes[1], time.monotonic() - began


def test_two_ranks_sample_and_learn_what_one_process_does(place, whole):
    assert bapo("train", place / "recipe.json", "--out", place / "alone", "--steps", 1).returncode == 0
    ours, theirs = steps_of(whole)[0], steps_of(place / "alone")[0]
    assert ours["rollout/sampled_tokens"] > 0
    assert ours["rollout/admitted"] == theirs["rollout/admitted"]
    assert 350 - 2 < ours["rollout/sampled_tokens"] <= 350  # both parts of the budget
    assert said(place, "whole", 1) == ""  # one rank speaks for both
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    assert model.dtype == torch.float32


def test_a_killed_run_resumes_bit_for_bit_under_torchrun(whole, killed, place):
    copy = shutil.copytree(killed[0], place / "again")
    done = torchrun(2, "resume", copy)
    assert done.returncode == 0, done.stderr
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (copy / name).read_bytes() == (whole / name).read_bytes(), name


def test_it_resumes_in_one_process_and_says_that_this_is_not_bit_for_bit(whole, killed, place):
    copy = shutil.copytree(killed[0], place / "on-one")
    found = bapo("resume", copy)
    assert found.returncode == 0, found.stderr
    assert "the checkpoint was written by 2 ranks, and there are 1 now" in found.stdout
    assert len(steps_of(copy)) == len(steps_of(whole)) == 3


def test_a_signal_on_one_rank_stops_both_after_the_same_step(place):
    processes = begun(place, "stopped")
    wait_for_step(place / "stopped", 1, processes)
    os.kill(processes[1].pid, signal.SIGTERM)
    assert ended(processes) == [130, 130], said(place, "stopped")
    done = len(steps_of(place / "stopped"))
    assert (place / f"stopped/checkpoints/step-{done:06d}/manifest.json").exists()
    assert f"stopped after step {done}" in said(place, "stopped", 1)


def test_a_rank_that_dies_does_not_leave_the_other_waiting(killed, place):
    _, code, seconds = killed
    assert code == 1
    assert seconds < PATIENCE / 2
    assert "rank 1 lost another rank" in said(place, "killed", 1)
    assert "Traceback" not in said(place, "killed", 1)


def test_a_full_disk_on_one_rank_is_told_by_all(place):
    command = ["train", place / "recipe.json", "--out", place / "full"]
    processes = started_together(2, *command, log=place / "full.log", largest_file={1: 20_000})
    assert 0 not in ended(processes)
    assert "rank 1 could not write its shards" in said(place, "full", 0)
    assert not list((place / "full/checkpoints").glob("step-000000*"))


def test_ranks_learn_low_rank_additions_from_demonstrations(place):
    source = ["--model.path", saved_model(place / "tiny"), "--task.train", write_rows(place / "sums.jsonl", sums())]
    options = ["--device", "cpu", "--threads", 1, "--epochs", 2, "--model.lora.rank", 4, "--learn.lr", "3e-3"]
    command = ["sft", *source, *options, "--task.holdout", 0.1, "--learn.activation-checkpointing"]
    processes = started_together(2, *command, "--out", place / "sft", log=place / "sft.log")
    alone = bapo(*command, "--out", place / "sft-alone")
    assert ended(processes) == [0, 0], said(place, "sft")
    assert alone.returncode == 0, alone.stderr
    ours, theirs = (json.loads((place / name / "summary.json").read_text()) for name in ("sft", "sft-alone"))
    for when in ("before", "after"):
        assert ours[when]["held_out/loss"] == pytest.approx(theirs[when]["held_out/loss"], rel=1e-4)
    assert ours["after"]["held_out/loss"] < ours["before"]["held_out/loss"]
    ours, theirs = (load_file(place / name / "model/model.safetensors") for name in ("sft", "sft-alone"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_close(ours[name], tensor, rtol=0, atol=1e-4)
    assert (place / "sft/adapter/adapter_model.safetensors").exists()
