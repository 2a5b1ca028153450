"""What the command line says when a command cannot go on."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from bapo import cli
from bapo.cli import COMMANDS, run
from bapo.config.command_line import parse_arguments
from bapo.config.errors import BapoError, VerifierFailed
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.evaluate import Arguments as Evaluation
from bapo.evaluate.options import Settings


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
    assert len(of_the_recipe) == 1 + len(flags) // 2 + (command == "sft")  # there is nothing to learn from either


def test_the_command_line_changes_a_recipe_and_what_they_say_together_is_judged(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("bapo.train.run.start", lambda config, **_: started.append(config))
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
    assert "objective.target_share=0.5 belongs to objective.name='bapo', not to 'grpo'" in capsys.readouterr().err


def test_usage_names_every_command_and_a_near_miss_is_understood(capsys):
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert max(map(len, listed.splitlines())) <= 120
    assert run(["reprot"]) == 2
    assert "'reprot' is not a command. Did you mean 'report'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_in_the_same_way(name, monkeypatch, capsys):
    def ends_with(error):
        def work(_name, _words):
            raise error

        monkeypatch.setattr(cli, "carry_out", work)
        code = run([name, "a word"])
        said = capsys.readouterr().err
        assert said.startswith("bapo: ")
        assert said.count("\n") == 1
        return code, said

    for kind in BapoError.__subclasses__():
        if kind is not VerifierFailed:
            assert ends_with(kind("what is wrong")) == (kind.exit_code, "bapo: what is wrong\n")
    remedy = COMMANDS[name].remedy
    command = f"bapo {name} 'a word'"
    code, said = ends_with(OSError(28, "No space left on device"))
    advice = remedy.disk.format(command=command, advice=remedy.stopped.format(command=command))
    assert (code, "cannot write: [Errno 28]" in said, advice in said) == (4, True, True)
    code, said = ends_with(OSError(5, "Input/output error"))
    assert (code, remedy.failed in said, advice in said) == (4, True, True)
    code, said = ends_with(KeyboardInterrupt())
    assert (code, remedy.stopped.format(command=command) in said) == (130, True)
    assert ends_with(FloatingPointError("not finite."))[0] == 1


@pytest.mark.parametrize("words", [["resume", "run", "--help"], ["train", "--dry-run"], ["eval", "-h"]])
def test_a_stop_of_what_only_tells_says_nothing_of_continuing(words, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "carry_out", stopped)
    assert (run(words), capsys.readouterr().err) == (130, "bapo: stopped.\n")


def test_an_error_of_the_operating_system_tells_what_failed(monkeypatch, tmp_path, capsys):
    def told(error, readable=True):
        def work(_name, _words):
            raise error

        monkeypatch.setattr(cli, "carry_out", work)
        monkeypatch.setattr("os.access", lambda _path, _mode: readable)
        assert run(["train"]) == 4
        return capsys.readouterr().err.removeprefix("bapo: ")

    there, gone = str(tmp_path / "there"), str(tmp_path / "gone")
    Path(there).touch()
    said = told(FileNotFoundError(2, "No such file or directory", gone))
    assert said.startswith(f"cannot read {gone}: No such file or directory. Check that it is there")
    assert "Free space" not in said
    assert told(PermissionError(13, "Permission denied", there), readable=False).startswith(f"cannot read {there}: ")
    for error in (
        PermissionError(13, "Permission denied", there),
        PermissionError(13, "Permission denied", gone),
        OSError(30, "Read-only file system", gone),
        OSError(28, "No space left on device", there),
    ):
        said = told(error)
        assert said.startswith(f"cannot write {error.filename}: {error.strerror}. ")
        assert "Free space" in said
    assert told(OSError(f"{there}: Error while serializing: I/O error: File too large (os error 27)")).startswith(
        f"cannot write: {there}: Error while serializing"
    )
    for error in (OSError(5, "Input/output error", there), FileNotFoundError(2, "No such file", f"{gone}/below")):
        assert told(error).startswith("cannot read or write: [Errno ")


def test_the_table_names_what_is_there():
    for command in COMMANDS.values():
        assert callable(cli.named(command.run))
        assert isinstance(cli.named(command.arguments), type)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--no-such-option"]])
def test_every_command_explains_itself(name, words, capsys):
    code = run([name, *words])
    said = capsys.readouterr()
    if words == ["--no-such-option"]:
        assert code == 2
        assert f"usage: bapo {name} {COMMANDS[name].usage}" in said.err
    else:
        assert (code, said.err) == (0, "")
        assert said.out.startswith(f"usage: bapo {name} ")
        assert "--no-dry-run" not in said.out


@pytest.mark.parametrize(("name", "schema"), [("train", Config), ("sft", SftConfig)])
def test_help_shows_every_key_and_every_heading(name, schema, capsys):
    assert run([name, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())

    def check(section, prefix):
        for key, info in section.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                assert " ".join(info.annotation.__doc__.split()) in said
                check(info.annotation, f"{prefix}{key}.")
            else:
                assert f"--{prefix}{key}".replace("_", "-") in said
                assert " ".join(info.description.split()) in said

    check(schema, "")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from bapo.cli import COMMANDS, run; run(['--help'])\n"
        "assert not {'tyro', 'pydantic', 'numpy', 'torch'} & set(sys.modules)\n"
        "assert all(run([name, '--help']) == 0 for name in COMMANDS)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_options_of_an_evaluation_are_read_in_every_spelling():
    words = ["--model", "m", "--data", "a,b", "--data=c", "--max_tokens", "7", "--reward-seconds", "2", "--k=3"]
    words += ["--chat-option", "enable_thinking=false", "--chat-option", "budget=-1", "--chat-option", "style=a=b"]
    settings = parse_arguments(Evaluation, words, prog="bapo eval").settings
    assert settings == Settings(
        "m",
        ("a", "b", "c"),
        k=3,
        max_tokens=7,
        reward_seconds=2.0,
        chat_options={"enable_thinking": False, "budget": -1, "style": "a=b"},
    )
    assert parse_arguments(Evaluation, ["--model", "m", "--data", "a"], prog="bapo eval").settings == Settings(
        "m", ("a",)
    )
    assert (Settings("m", ("a",)).k, Settings("m", ("a",), temperature=0.0).k) == (16, 1)
