"""What `bapo init` writes: recipes, rewards and scripts to start from."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bapo.cli import run
from bapo.commands.starter import FILES, STARTERS
from bapo.config.recipe import check, command_for, read_recipe
from bapo.config.run import Config
from bapo.tasks.countdown import Countdown, expressions
from bapo.types import Problem

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", ["demo", "data"])
def test_a_recipe_to_start_from_is_sound_and_is_never_overwritten(kind, here, capsys):
    assert run(["init", kind]) == 0
    said = capsys.readouterr().out
    name = "demo.toml" if kind == "demo" else "mine.toml"
    assert f"wrote {name}" in said
    assert f"bapo train {name} --dry-run" in said
    values = read_recipe(here / name)
    assert (check(Config, values)[1], command_for(values)) == ([], "bapo train")
    assert f"bapo train {name} --dry-run" in (here / name).read_text()
    assert run(["init", kind]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert ("mine.toml and rewards.py are there already" in said) == (kind == "data")
    assert f"Move {'it' if kind == 'demo' else 'them'} away" in said


def test_the_demo_recipe_states_the_defaults(here):
    assert run(["init", "demo"]) == 0
    assert check(Config, read_recipe("demo.toml"))[0] == Config()


def test_the_rewards_to_start_from_tell_right_from_wrong(here):
    assert run(["init", "data"]) == 0
    names = {}
    exec((here / "rewards.py").read_text(), names)
    assert [names["ends_right"](text, "4") for text in ("It is 4.", "$4$", "It is 5.", "")] == [1.0, 1.0, 0.0, 0.0]
    tries = ("3+7+2=12;7+3*2=13.", "7+3*2=13", "7+3+3=13.", "7+3*2=12.", "7+3+2=13.", "__import__('os')=13.", "")
    assert [names["score"](text, "3,7,2=13:") for text in tries] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def starter_scores(here):
    """The scoring functions of the starters for own data and for TRL; the rest of the TRL script is not run."""
    assert run(["init", "data"]) == 0
    assert run(["init", "trl", "--dir", "trl"]) == 0
    for path, name in ((here / "rewards.py", "score"), (here / "trl" / "train_trl.py", "solved")):
        kept = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import) or getattr(node, "name", "") == name
        ]
        names = {}
        exec(compile(ast.Module(kept, []), str(path), "exec"), names)
        yield names[name]


def test_the_starters_score_as_the_task_itself_does(here):
    task = Countdown(train_size=12, test_size=0)
    odd = [
        "",
        ".",
        "=",
        ";",
        "7+3*2=13",
        "7+3*1\uff12=13.",
        "7+3*2=13....",
        "9.;7+3*2=13.",
        "+7+3*2=13.",
        "7+3*2=13.\n",
    ]
    found = []
    for problem in (*task.train, Problem("p", "3,7,2=13:", {"numbers": [3, 7, 2], "target": 13})):
        target = problem.answer["target"]
        tries = [f"{text}={value}" for text, value in expressions(problem.answer["numbers"])]
        claimed = [f"{text}={target}" for text, _ in expressions(problem.answer["numbers"])]
        right = next(text for text in tries if text.endswith(f"={target}"))
        responses = [
            *odd,
            *(f"{text}." for text in (*tries, *claimed)),
            f"1+1=2;{right}.",
            f"{right};1+1=2.",
            f"?;{right}.",
        ]
        responses += [f"0{right}.", f"{right}.{right}.", f" {right}.", f"{right.replace('=', '=0')}.", f"{right} ."]
        found += [(problem, response, task.score(problem, response)) for response in responses]
    assert len(found) > 300
    assert {score for *_, score in found} == {0.0, 1.0}
    own, trl = starter_scores(here)
    assert [case for case in found if own(response=case[1], prompt=case[0].prompt) != case[2]] == []
    assert [case for case in found if trl(completion=case[1], prompt=case[0].prompt) != case[2]] == []


def test_what_is_written_for_own_data_runs_at_once_where_it_was_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not Path(place, "rewards.py").exists()])
    assert run(["init", "data", "--dir", "a place"]) == 0
    said = capsys.readouterr().out
    assert "next  cd 'a place'\n      bapo train mine.toml --dry-run\n      bapo train mine.toml\n" in said
    monkeypatch.chdir(tmp_path / "a place")
    assert run(["train", "mine.toml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "205 problems to train on, 51 held out" in said
    assert re.search(r"answer     '\S+=\d+\.' gets reward 1\n", said)
    small = ["--steps", "1", "--rollout.prompts", "4", "--rollout.max-tokens", "16", "--eval.problems", "2"]
    assert run(["train", "mine.toml", "--threads", "1", "--out", "runs/short", *small]) == 0
    (logged,) = [
        json.loads(line) for line in Path("runs/short/metrics.jsonl").read_text().splitlines() if "reward" in line
    ]
    assert logged["step"] == 1


def test_example_problems_differ_and_have_answers_that_are_right():
    task = Countdown()
    known = {problem.prompt: problem for problem in task.train}
    rows = [json.loads(line) for line in (STARTERS / "countdown_train.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 256
    assert all(task.score(known[row["prompt"]], row["answer"]) == 1 for row in rows)


def test_data_that_is_there_is_kept(here, capsys):
    before = (here / "train.jsonl").read_text()
    assert run(["init", "data"]) == 0
    assert "kept  train.jsonl: the lines marked YOURS in mine.toml" in capsys.readouterr().out
    assert (here / "train.jsonl").read_text() == before


def test_a_trl_script_to_start_from_uses_names_that_the_adapter_has(here):
    assert run(["init", "trl"]) == 0
    script = ast.parse((here / "train_trl.py").read_text())
    adapters = [ROOT / "src" / "bapo" / "adapters" / f"{name}.py" for name in ("trl", "trl_config")]
    adapter = [node for path in adapters for node in ast.parse(path.read_text()).body]
    classes = {node.name: node for node in adapter if isinstance(node, ast.ClassDef)}
    imported = [
        alias.name
        for node in script.body
        if isinstance(node, ast.ImportFrom) and node.module == "bapo.adapters.trl"
        for alias in node.names
    ]
    assert imported == ["BapoConfig", "BapoTrainer"]
    assert set(imported) <= classes.keys()
    (made,) = [n for n in ast.walk(script) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "BapoConfig"]
    ours = {keyword.arg for keyword in made.keywords if keyword.arg.startswith("bapo_")}
    declared = {node.target.id for node in classes["BapoConfig"].body if isinstance(node, ast.AnnAssign)}
    assert ours
    assert ours <= declared


def test_a_trl_script_says_what_it_needs_where_trl_is_not_installed(here, capsys, monkeypatch):
    page = (ROOT / "docs" / "adapters" / "trl.md").read_text()
    (install,) = set(re.findall(r"pip install [^`\n]*\.\[trl\]'", page))
    for missing in (True, False):
        monkeypatch.setattr("bapo.commands.starter.find_spec", lambda name, missing=missing: None if missing else name)
        assert run(["init", "trl", "--dir", f"trl{missing}"]) == 0
        assert (f"TRL is not installed here. In a clone of bapo: {install}\n" in capsys.readouterr().out) == missing


def test_a_verl_script_to_start_from_is_a_script(here):
    assert run(["init", "verl"]) == 0
    text = (here / "train_verl.sh").read_text()
    bare = {"PATH": os.environ["PATH"], "MODEL": "m"}
    done = subprocess.run(["bash", "train_verl.sh"], capture_output=True, text=True, env=bare, check=False)
    assert done.returncode != 0
    assert "TRAIN_FILES: is not set. Give parquet files" in done.stderr
    (here / "python").write_text("#!/bin/sh\nexit 1\n")  # an environment without packages
    (here / "python").chmod(0o755)
    bare |= {"TRAIN_FILES": "t", "VAL_FILES": "v", "PATH": f"{here}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "train_verl.sh"], capture_output=True, text=True, env=bare, check=False)
    assert (done.returncode, "has no package bapo. Activate" in done.stderr) == (2, True)
    assert "bash train_verl.sh" in text
    page = (ROOT / "docs" / "adapters" / "verl.md").read_text()
    for line in text.splitlines():
        if "policy_loss." in line and not line.startswith("#"):
            assert line.split("=")[0].strip() in page


@pytest.mark.parametrize("kind", FILES)
def test_starting_files_have_lines_that_fit_and_are_written_to_a_terminal_without_utf_8(kind, tmp_path):
    words = [sys.executable, "-m", "bapo", "init", kind]
    environment = os.environ | {
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nnext  " in done.stdout
    for name, starter in FILES[kind].items():
        text = (tmp_path / name).read_text(encoding="utf-8")
        starting = (STARTERS / starter).read_text(encoding="utf-8")
        assert text == re.sub(r"\bFILE\b", next(iter(FILES[kind])), starting)
        assert max(map(len, text.splitlines())) <= 120
