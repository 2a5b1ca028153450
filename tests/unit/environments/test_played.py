"""Runs with environments: their problems, what scores them, what a dry run shows, and the game to start from."""

import json

import pytest

from bapo.cli import run
from bapo.config.recipe import parse, read_recipe
from bapo.config.run import Config
from bapo.demo import model_path
from bapo.environments.conversations import Conversations
from bapo.environments.played import conversations_of, rehearse
from bapo.models.loading import outline_policy
from bapo.tasks.data.problems import load_rows
from bapo.train.build import make_task
from tests.unit.environments import people

HERE = people.__name__


@pytest.fixture(scope="module")
def policy():
    return outline_policy(str(model_path()))


def made(policy, **task):
    config = parse(Config, {"task": task}, source="test")
    return make_task(config, policy)[0], config


def test_an_environment_that_needs_no_data_has_seeds_for_problems(policy):
    task, config = made(policy, environment=f"{HERE}:Echo", environment_train=3, environment_test=2)
    assert config.task.name == "environment"
    assert [problem.id for problem in task.train] == ["train-0", "train-1", "train-2"]
    assert [problem.id for problem in task.test] == ["test-0", "test-1"]
    conversations = conversations_of(task, config.task, policy, config.rollout.max_tokens)
    assert isinstance(conversations, Conversations)
    assert conversations.max_turns == config.task.turns
    told = dict(rehearse(task, policy))
    assert told["turn"].startswith("0\n")
    assert "6 tokens that are read and not trained on" in told["answer"]
    assert told["reward"] == "0.25"
    task.environments.close()


def test_several_environments_take_turns(policy):
    with pytest.raises(ValueError, match="cannot be told of its tools"):
        made(policy, environment=f"{HERE}:ALL")
    task, _ = made(policy, environment=f"{HERE}:GAMES", environment_train=3)
    assert [problem.extra["environment"] for problem in task.train] == ["echo", "twice", "echo"]
    task.environments.close()


def test_rows_need_neither_prompt_nor_answer_and_may_be_equal(tmp_path, policy):
    rows = [
        {"prompt": "1+1=", "level": 1},
        {"prompt": "1+1=", "level": 1},
        {"level": 2},
        {"question": "?", "answer": 3},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_rows([str(path)], None, None)
    assert [(problem.prompt, problem.answer) for problem in problems] == [("1+1=", None)] * 2 + [("", None), ("?", "3")]
    assert len({problem.id for problem in problems}) == 4
    assert [problem.id for problem in load_rows([str(path)], None, None)] == [problem.id for problem in problems]
    assert problems[2].extra == {"level": 2}
    task, _ = made(policy, train=[str(path)], holdout=0.25, environment=f"{HERE}:Echo")
    assert (len(task.train), len(task.test)) == (3, 1)
    task.environments.close()


def test_rewards_that_nobody_could_give_or_would_read_are_refused(policy):
    with pytest.raises(ValueError, match=r"Echo has rewards of its own"):
        made(policy, environment=f"{HERE}:Echo", reward=f"{HERE}:backwards")
    with pytest.raises(ValueError, match=r"gives no reward, and there are no answers to compare with"):
        made(policy, environment=f"{HERE}:Silent")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"turns": 3}, "task.turns is about environments"),
        ({"tool_seconds": 3, "train": ["a"], "test": ["b"]}, "task.tool_seconds is about environments"),
        ({"environment_train": 3}, "task.environment_train belongs to task.name='environment'"),
        ({"name": "gym", "gym": {"gcd": {}}, "environment": "a:b"}, "is for one turn"),
        ({"name": "environment"}, "needs an environment"),
    ],
)
def test_keys_that_mean_nothing_together_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        parse(Config, {"task": values}, source="test")


def test_the_game_to_start_from_is_played_and_learned_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "game"]) == 0
    small = [
        "--rollout.prompts",
        "2",
        "--rollout.responses",
        "4",
        "--learn.batch-groups",
        "1",
        "--offpolicy.reuse",
        "1",
    ]
    small += ["--steps", "1", "--eval.problems", "1", "--out", "out"]
    assert run(["train", "game.toml", "--dry-run", *small]) == 0
    assert "tokens that are read and not trained on" in capsys.readouterr().out
    assert run(["train", "game.toml", *small]) == 0
    groups = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    answers = [trajectory["answers"] for group in groups for trajectory in group["trajectories"]]
    prompts = {each[0]["text"] for each in answers}
    assert len(prompts) == len(groups)  # all responses to one problem play the same game
    turned = [each for group in groups for each in group["trajectories"] if len(each["answers"]) > 3]
    for each in turned:  # a second try
        assert len(each["sampled"]) == len(each["tokens"])
        assert len(each["versions"]) == sum(each["sampled"])


def test_the_environment_to_start_from_gives_fewer_points_for_more_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "tools"]) == 0
    names = {}
    exec((tmp_path / "tools.py").read_text(), names)
    game = names["Guess"]()
    assert "1 to 20" in game.reset()
    game.number = 7
    assert [game.guess(number) for number in (3, 9, 7)] == [
        "The number is higher.",
        "The number is lower.",
        "right",
    ]
    assert game.get_reward() == pytest.approx(0.9)
    assert read_recipe("tools.toml")["task"]["environment"] == "tools:Guess"
