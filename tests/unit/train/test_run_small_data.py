"""A run on a handful of problems: it evaluates on what is held out, always the same, and goes on where it stopped."""

import json
import math
from contextlib import redirect_stdout
from io import StringIO

import pytest

from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.train.run import resume, start

TEST = ["3,4,2=14:", "2,5,3=13:", "6,2,3=15:"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two steps on data with three held-out problems, evaluated after each, then resumed for two more."""
    root = tmp_path_factory.mktemp("small")
    for name, prompts in (("train", ["1,2,3=6:", "2,3,4=9:", "4,5,6=15:", "7,2,1=10:"]), ("test", TEST)):
        lines = [json.dumps({"prompt": prompt, "answer": "="}) + "\n" for prompt in prompts]
        (root / f"{name}.jsonl").write_text("".join(lines))
    (root / "small_reward.py").write_text("def score(response, answer):\n    return float(len(response) % 2)\n")
    values = {
        "steps": 2,
        "threads": 1,
        "device": "cpu",
        "out": str(root / "run"),
        "task": {
            "train": [str(root / "train.jsonl")],
            "test": [str(root / "test.jsonl")],
            "reward": "small_reward:score",
        },
        "rollout": {"prompts": 4, "responses": 4, "max_tokens": 16},
        "learn": {"batch_groups": 4},
        "eval": {"k": 2, "every": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        with redirect_stdout(StringIO()) as said:
            start(parse(Config, values, source="test"), plain=True)
        config = json.loads((root / "run" / "config.json").read_text())
        longer = parse(Config, config | {"steps": 4}, source="test")
        told = []
        patch.setattr("bapo.screen.view.PlainView.recall", lambda self, steps: told.extend(steps))
        resume(root / "run", config=longer, plain=True)
    return root / "run", config, told, said.getvalue()


def test_an_open_number_of_problems_becomes_what_is_held_out(finished):
    run, config, _, _ = finished
    assert config["eval"]["problems"] == 3
    (checkpoint, *_) = sorted((run / "checkpoints").glob("step-??????"))
    assert json.loads((checkpoint / "config.json").read_text())["eval"]["problems"] == 3


def test_every_evaluation_has_the_same_problems(finished):
    run, *_ = finished
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [(line["step"], line["eval/problems"]) for line in lines if line["kind"] == "eval"]
    assert evaluations[:1] == [(0, 3)]
    assert {problems for _, problems in evaluations} == {3}
    assert {step for step, _ in evaluations} == {0, 1, 3, 4}  # the one after step 2 was cut off with the end


def test_a_resumed_view_is_told_what_the_first_one_was(finished):
    run, _, told, _ = finished
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["kind"] == "rollout"]
    assert [(step, metrics["reward"]) for step, metrics, _ in told] == list(enumerate(rewards[:2], start=1))
    assert all(timing["seconds"] > 0 for _, _, timing in told)
    assert not any("kind" in metrics for _, metrics, _ in told)


def test_a_run_ends_with_what_to_do_next(finished):
    run, _, _, said = finished
    lines = said.splitlines()
    assert lines[-4] == f"next            bapo report {run}"
    assert lines[-3].strip() == f"hf upload demo-bapo {run / 'model'}"
    assert "\n    hf upload demo-bapo MODEL\n" in (run / "model" / "README.md").read_text()
    assert lines[-2].strip().startswith(f"bapo eval --model {run / 'model'} --data {run.parent / 'test.jsonl'} --k 2")
    assert "--reward small_reward:score" in lines[-2]
    assert lines[-1].strip() == f"bapo resume {run} --steps 4"


PARTS = """
def odd(response, answer):
    return float(len(response) % 2)
def brief(completions, completion_ids, note, **kwargs):
    assert len(completions) == 4 and note == ["kept"] * 4
    return [-len(ids) / 16 if text != "" else None for text, ids in zip(completions, completion_ids, strict=True)]
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two weighted rewards under gdpo: three steps at a stretch, and two that are resumed for a third, isolated."""
    root = tmp_path_factory.mktemp("several")
    prompts = ["1,2,3=6:", "2,3,4=9:", "4,5,6=15:", "7,2,1=10:"]
    lines = [json.dumps({"prompt": prompt, "answer": "=", "note": "kept"}) + "\n" for prompt in (*prompts, *TEST)]
    (root / "rows.jsonl").write_text("".join(lines))
    (root / "part_rewards.py").write_text(PARTS)
    values = {
        "threads": 1,
        "device": "cpu",
        "task": {"train": [str(root / "rows.jsonl")], "holdout": 0.4, "reward_weights": [1.0, 0.5]},
        "rollout": {"prompts": 4, "responses": 4, "max_tokens": 16},
        "learn": {"batch_groups": 4, "advantages": "gdpo"},
        "eval": {"k": 4, "every": 0},
    }
    values["task"]["reward"] = ["part_rewards:odd", "part_rewards:brief"]
    seen = []
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()):
        patch.syspath_prepend(str(root))
        apart = {"task": values["task"] | {"reward_isolated": True}, "steps": 2, "out": str(root / "two")}
        start(parse(Config, values | apart, source="test"), plain=True)
        longer = parse(Config, json.loads((root / "two" / "config.json").read_text()) | {"steps": 3}, source="test")
        resume(root / "two", config=longer, plain=True)

        def gdpo(rewards, groups, weights):
            seen.append((rewards.tolist(), groups.tolist(), weights, real(rewards, groups, weights=weights)))
            return seen[-1][3]

        from bapo.learn.packing import gdpo as real

        patch.setattr("bapo.learn.packing.gdpo", gdpo)
        start(parse(Config, values | {"steps": 3, "out": str(root / "three")}, source="test"), plain=True)
    return root / "two", root / "three", seen


def of_kind(run, *kinds):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def test_a_run_with_two_rewards_logs_each_by_name_and_resumes_exactly_also_in_processes_of_their_own(several):
    two, three, _ = several
    assert of_kind(two, "rollout", "update") == of_kind(three, "rollout", "update")
    assert (two / "rollouts.jsonl").read_bytes() == (three / "rollouts.jsonl").read_bytes()
    for line in of_kind(three, "rollout"):
        assert line["reward"] == pytest.approx(line["reward/odd"] + 0.5 * line["reward/brief"], abs=1e-12)
    sample = json.loads((three / "rollouts.jsonl").read_text().splitlines()[0])
    for trajectory in sample["trajectories"]:
        assert trajectory["rewards"]["brief"] == -len(trajectory["tokens"]) / 16
        assert trajectory["reward"] == trajectory["rewards"]["odd"] + 0.5 * trajectory["rewards"]["brief"]
    assert "reward: part_rewards:odd, part_rewards:brief" in (three / "model" / "README.md").read_text()


def test_the_advantages_of_a_run_with_gdpo_are_those_of_a_literal_computation(several):
    *_, seen = several
    assert len(seen) >= 3
    for rows, owners, weights, found in seen:
        totals = [0.0] * len(rows)
        for k, weight in enumerate(weights):
            for owner in set(owners):
                members = [i for i, other in enumerate(owners) if other == owner]
                mean = sum(rows[i][k] for i in members) / len(members)
                std = math.sqrt(sum((rows[i][k] - mean) ** 2 for i in members) / (len(members) - 1))
                for i in members:
                    totals[i] += weight * (rows[i][k] - mean) / (std + 1e-6)
        mean = sum(totals) / len(totals)
        std = math.sqrt(sum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
        expected = [(total - mean) / (std + 1e-6) for total in totals]
        assert found.advantages.tolist() == pytest.approx(expected, abs=1e-5)  # float32, of sums over 16 responses


DEADLY = """
import os
def score(response):
    number = sum(map(ord, response))
    if number % 3 == 0:
        os._exit(number % 5)
    return float(number % 2)
"""


def test_a_run_goes_on_when_its_reward_function_ends_its_process(tmp_path, monkeypatch, capfd):
    rows = [{"prompt": prompt, "answer": "="} for prompt in ("1,2,3=6:", "2,3,4=9:", *TEST)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "deadly_reward.py").write_text(DEADLY)
    monkeypatch.chdir(tmp_path)
    task = {"train": ["rows.jsonl"], "holdout": 0.5, "reward": "deadly_reward:score", "reward_isolated": True}
    values = {"steps": 1, "threads": 1, "device": "cpu", "out": "run", "task": task, "eval": {"k": 2, "every": 0}}
    values |= {"rollout": {"prompts": 2, "responses": 8, "max_tokens": 16}, "learn": {"batch_groups": 2}}
    start(parse(Config, values, source="test"), plain=True)
    failures = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    assert failures
    for failure in failures:
        number = sum(map(ord, failure["response"]))
        assert (failure["cause"], number % 3) == (f"crash: exit status {number % 5}", 0)
    (line,) = of_kind(tmp_path / "run", "rollout")
    assert line["reward_failures"] == len(failures) < 16
    assert "no reward for" in capfd.readouterr().out
