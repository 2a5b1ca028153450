"""What a run says about the speed of its precision."""

import json
import time

import pytest
import torch

from bapo.cli import run
from bapo.config.run import Config
from bapo.train.machine import SLOWER, resolve, slow_precision
from tests import supervised

NO_STEPS = ["--steps", "1", "--rollout.prompts", "2", "--rollout.responses", "2", "--rollout.max-tokens", "4"]
NO_STEPS += ["--learn.batch-groups", "2", "--eval.problems", "1", "--eval.k", "1", "--eval.every", "0"]


def product_seconds(dtype):
    """The best time of a few matrix products in one thread, measured here without the code under test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix, times = torch.ones(192, 192, dtype=dtype), []
    for _ in range(4):
        began = time.thread_time()
        matrix.mm(matrix)
        times.append(time.thread_time() - began)
    torch.set_num_threads(threads)
    return min(times)


@pytest.fixture(scope="module")
def is_slow():
    """Whether bfloat16 is slow on this CPU."""
    times = product_seconds(torch.bfloat16) / product_seconds(torch.float32)
    if SLOWER / 2 < times < 2 * SLOWER:
        pytest.skip("bfloat16 is neither clearly slow nor clearly fast on this CPU")
    return times > SLOWER


def test_a_dry_run_warns_of_a_precision_that_the_cpu_is_slow_in(is_slow, capsys):
    assert run(["train", "--dry-run", "--device", "cpu", "--model.dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert ("\nwarning    model.dtype='bfloat16' is about " in said) == is_slow
    assert ("Set model.dtype = 'float32' or 'auto'." in said) == is_slow
    assert ("Nothing is wrong." in said) == (not is_slow)
    assert "Without --dry-run, the same command starts the run." in said


def test_a_run_notes_it_too(is_slow, tmp_path, capsys):
    words = ["--device", "cpu", "--model.dtype", "bfloat16", "--threads", "1", "--out", str(tmp_path / "run")]
    assert run(["train", *words, *NO_STEPS]) == 0
    said = capsys.readouterr()
    assert ("model.dtype='bfloat16' is about " in said.out + said.err) == is_slow
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["dtype"] == "bfloat16"


def test_so_does_supervised_training(is_slow, tmp_path, capsys):
    data = supervised.write_rows(tmp_path / "sums.jsonl", supervised.sums()[:2])
    model = supervised.saved_model(tmp_path / "model")
    words = ["--model.path", str(model), "--task.train", str(data), "--device", "cpu", "--threads", "1"]
    words += ["--model.dtype", "bfloat16", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert run(["sft", *words]) == 0
    said = capsys.readouterr()
    assert ("model.dtype='bfloat16' is about " in said.out + said.err) == is_slow


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"dtype": "float32"}},
        {"model": {"dtype": "auto"}},
        {"model": {"dtype": "bfloat16"}, "cluster": {"rollouts": 1, "address": "auto"}},
    ],
)
def test_float32_and_the_cpus_of_other_machines_are_not_judged(values):
    assert list(slow_precision(resolve(Config.model_validate(values | {"device": "cpu"})))) == []


def test_measuring_leaves_the_number_of_threads_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    list(slow_precision(resolve(Config.model_validate({"device": "cpu", "model": {"dtype": "bfloat16"}}))))
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, 2048),
        ({"objective": {"name": "bapo"}}, 16384),  # a search passes all but the first part twice
        ({"objective": {"name": "bapo", "scope": "microbatch"}}, 16384),  # parts have bounds of their own
        ({"objective": {"name": "m2po"}}, 16384),  # looks at a whole update
        ({"objective": {"name": "grpo"}, "learn": {"micro_tokens": 100}}, 100),
        ({"objective": {"sensor": "update"}}, 16384),
    ],
)
def test_updates_are_cut_small_on_a_cpu_where_that_changes_nothing(values, tokens):
    assert resolve(Config.model_validate({"device": "cpu", **values})).learn.micro_tokens == tokens
