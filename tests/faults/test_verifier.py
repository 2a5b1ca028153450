"""A verifier that fails is told, never trained on."""

import json
import re

import pytest

from bapo.cli import run
from bapo.report.arms import arms_of
from bapo.report.verdict import signs
from bapo.runs.read import read_run

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 3)]
REWARDS = """
def sometimes(response, answer):
    if len(response) % 2:
        raise KeyError("odd")
    return float(len(response) % 4 == 0)

def never(response, answer):
    raise KeyError("never")

def never_on_samples(response, answer):
    if response != answer:
        raise KeyError("never")
    return 1.0

def broken_problems(response, answer):
    if int(answer) % 3 == 0:
        raise KeyError("broken")
    return float(len(response) % 2)

def never_in_training(response, answer):
    if response != answer and int(answer) <= 8:
        raise KeyError("never")
    return 1.0

def nothing(response, answer):
    return float(response == answer)

def mostly_fails(response, answer):
    kind = sum(map(ord, response)) % 3
    if response != answer and kind:
        raise ValueError("this" if kind == 1 else "that")
    return 1.0

def leaves(response, answer):
    import sys
    if response != answer:
        sys.exit()
    return 1.0
"""
EIGHT = ("--rollout.prompts", "8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    for name, rows in (("train", SUMS[:12]), ("test", SUMS[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {"prompts": 4, "responses": 8, "max_tokens": 12}
    recipe = ["steps = 2", "[task]", 'name = "data"', 'train = ["train.jsonl"]', 'test = ["test.jsonl"]']
    recipe += ["[rollout]", *(f"{key} = {value}" for key, value in small.items())]
    recipe += ["[learn]", "batch_groups = 4", "[eval]", "problems = 4", "k = 2", "every = 0"]
    (tmp_path / "recipe.toml").write_text("\n".join(recipe))
    return tmp_path


def test_failed_responses_are_logged_with_their_cause_and_not_trained_on(here, capsys):
    assert run(["train", "recipe.toml", "--task.reward", "own_rewards:sometimes", "--out", "some"]) == 0
    failures = [json.loads(line) for line in (here / "some/failures.jsonl").read_text().splitlines()]
    assert all("KeyError" in failure["cause"] and len(failure["response"]) % 2 for failure in failures)
    told = "1 response was" if len(failures) == 1 else f"{len(failures)} responses were"
    said = capsys.readouterr().out
    assert f"{told} left out, because the verifier failed: " in said
    for step in {failure["step"] for failure in failures}:
        count = sum(failure["step"] == step for failure in failures)
        of = "1 response" if count == 1 else f"{count} responses"
        assert f"step {step}: no reward for {of}; the cause: KeyError: 'odd'" in said
    lines = [json.loads(line) for line in (here / "some/metrics.jsonl").read_text().splitlines()]
    told = sum(line["reward_failures"] for line in lines if line["kind"] == "rollout")
    assert told == len(failures) > 0


@pytest.mark.parametrize(
    ("reward", "warning"),
    [
        ("nothing", r"the reward was 0 for all of \d+ responses\. Read some of them in rollouts\.jsonl"),
        ("mostly_fails", r"the verifier failed on \d+ of \d+ responses; the most frequent cause \(\d+ times\): Val"),
    ],
)
def test_a_run_that_could_not_learn_says_so_before_anything_else(here, capsys, reward, warning):
    assert run(["train", "recipe.toml", "--task.reward", f"own_rewards:{reward}", "--out", "none"]) == 0
    said = capsys.readouterr().out
    last = said[said.index("warning: ") :]
    assert re.match(f"warning: {warning}", last), last
    assert "4 held-out problems, temperature" in last
    assert "trained model" in last
    assert f"Warning: {warning[:15]}" in (here / "none/model/README.md").read_text()
    assert re.match(warning, signs(arms_of([read_run(here / "none")]))[0])


def test_a_verifier_that_always_fails_stops_the_run_and_says_why(here, capsys):
    assert run(["train", "recipe.toml", "--task.reward", "own_rewards:never_on_samples", *EIGHT, "--out", "none"]) == 1
    told = capsys.readouterr().err
    assert "the verifier failed on all 64 responses of step 1" in told
    assert "KeyError" in told
    assert not (here / "none/summary.json").exists()


FEW_TOKENS = ("--offpolicy.partial_budget", "40", "--offpolicy.max_staleness", "40")


def steps_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "rollout"]


def test_broken_problems_do_not_end_a_run_whose_steps_finish_a_single_group(here, capsys):
    asked = ["--task.reward", "own_rewards:broken_problems", *FEW_TOKENS, "--steps", "16", "--checkpoint-every", "1"]
    assert run(["train", "recipe.toml", *asked, "--out", "few"]) == 0
    alone = [line["step"] for line in steps_of(here / "few") if line["reward_failures"] and "reward" not in line]
    assert alone, "no step had a broken problem alone"
    said = capsys.readouterr().out
    assert f"step {alone[0]}: no reward, because the verifier failed on all 8 responses; the cause: KeyError" in said
    assert "step 1: no update. No group is finished, so there are no metrics: 32 responses will be continued" in said


def test_a_verifier_that_always_fails_ends_a_run_at_the_same_step_with_and_without_a_stop(here, capsys):
    asked = ["--task.reward", "own_rewards:never_in_training", *FEW_TOKENS, "--checkpoint-every", "1"]
    asked += ["--steps", "90", "--checkpoint-keep", "90"]
    assert run(["train", "recipe.toml", *asked, "--out", "never"]) == 1
    told = capsys.readouterr().err
    assert re.search(r"the verifier failed on all (64|72|80) responses of steps \d+ to \d+\.", told), told
    saved = sorted((here / "never/checkpoints").iterdir())
    assert len(saved) > 4
    for name in (saved[-1].name, saved[len(saved) // 2].name):
        assert run(["resume", "never", "--from", name]) == 1
        assert capsys.readouterr().err == told


def test_a_verifier_that_fails_on_a_reference_answer_is_refused_before_the_run(here, capsys):
    assert run(["train", "recipe.toml", "--task.reward", "own_rewards:never", "--out", "none"]) == 2
    assert "fails on the first problem of task.train, even if the response is its reference" in capsys.readouterr().err
    assert not (here / "none").exists()


def test_a_reward_that_exits_is_a_failed_verifier_not_the_end_of_the_program(here, capsys):
    assert run(["train", "recipe.toml", "--task.reward", "own_rewards:leaves", "--out", "left"]) == 1
    assert "The first failure was: SystemExit." in capsys.readouterr().err
    (here / "exits_on_import.py").write_text("import sys\nsys.exit()")
    assert run(["train", "recipe.toml", "--task.reward", "exits_on_import:reward", "--out", "gone"]) == 2
    assert "importing exits_on_import failed: SystemExit." in capsys.readouterr().err
    assert not (here / "gone").exists()
