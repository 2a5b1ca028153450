"""Recipes and grids that come with bapo go by name, from any directory."""

import pytest

from bapo.cli import run
from bapo.compare import load_grid
from bapo.config.recipe import command_for, read_recipe, shipped

COMMANDS = ("bapo train", "bapo sft", "bapo compare")


def test_every_file_belongs_to_one_command_and_no_name_is_given_twice():
    names = [name for command in COMMANDS for name in shipped(command)]
    assert len(names) == len(set(names)) == len(shipped()) > 20
    for command in COMMANDS:
        for name in shipped(command):
            assert command_for(read_recipe(name)) == command


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_names_them_all_with_what_they_are(command, capsys):
    assert run([command.split()[1], "--list"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 120
    for name in shipped(command):
        (line,) = [line for line in said.splitlines() if line.startswith(f"  {name} ")]
        assert len(line.split()) > 4


def test_a_name_is_found_from_anywhere_and_a_file_beside_the_data_does_not_take_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_recipe("offpolicy")["offpolicy"]["partial_budget"] == 5000
    assert read_recipe("on-policy")["name"] == "on-policy"
    assert len(load_grid("quick").cells) == 6
    (tmp_path / "offpolicy").write_text("steps = 3")
    assert read_recipe("offpolicy")["offpolicy"]["partial_budget"] == 5000
    assert read_recipe("./offpolicy") == {"steps": 3}
    (tmp_path / "mine").write_text("steps = 4")
    assert read_recipe("mine") == {"steps": 4}
    (tmp_path / "mine.toml").write_text("[base]\nrecipe = 'grpo'\n[[objective]]\nlabel = 'a'")
    assert load_grid("mine.toml").cells[0].config.objective.name == "grpo"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "offpolicyy"], "Did you mean 'offpolicy'?"),
        (["train", "recipes/offpolicy.toml"], "'offpolicy' comes with bapo and goes by its name"),
        (
            ["train", "quick"],
            "quick is a grid of runs, and not a recipe for reinforcement learning. Run it with",
        ),
        (["compare", "sums_sft"], "Run it with `bapo sft sums_sft`"),
        (["compare"], "Try `bapo compare quick`"),
        (["train", "nowhere/mine.toml"], "cannot read nowhere/mine.toml"),
    ],
)
def test_a_name_that_leads_nowhere_says_where_to_look(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert message in capsys.readouterr().err
