"""Recipe and command line together: they are judged as one configuration, and one message lists every mistake."""

import datetime

import pytest

from bapo.cli import run
from bapo.config.errors import UsageError
from bapo.config.recipe import check
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.config.words import leaves, read_words


@pytest.fixture
def started(monkeypatch):
    found = []
    monkeypatch.setattr("bapo.train.run.start", lambda config, **_: found.append(config))
    return found


def recipe(tmp_path, text, name="mine.toml"):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_a_recipe_that_needs_the_command_line_is_not_refused_without_it(tmp_path, started):
    bare = recipe(tmp_path, "[offpolicy]\nreuse = 32\n")
    assert run(["train", bare, "--offpolicy.max-staleness", "40"]) == 0
    (config,) = started
    assert (config.offpolicy.reuse, config.offpolicy.max_staleness) == (32, 40)


def test_mistakes_in_the_recipe_and_on_the_command_line_come_in_one_message(tmp_path, capsys):
    bad = recipe(tmp_path, "stepps = 3\n[learn]\nlr = -1.0\n")
    assert run(["train", bad, "--rollout.prompts", "many", "--eval.k", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"bapo: {bad} with the command line:\n")
    for part in (
        "stepps is not a known key. Did you mean steps?",
        "learn.lr = -1.0: give a number greater than 0",
        "rollout.prompts = 'many': give a whole number",
        "eval.k = 0: give 1 or more",
    ):
        assert part in said


def test_checks_between_keys_are_all_made(capsys):
    assert run(["train", "--offpolicy.replay-capacity", "3", "--task.overlong-tokens", "9999"]) == 2
    said = capsys.readouterr().err
    assert "replay_capacity=3 is too small" in said
    assert "task.overlong_tokens=9999 is not below" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "2", "RECIPE"],
        ["RECIPE", "--steps", "2"],
        ["--steps=2", "--eval.also-at", "0.5", "0.25", "RECIPE"],
        ["--learn.activation-checkpointing", "RECIPE", "--steps", "2"],
        ["--objective.options", "low", "0.9", "RECIPE", "--steps", "2"],
    ],
)
def test_the_recipe_may_stand_anywhere(tmp_path, started, words):
    path = recipe(tmp_path, "seed = 7\nsteps = 9\n[objective]\nname = 'grpo'\n")
    assert run(["train", *(path if word == "RECIPE" else word for word in words)]) == 0
    (config,) = started
    assert (config.seed, config.steps) == (7, 2)
    assert config.eval.also_at == ((0.5, 0.25) if "--eval.also-at" in words else ())
    assert config.learn.activation_checkpointing is ("--learn.activation-checkpointing" in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one.toml", "two.toml"], "'one.toml' and 'two.toml' are both given as the recipe"),
        (["--steps", "2", "3"], "'3' is neither a file here nor a recipe"),
        (["--steps"], "--steps needs a value after it"),
        (["--steps", "--seed", "3"], "--steps needs a value after it"),
        (["-steps", "3"], "'-steps' is not an option"),
        (["--objective.options", "low"], "'low' is alone"),
    ],
)
def test_a_command_line_that_cannot_be_read_says_so(words, message, capsys):
    assert run(["train", *words]) == 2
    assert message in capsys.readouterr().err


def test_words_become_what_their_key_asks_for():
    words = [
        *("--steps", "3", "--learn.lr", "1e-4", "--learn.no-compile", "--learn.activation_checkpointing=true"),
        *("--task.train", "a.json", "b.jsonl", "--task.template", "none", "--model.lora.alpha", "-2", "--out", "5"),
        *("--objective.options.high", "1.4", "--objective.low", "0.6", "0.9", "--objective.preset", "none"),
        *("--task.gym.chain_sum.min_terms", "2", "--model.template-options", "think", "false", "name", "x"),
    ]
    found = read_words(Config, words)
    assert found.values == {
        "steps": 3,
        "learn": {"lr": 1e-4, "compile": False, "activation_checkpointing": True},
        "task": {"train": ["a.json", "b.jsonl"], "template": None, "gym": {"chain_sum": {"min_terms": 2}}},
        "model": {"lora": {"alpha": -2.0}, "template_options": {"think": False, "name": "x"}},
        "out": "5",
        "objective": {"options": {"high": 1.4}, "low": [0.6, 0.9], "preset": None},
    }
    assert (found.recipe, found.unknown) == (None, [])
    with pytest.raises(UsageError, match="needs a value"):
        read_words(Config, ["--steps", "--steps", "3"])


BAD = [
    *("", "a" * 5000),
    *(None, True, -1, 0, 1.5, -1.0, 1e30, float("nan"), "x", "", [], [1], [1, 2, 3, 4], ["a"], [None], [[1]], {}),
    *({"a": 1}, {"a": {"b": [1]}}, {"a": "x"}, {"a": float("inf")}, {1: 2}, datetime.date(2020, 1, 1), 10**18),
    *("\ud800", {"a": {"b": None}}, [0.5, "q"], [5.0, 0.1]),
]


@pytest.mark.parametrize(("name", "text"), [("a.toml", f"steps = {'[' * 5000}"), ("a.json", "[" * 100_000)])
def test_a_recipe_that_is_nested_too_deeply_is_refused_in_words(name, text, tmp_path, capsys):
    assert run(["train", recipe(tmp_path, text, name)]) == 2
    assert "levels deep" in capsys.readouterr().err


@pytest.mark.parametrize("schema", [Config, SftConfig])
def test_no_message_has_the_words_of_the_validator(schema):
    keys = [*leaves(schema), *schema.model_fields]
    assert len(keys) > 20
    for key in keys:
        for bad in BAD:
            values = bad
            for part in reversed(key.split(".")):
                values = {part: values}
            _, wrong = check(schema, values)
            said = "\n".join(wrong)
            assert not any(phrase in said for phrase in ("Input should", "Unable to", "valid string", "Keys should"))
            assert not any(said.startswith(f"{key}.{tag} ") for tag in ("int", "float", "bool", "str"))


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("sft", "steps = 3\n[rollout]\nprompts = 4", "is a recipe for reinforcement learning"),
        ("train", "epochs = 3\n[model]\npath = 'demo'", "is a recipe for supervised training"),
        ("train", "seeds = 2\n[base]\nsteps = 3", "is a grid of runs"),
        ("sft", "[[objective]]\nlabel = 'a'", "is a grid of runs"),
        ("compare", "steps = 3", "is a recipe for reinforcement learning"),
        ("compare", "epochs = 3", "is a recipe for supervised training"),
    ],
)
def test_a_file_for_another_command_says_which(command, text, message, tmp_path, capsys):
    path = recipe(tmp_path, text)
    right = {"reinf": "train", "super": "sft", "grid ": "compare"}
    right = next(name for key, name in right.items() if key in message)
    assert run([command, path]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert f"Run it with `bapo {right} {path}`." in said
