"""A verifier that fails is told, never trained on."""

import json

import pytest

from bapo.cli import run

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

def leaves(response, answer):
    import sys
    if response != answer:
        sys.exit()
    return 1.0
"""


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
    assert f"{told} left out, because the verifier failed: " in capsys.readouterr().out
    lines = [json.loads(line) for line in (here / "some/metrics.jsonl").read_text().splitlines()]
    told = sum(line["reward_failures"] for line in lines if line["kind"] == "rollout")
    assert told == len(failures) > 0


def test_a_verifier_that_always_fails_stops_the_run_and_says_why(here, capsys):
    assert run(["train", "recipe.toml", "--task.reward", "own_rewards:never_on_samples", "--out", "none"]) == 1
    told = capsys.readouterr().err
    assert "the verifier failed on all 32 responses of step 1" in told
    assert "KeyError" in told
    assert not (here / "none/summary.json").exists()


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
