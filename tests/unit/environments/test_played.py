"""Runs with environments: their problems, what scores them, what a dry run shows, and the game to start from."""

import json
import re
import shlex

import pytest

from bapo.cli import run
from bapo.config.command_line import parse_arguments
from bapo.config.errors import ConfigError
from bapo.config.recipe import parse, read_recipe
from bapo.config.run import Config
from bapo.config.task import EpisodeConfig, TaskConfig
from bapo.demo import model_path
from bapo.environments.conversations import Conversations
from bapo.environments.played import _seeds, conversations_of, rehearse
from bapo.environments.played import rows_of as rows_of_task
from bapo.evaluate import Arguments
from bapo.evaluate.evaluation import load_data_sets
from bapo.models.loading import outline_policy
from bapo.models.policy import encoded
from bapo.tasks.data.problems import load_rows
from bapo.train.build import make_task
from bapo.train.card import eval_command
from bapo.train.scoring import score
from bapo.types import Group, Status, Trajectory
from tests.environments import chatting
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
    task.close()
    for given, chosen in (
        ({"echo": 3}, "eete" * 2),
        ({"echo": 0.0, "twice": 0.2}, "t" * 8),
        ({"twice": 1.5}, "tetettet"),
    ):
        drawn = _seeds(TaskConfig(environment="x:y", environment_weights=given), "train", 8, ["echo", "twice"])
        assert "".join(problem.extra["environment"][0] for problem in drawn) == chosen
    for given in ({"other": 1.0}, {"echo": -1.0}, {"echo": 0.0, "twice": 0.0}):
        with pytest.raises(ValueError, match="does not weigh the environments of x:y"):
            _seeds(TaskConfig(environment="x:y", environment_weights=given), "train", 8, ["echo", "twice"])


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


def test_where_nothing_inside_gives_a_reward_the_verifier_reads_the_transcript(tmp_path):
    """The whole conversation without the token that ended it, also where a limit came after a turn."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Shout.", "answer": "1", "n": n}) + "\n" for n in range(2)))
    task, _ = made(chatting(), train=[str(path)], holdout=0.5, tools=[f"{HERE}:shout"], reward=f"{HERE}:counts_turns")
    assert not task.graded
    policy = task.script.policy
    conversations = Conversations(task.environments, task.script, ends=policy.stop_ids, max_tokens=1000, max_turns=2)
    trajectory = Trajectory([], 0)
    group = Group(0, task.train[0], [trajectory])
    conversations.admit([group])
    for turn in ('<tool_call>{"name": "shout", "arguments": {"text": "oh"}}</tool_call>', "<tool_call>Done."):
        while conversations.busy:
            conversations.listen(10)
        tokens = encoded(policy.tokenizer, f"{turn}<|im_end|>")
        trajectory.tokens += tokens
        trajectory.versions += [0] * len(tokens)
        trajectory.sampled += [True] * len(tokens) if trajectory.sampled else []
        trajectory.status = Status.STOPPED
        conversations.ended(trajectory)
    while conversations.busy:
        conversations.listen(10)
    assert (trajectory.ending, trajectory.status) == ("turns", Status.TRUNCATED)
    assert "OH" in policy.decode(trajectory.tokens)
    score([group], task, policy.transcript, lambda length: 0.0)
    assert trajectory.reward == 1.0
    task.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"turns": 3}, "task.turns is about environments"),
        ({"tool_seconds": 3, "train": ["a"], "test": ["b"]}, "task.tool_seconds is about environments"),
        ({"environment_weights": {"a": 3}, "environment": "calculator"}, "belongs to task.name='environment'"),
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
    small = "--rollout.prompts 2 --rollout.responses 4 --learn.batch-groups 1 --offpolicy.reuse 1"
    small = [*small.split(), *["--steps", "1", "--eval.problems", "2", "--eval.k", "3", "--out", "out"]]
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

    (timing,) = map(json.loads, (tmp_path / "out" / "timing.jsonl").read_text().splitlines())
    assert 0 < timing["tool_seconds"] <= timing["tool_slowest"] < timing["seconds"]
    assert run(["report", "out", "--out", "report.html"]) == 0
    page = (tmp_path / "report.html").read_text()
    values = json.loads(re.search(r'<script type="application/json" id="values">(.*?)</script>', page, re.DOTALL)[1])
    (figure,) = (each for each in values["figures"] if each["id"] == "episodes")
    drawn = {panel["key"]: panel["series"][0]["runs"][0] for panel in figure["panels"]}
    ended = {key: count for key, (count,) in drawn.items() if key.startswith("endings/")}
    assert sum(ended.values()) == 8
    assert {"turns", "observed", "tool_seconds"} < drawn.keys()
    responses = [each for group in values["samples"][0]["shown"] for each in group["responses"]]
    assert None in [writer for each in responses for writer, _ in each["pieces"]]  # what the environment said, apart
    shown = capsys.readouterr().out
    assert re.search(r"ended +\d+ ", shown) or "endings/answered" not in ended

    card = (tmp_path / "out" / "model" / "README.md").read_text()  # its command measures what the run measured
    (command,) = re.findall(r"bapo eval --model MODEL (.*)", card)
    again = ["eval", "--model", "out/model", *shlex.split(command), "--out", "again", "--chunk", "1"]
    assert run(again) == 0
    shown, after = capsys.readouterr().out, json.loads((tmp_path / "out" / "summary.json").read_text())["after"]
    found = json.loads((tmp_path / "again" / "results.json").read_text())["overall"]
    assert (found["problems"], found["responses"]) == (2, 6)
    for key, name in (("avg", "avg"), ("pass_k", "pass")):
        assert found[key]["value"] == after[f"eval/{name}"]
    responses = [each for row in rows_of(tmp_path) for each in row["responses"]]
    assert found["turns"] == pytest.approx(sum(each["turns"] for each in responses) / 6)
    assert sum(found["endings"].values()) == 6
    assert f"endings: {', '.join(f'{name} {count}' for name, count in found['endings'].items())}" in shown
    assert "Episodes ended so: " in (tmp_path / "again" / "report.html").read_text()

    whole = (tmp_path / "again" / "responses.jsonl").read_bytes()
    (tmp_path / "again" / "responses.jsonl").write_bytes(whole[: whole.index(b"\n") + 9])  # killed in the second chunk
    assert run(again) == 0
    assert (tmp_path / "again" / "responses.jsonl").read_bytes() == whole
    (tmp_path / "game.py").write_text((tmp_path / "game.py").read_text() + "\n# another game\n")
    assert run(again) == 2
    assert "episodes.files" in capsys.readouterr().err


def rows_of(path):
    return [json.loads(line) for line in (path / "again" / "responses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--turns 3 --data a", "--turns is about environments, and there is none"),
        ("--turns 0 --environment a:b", "--turns 0: Input should be greater than or equal to 1"),
        ("--environment calculator --data a", "is for --data countdown alone"),
        ("--environment a:b --data countdown", "is for --data countdown alone"),
        ("--tools a:b", "--data names no data set"),
    ],
)
def test_options_of_an_evaluation_that_mean_nothing_together_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_arguments(Arguments, ["--model", "demo", *words.split()], prog="bapo eval")


def test_the_command_of_a_card_has_every_option_of_its_environment(tmp_path, policy):
    """Environments with rows, options, tools and several rewards; and the embedded one."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "level": n}) + "\n" for n in range(4)))
    values = {"environment": f"{HERE}:Echo", "environment_options": {"prefix": "it's ", "n": 2}, "turns": 2}
    values |= {"tools": [f"{HERE}:shout", f"{HERE}:later"], "tool_seconds": 2.5, "tool_format": f"{HERE}:backwards"}
    values |= {"train": [str(path)], "holdout": 0.5, "reward": ["a:b", "c:d"], "reward_weights": [1.0, -0.5]}
    for task in (values, {"environment": "calculator"}):
        config = parse(Config, {"task": task}, source="test")
        words = shlex.split(eval_command(config, "model", chat=False))[2:]
        settings = parse_arguments(Arguments, words, prog="bapo eval").settings
        assert settings.episodes.model_dump() == config.task.model_dump(include=set(EpisodeConfig.model_fields))
        if "train" in task:
            assert (settings.rewards, settings.reward_weights) == (("a:b", "c:d"), (1.0, -0.5))
            held_out = {problem.id for problem in rows_of_task(config.task)[1]}
            assert {one.id for data in load_data_sets(settings) for one in data.problems} == held_out
            assert len(held_out) == 2
        else:
            assert settings.data == ("countdown",)


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
