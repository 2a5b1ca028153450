"""What the command line says when a command cannot go on."""

import pytest

from bapo.cli import run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left on device"), 4, "No space left on device. Only scratch files were written."),
        (KeyboardInterrupt(), 130, "stopped. Nothing was written, and the same command begins again."),
    ],
)
def test_a_download_that_stopped_says_nothing_of_runs(error, code, message, monkeypatch, tmp_path, capsys):
    def fetch(_directory):
        raise error

    monkeypatch.setattr("bapo.models.smollm2.fetch", fetch)
    assert run(["fetch-smollm2", str(tmp_path / "model")]) == code
    said = capsys.readouterr().err
    assert message in said
    assert " runs" not in said


@pytest.mark.parametrize(
    ("command", "flags", "recipe"),
    [
        ("train", ["--learn.lr", "-1"], "[learn]\nlr = -1.0"),
        ("train", ["--objective.target-share", "2"], "[objective]\ntarget_share = 2.0"),
        ("train", ["--steps", "0", "--learn.lr", "-1"], "steps = 0\n[learn]\nlr = -1.0"),
        ("train", ["--offpolicy.reuse", "100"], "[offpolicy]\nreuse = 100"),
        ("train", ["--model.lora.alpha", "3"], "[model.lora]\nalpha = 3.0"),
        ("sft", ["--learn.lr", "-1"], "[learn]\nlr = -1.0"),
    ],
)
def test_a_bad_value_is_refused_in_the_same_words_wherever_it_stands(command, flags, recipe, tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text(recipe)
    assert run([command, str(tmp_path / "recipe.toml")]) == 2
    of_the_recipe = capsys.readouterr().err.splitlines()
    assert run([command, *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["bapo: command line:", *of_the_recipe[1:]]
    assert len(of_the_recipe) == 1 + len(flags) // 2


def test_the_command_line_changes_a_recipe_and_what_they_say_together_is_judged(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("bapo.train.run.start", started.append)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[objective]\nname = 'grpo'\n[objective.options]\nhigh = 1.3\n[model.template_options]\nthink = true\n"
        "[eval]\nalso_at = [0, 0.6]\n[offpolicy]\nmax_staleness = 40\n"
    )
    flags = [
        "--objective.options.high",
        "1.4",
        "--offpolicy.reuse",
        "30",
        "--eval.also-at",
        "0.5",
        "--model.lora.rank",
        "8",
    ]
    assert run(["train", str(recipe), *flags]) == 0
    (config,) = started
    assert (config.objective.name, config.objective.options) == ("grpo", {"high": 1.4})
    assert (config.offpolicy.reuse, config.offpolicy.max_staleness, config.eval.also_at) == (30, 40, (0.5,))
    assert (config.model.template_options, config.model.lora.rank) == ({"think": True}, 8)
    assert run(["train", str(recipe), "--objective.target-share", "0.5"]) == 2
    assert "objective.target_share belongs to objective.name='bapo', not to 'grpo'" in capsys.readouterr().err
