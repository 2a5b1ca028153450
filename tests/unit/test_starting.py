"""What helps to begin: init, doctor, schema, completion, and a dry run."""

import ast
import json
import os
import pty
import re
import select
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from bapo.cli import COMMANDS, run
from bapo.commands.completion import completed
from bapo.commands.doctor import EXTRAS
from bapo.commands.schema import schema_of
from bapo.commands.starter import FILES, STARTERS
from bapo.config.recipe import check, command_for, read_recipe
from bapo.config.run import Config
from bapo.config.shipped import shipped
from bapo.config.words import leaves
from bapo.preflight.memory import GIB, Seconds, Shape, memory, on_cluster, seconds
from bapo.tasks.countdown import Countdown, expressions
from bapo.types import Problem

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", ROWS[:6]), ("test", ROWS[6:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


# Init


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
    assert "256 problems to train on, 64 held out" in said
    assert re.search(r"answer     '\S+=11\.' gets reward 1\n", said)
    small = ["--steps", "1", "--rollout.prompts", "4", "--rollout.max-tokens", "16", "--eval.problems", "2"]
    assert run(["train", "mine.toml", "--threads", "1", "--out", "runs/short", *small]) == 0
    (logged,) = [
        json.loads(line) for line in Path("runs/short/metrics.jsonl").read_text().splitlines() if "reward" in line
    ]
    assert logged["step"] == 1


def test_example_problems_have_answers_that_are_right_and_are_disjoint():
    task = Countdown()
    known = {problem.prompt: problem for problem in (*task.train, *task.test)}
    shown = {}
    for name in ("train", "test"):
        lines = (STARTERS / f"countdown_{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        shown[name] = {row["prompt"] for row in rows}
        assert all(task.score(known[row["prompt"]], row["answer"]) == 1 for row in rows)
    assert (len(shown["train"]), len(shown["test"]), shown["train"] & shown["test"]) == (256, 64, set())
    assert shown["test"] <= {problem.prompt for problem in task.test}


def test_data_that_is_there_is_kept(here, capsys):
    before = (here / "train.jsonl").read_text(), (here / "test.jsonl").read_text()
    assert run(["init", "data"]) == 0
    assert "kept  train.jsonl and test.jsonl: the lines marked YOURS in mine.toml" in capsys.readouterr().out
    assert ((here / "train.jsonl").read_text(), (here / "test.jsonl").read_text()) == before


def test_a_trl_script_to_start_from_uses_names_that_the_adapter_has(here):
    assert run(["init", "trl"]) == 0
    script = ast.parse((here / "train_trl.py").read_text())
    adapter = ast.parse((ROOT / "src" / "bapo" / "adapters" / "trl.py").read_text())
    classes = {node.name: node for node in adapter.body if isinstance(node, ast.ClassDef)}
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


# Schema


def conforms(value, schema, definitions):
    """Whether a value fits the parts of JSON schema that are used here."""
    if "$ref" in schema:
        return conforms(value, definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return any(conforms(value, one, definitions) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if schema.get("type") in ("integer", "number"):
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        return numeric and value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", value - 1)
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(conforms(item, schema["items"], definitions) for item in value) if "items" in schema else True
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(key in value for key in schema.get("required", ())) and all(
            conforms(inner, known[key], definitions)
            if key in known
            else conforms(inner, other, definitions)
            if isinstance(other, dict)
            else other
            for key, inner in value.items()
        )
    return True


@pytest.mark.parametrize("kind", ["train", "sft", "compare"])
def test_every_shipped_file_fits_its_schema_and_mistakes_do_not(kind, capsys):
    assert run(["schema", kind]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == schema_of(kind)
    files = shipped(f"bapo {kind}").values()
    for path in files:
        values = tomllib.loads(path.read_text())
        assert conforms(values, schema, schema["definitions"]), path
        assert not conforms(values | {"stepps": 3}, schema, schema["definitions"])
    bad = {"base": {"learn": {"lr": 0}}} if kind == "compare" else {"learn": {"lr": 0}}
    assert not conforms(bad, schema, schema["definitions"])


def test_the_schema_explains_every_key():
    schema = schema_of("train")

    def described(section, prefix=""):
        for name, entry in section["properties"].items():
            if "$ref" in entry:
                yield from described(schema["definitions"][entry["$ref"].rpartition("/")[2]], f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", entry.get("description")

    found = dict(described(schema))
    assert found.keys() == leaves(Config).keys()
    assert all(found.values())
    assert schema["definitions"]["ObjectiveConfig"]["properties"]["name"]["enum"][:2] == ["grpo", "clip_higher"]


# Completion


@pytest.mark.parametrize("name", COMMANDS)
def test_completion_offers_what_the_help_lists(name, capsys):
    found = completed(name, COMMANDS[name].defined_by)
    assert run([name, "--help"]) == 0
    said = capsys.readouterr().out.replace("_", "-")
    for option in found.options:
        if option not in ("--list", "--dry-run") and name != "resume":
            assert option.replace("_", "-") in said, option


def bash(line, script):
    """What bash offers at the end of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _bapo; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_completes_commands_options_choices_and_names(here, capsys):
    assert run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert bash("bapo ", script) == {*COMMANDS, "--help", "--version"}
    assert bash("bapo tr", script) == {"train"}
    assert bash("bapo train off", script) == {"offpolicy"}
    assert bash("bapo compare qu", script) == {"quick"}
    assert bash("bapo train --objective.n", script) == {"--objective.name"}
    assert bash("bapo train --objective.name g", script) == {"grpo", "gspo"}
    assert bash("bapo train --task.train tr", script) == {"train.jsonl"}
    assert bash("bapo init ", script) >= {"demo", "data", "trl", "verl"}
    assert bash("bapo report --l", script) == {"--live"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_offers_every_command_option_and_choice(shell, capsys):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{' '.join(COMMANDS)} --help --version" in script
    lines = set(script.splitlines())
    for name, command in COMMANDS.items():
        found = completed(name, command.defined_by)
        options, words = " ".join(found.options), " ".join(found.words)
        if shell == "bash":
            assert f'        {name}) options="{options}"; words="{words}" ;;' in lines
        elif shell == "zsh":
            assert f"        {name}) options=({options}); names=({words}) ;;" in lines
        for option, choices in found.options.items():
            offered = " ".join(choices)
            if shell == "fish":
                after = f'complete -c bapo -n "__bapo_command {name}" -l {option[2:]}'
                assert (f'{after} -x -a "{offered}"' if choices else after) in lines
            elif choices:
                offers = (
                    f'COMPREPLY=($(compgen -W "{offered}" -- "$cur"))' if shell == "bash" else f"compadd -- {offered}"
                )
                assert f'        "{name} {option}") {offers}; return ;;' in lines


def fish(line, script):
    """What fish offers at the end of a line."""
    program = f"source {script}; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {offer.partition("\t")[0] for offer in done.stdout.splitlines()}


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_options_choices_and_names(here, capsys):
    assert run(["completion", "fish"]) == 0
    script = here / "script.fish"
    script.write_text(capsys.readouterr().out)
    assert fish("bapo ", script) == {*COMMANDS, "--help", "--version"}
    assert fish("bapo tr", script) == {"train"}
    assert fish("bapo train off", script) == {"offpolicy"}
    assert fish("bapo train --objective.n", script) == {"--objective.name"}
    assert fish("bapo train --objective.name g", script) == {"grpo", "gspo"}
    assert fish("bapo train --task.train tr", script) == {"train.jsonl"}
    assert fish("bapo init ", script) >= {"demo", "data", "trl", "verl"}
    assert fish("bapo report train --l", script) == {"--live"}


class Zsh:
    """An interactive zsh at the end of a pseudo-terminal, in which a person types and presses Tab."""

    def __init__(self, script, place):
        (place / ".zshrc").write_text(f"PROMPT='ready> '\nfpath=({place}/none $fpath)\nsource {script}\n")
        self.terminal, end = pty.openpty()
        environment = os.environ | {"ZDOTDIR": str(place), "TERM": "dumb"}
        streams = {"stdin": end, "stdout": end, "stderr": end}
        self.process = subprocess.Popen(["zsh", "-i"], env=environment, start_new_session=True, **streams)
        os.close(end)
        self.until("ready> ")

    def until(self, end):
        """What it writes until it has written this, or ten seconds have passed."""
        told, deadline = "", time.monotonic() + 10
        while end not in told and time.monotonic() < deadline:
            if select.select([self.terminal], [], [], 0.1)[0]:
                told += os.read(self.terminal, 65536).decode(errors="replace")
        return told

    def typed(self, keys):
        """The line after these keys, as zsh would run it."""
        os.write(self.terminal, f'{keys}\x01print -r -- "<\x05>"\r'.encode())
        told = self.until("\nready> ")
        return re.findall(r"^<(.*)>\r?$", told, re.MULTILINE)[-1]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands_options_choices_and_names(here, capsys):
    assert run(["completion", "zsh"]) == 0
    (here / "script.zsh").write_text(capsys.readouterr().out)
    zsh = Zsh(here / "script.zsh", here)
    try:
        assert zsh.typed("bapo tr\toffp\t--objective.n\tgr\t") == "bapo train offpolicy --objective.name grpo"
        assert zsh.typed("bapo train --task.train tr\tx") == "bapo train --task.train train.jsonl x"
        assert zsh.typed("bapo compare qu\tx") == "bapo compare quick x"
        assert zsh.typed("bapo init ve\tx") == "bapo init verl x"
        assert zsh.typed("bapo report train --l\tx") == "bapo report train --live x"
    finally:
        zsh.close()


# Doctor


def test_the_doctor_finds_what_is_wrong_and_says_what_to_do(here, capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("bapo.commands.doctor.PORTS", {port: "Ray"})
        monkeypatch.setattr(
            "bapo.commands.doctor.EXTRAS", {"x": (("no_such_package",), "something"), "y": (("pydantic",), "keys")}
        )
        assert run(["doctor", "--task.train", "nowhere.jsonl", "--task.test", "test.jsonl"]) == 1
    said = capsys.readouterr().out
    assert f"note port {port}" in said
    assert "join it with cluster.address" in said
    assert "no-such-package not installed" in said
    assert "Needed for something: pip install 'bapo[x]'" in said
    assert "ok   [y]            pydantic 2" in said
    assert "BAD  recipe" in said
    assert "task.train: data source 'nowhere.jsonl' does not exist" in said
    assert "ok   torch" in said
    assert "1 thing must be put right" in said


def test_the_doctor_looks_for_everything_that_an_extra_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert EXTRAS.keys() == extras.keys() - {"dev", "docs"}


def test_a_run_directory_that_is_in_use_is_a_note(here, capsys):
    (here / "before").mkdir()
    (here / "before" / "config.json").write_text("{}")
    (here / "before" / "metrics.jsonl").write_text("{}\n")
    (here / "before" / "checkpoints").mkdir()
    (here / "before" / "checkpoints" / "step-000001").mkdir()
    assert run(["doctor", "--out", "before"]) == 0
    said = capsys.readouterr().out
    assert "note run directory  before is in use\n" in said
    assert "Choose another directory, or continue that run with `bapo resume before`." in said
    assert "BAD" not in said
    assert said.endswith("\nA run can start in another directory (--out).\n")
    assert run(["doctor", "--out", "before", "--task.train", "nowhere.jsonl", "--task.test", "test.jsonl"]) == 1
    assert capsys.readouterr().out.endswith("before a run can start in another directory (--out).\n")


def test_a_sound_machine_gets_a_clean_bill(here, capsys):
    assert run(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "BAD" not in said
    assert said.endswith("A run can start.\n")


# Dry run


def test_a_dry_run_shows_the_plan_and_writes_nothing(here, capsys):
    (here / "planned_rewards.py").write_text(
        "def score(response, answer):\n    return 0.5 * (response == f'<answer>{answer}</answer>')\n"
    )
    before = sorted(here.iterdir())
    words = ["--task.train", "train.jsonl", "--task.test", "test.jsonl", "--task.reward", "planned_rewards:score"]
    words += ["--offpolicy.reuse", "3", "--steps", "5", "--device", "cpu", "--out", "runs/x"]
    assert run(["train", "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    for part in (
        "demo, float32 on cpu; 0.8 M parameters, all trained",
        "6 problems to train on, 2 held out, 2 of them evaluated",
        "prompt     0+0=\n",
        "'<answer>0</answer>' gets reward 0.5",
        "5 steps of 16 prompts x 8 responses = 640 responses",
        "3 per step, 15 in all",
        "tokens grow 2 updates old",
        "lower bound 0.8, upper bound 1.2, as in PPO and GRPO; preset fixed",
        "runs/x, a checkpoint every 10 steps",
        "Nothing is wrong.",
    ):
        assert part in said
    assert {path.name for path in here.iterdir() if path not in before} <= {"__pycache__"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--offpolicy.reuse", "8"),
            "upper bound 1.2, and 1 below for negative tokens that were used before (push once)",
        ),
        (("--objective.preset", "weak-model"), "upper bound 1.2 to 2, chosen anew in every update (BAPO)"),
        (("--objective.name", "clip_higher", "--objective.options", "high", "1.3"), "clip       clip_higher, high 1.3"),
    ],
)
def test_a_dry_run_says_which_bounds_a_token_has(words, told, capsys):
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 0
    assert told in capsys.readouterr().out


def test_prompts_that_the_model_cannot_read_are_refused_before_training(here, capsys):
    for name, numbers in (("train.jsonl", range(1, 9)), ("test.jsonl", range(9, 12))):
        rows = [{"prompt": f"Gus has {n} apples and gets {n} more.", "answer": str(2 * n)} for n in numbers]
        (here / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "planned_rewards.py").write_text(
        "def score(response, answer):\n    return float(str(answer) in response)\n"
    )
    words = ["--task.train", "train.jsonl", "--task.test", "test.jsonl", "--task.reward", "planned_rewards:score"]
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 2
    assert "of the tokens of the prompts are unknown to 'demo', so it cannot read them." in capsys.readouterr().err


def test_a_dry_run_lists_every_mistake_and_plans_only_what_was_asked_for(capsys):
    assert run(["train", "--dry-run", "--rollout.max-tokens", "600", "--learn.lr", "-1", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "learn.lr = -1.0: give a number greater than 0" in said.err
    assert said.err.count("rollout.max_tokens=600") == 1
    assert run(["train", "--dry-run", "--lerning-rate", "1"]) == 2
    assert capsys.readouterr().out == ""


def test_a_dry_run_says_once_how_long_responses_may_be(capsys):
    assert run(["train", "--dry-run", "--rollout.max-tokens", "600", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert "gets reward 1" in said.out
    (line,) = [line for line in said.err.splitlines() if "max_tokens" in line]
    longest = max(len(problem.prompt) for problem in (*Countdown().train, *Countdown().test))  # a token per character
    assert line.endswith(f"Set rollout.max_tokens <= {128 - longest}.")


def test_a_dry_run_that_cannot_say_how_long_responses_may_be_says_why(here, capsys):
    words = ["--rollout.max-tokens", "600", "--task.train", "train.jsonl", "--task.test", "nowhere.jsonl"]
    assert run(["train", "--dry-run", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rollout.max_tokens" in line]
    assert line.endswith("; this dry run says how many that is once the other mistakes are corrected.")
    assert run(["train", *words]) == 2
    assert "`bapo train --dry-run` with the same keys says how many that is." in capsys.readouterr().err


def test_the_plan_says_how_an_update_is_made_when_it_is_evaluated_and_where_it_is_logged(capsys, monkeypatch):
    assert run(["train", "--dry-run", "--device", "cpu", "--steps", "30"]) == 0
    said = capsys.readouterr().out
    assert "learning rate 3e-05 (constant)\n           sequence_mean, advantages grpo, warm-up 10 updates\n" in said
    assert "\neval       before and after training, and every 20 steps; temperature 1\n" in said
    assert "\nlog " not in said
    monkeypatch.setattr("bapo.preflight.checks.find_spec", lambda name: True)  # a plan needs no tracker
    words = ["--learn.kl", "0.02", "--learn.warmup-updates", "0", "--learn.advantages", "rloo", "--eval.every", "20"]
    words += ["--eval.also-at", "0", "0.6", "--steps", "20", "--log.to", "wandb", "--log.project", "mine"]
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 0
    said = capsys.readouterr().out
    assert "           sequence_mean, advantages rloo, KL penalty 0.02\n" in said
    assert "\neval       before and after training; temperature 1, before and after also 0 and 0.6\n" in said
    assert "\nlog        wandb; project mine\n" in said
    assert len(said.splitlines()) <= 24


def test_a_dry_run_of_a_cluster_shows_its_processes_and_what_they_need(capsys, monkeypatch):
    monkeypatch.setattr("bapo.preflight.checks.find_spec", lambda name: True)  # Ray is not needed for a plan
    words = ["--cluster.rollouts", "3", "--cluster.learners", "2", "--threads", "10", "--device", "cpu", "--steps", "1"]
    words += ["--offpolicy.max-staleness", "40"]
    assert run(["train", "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    assert "processes  this one, 3 rollout actors and 2 learner ranks; Ray is started on this machine\n" in said
    assert "           rollout 0-2: engine in-process, 2 CPU threads each\n" in said
    assert "           learner 0-1: 2 CPU threads each\n" in said
    assert "sampling runs up to 4 updates ahead" in said
    assert re.search(r"memory     about .* in a rollout actor: .*\n           about .* in a learner rank: ", said)
    assert re.search(r"time       very roughly .*; sampling and learning go on at the same time\n", said)
    assert "disk       about" in said
    assert "sampling   1 step of 16 prompts" in said
    assert len(said.splitlines()) <= 24


def test_memory_is_the_arithmetic_of_the_page():
    shape = Shape(494_032_768, 494_032_768, layers=24, hidden=896, intermediate=4864, key_heads=2, head_width=64)
    values = {
        "device": "cuda",
        "model": {"dtype": "bfloat16"},
        "rollout": {"prompts": 64, "max_tokens": 8192, "slots": 64},
        "learn": {"activation_checkpointing": True, "batch_groups": 64},
    }
    found = memory(Config.model_validate(values), shape, longest_prompt=1024)
    assert round(found.states / GIB, 1) == 8.3  # docs/hardware.md, Qwen2.5-0.5B
    assert round(found.sampler / GIB, 1) == 0.9
    assert round(found.cache / GIB, 1) == 6.8
    assert round(found.activations / GIB, 1) == 1.8
    adapted = memory(Config.model_validate(values), Shape(100, 10, 1, 1, 1, 1, 1), longest_prompt=0)
    assert adapted.states == 18 * 10 + 2 * 90
    near = {**values, "learn": {**values["learn"], "kl": 0.1}}
    held = memory(Config.model_validate(near), shape, longest_prompt=1024)
    assert (found.reference, held.reference) == (0, 2 * 494_032_768)
    assert held.in_all == found.in_all + held.reference
    near["model"] = {"dtype": "bfloat16", "lora": {"rank": 4}}
    assert memory(Config.model_validate(near), shape, longest_prompt=1024).reference == 0


def test_time_is_operations_over_speed_or_bytes_over_bandwidth():
    values = {"steps": 10, "rollout": {"prompts": 4, "responses": 2, "max_tokens": 90, "slots": 4}}
    values |= {"learn": {"batch_groups": 4}, "eval": {"problems": 8, "k": 1, "every": 0}, "model": {"dtype": "float32"}}
    config = Config.model_validate(values | {"offpolicy": {"reuse": 3}})
    shape = Shape(1000, 1000, 1, 1, 1, 1, 1)
    busy = seconds(config, shape, 10, flops=2.5e6, bandwidth=1e12)  # a million operations a second reach the model
    assert busy.sampling == pytest.approx(10 * 8 * 100 * 2000 / 1e6)
    assert busy.learning == pytest.approx(10 * 3 * 8 * 100 * 6000 / 1e6)
    assert busy.evaluating == pytest.approx(2 * 8 * 100 * 2000 / 1e6)
    near = config.model_copy(update={"learn": config.learn.model_copy(update={"kl": 0.1})})
    more = seconds(near, shape, 10, flops=2.5e6, bandwidth=1e12)  # every response passes once more
    assert more.learning == pytest.approx(busy.learning + 10 * 8 * 100 * 2000 / 1e6)
    waiting = seconds(config, shape, 10, flops=1e15, bandwidth=4000)  # a second to read the weights once
    assert waiting.sampling == pytest.approx(10 * 2 * 90)  # eight responses, four at a time, ninety tokens each


def test_a_cluster_divides_work_and_memory_among_its_processes():
    values = {"cluster": {"rollouts": 3, "learners": 2, "ahead": 0}, "device": "cpu", "threads": 8}
    config = Config.model_validate(values | {"model": {"dtype": "float32"}})
    shape = Shape(1000, 1000, layers=1, hidden=1, intermediate=1, key_heads=1, head_width=1)
    held, alone = memory(config, shape, longest_prompt=10), Seconds(sampling=60.0, learning=80.0, evaluating=6.0)
    found = on_cluster(config, shape, held, alone, threads=2)
    assert found.took == Seconds(80.0, 160.0, 8.0, least=140.0)  # 6 and 4 threads instead of 8
    assert found.took.in_all == 248.0
    assert found.actor == 4000 + held.cache
    assert found.rank == 16 * 1000 / 2 + held.activations
    ahead = config.model_copy(update={"cluster": config.cluster.model_copy(update={"ahead": 1})})
    assert on_cluster(ahead, shape, held, alone, threads=2).took.in_all == 168.0
    assert on_cluster(config, shape, held, None, threads=2).took is None
    large = {"rollouts": 3, "learners": 2, "engine": "vllm", "gpus_per_rollout": 2}
    config = Config.model_validate({"cluster": large, "device": "cuda"})
    assert on_cluster(config, shape, held, alone, threads=1).took.sampling == 10.0


def test_processes_on_one_machine_are_not_faster_than_the_machine(capsys, monkeypatch):
    shape = Shape(1000, 1000, layers=1, hidden=1, intermediate=1, key_heads=1, head_width=1)
    alone = Seconds(sampling=60.0, learning=20.0, evaluating=6.0)

    def took(**cluster):
        values = {"rollouts": 8, "learners": 1, "ahead": 0, **cluster}
        config = Config.model_validate(
            {"cluster": values, "device": "cpu", "threads": 2, "model": {"dtype": "float32"}}
        )
        return on_cluster(config, shape, memory(config, shape, 10), alone, threads=1).took

    taken = took()
    assert (taken.sampling, taken.learning, taken.evaluating, taken.in_all) == (60.0, 40.0, 6.0, 106.0)
    assert took(ahead=1).in_all == 86.0  # both threads are always busy
    assert took(rollouts=1, ahead=1).in_all == 132.0  # a thread each: sampling takes 120 seconds, evaluating 12
    assert took(address="ray://far:10001").sampling == 15.0  # machines of their own, with a thread of two each
    monkeypatch.setattr("bapo.preflight.checks.find_spec", lambda name: True)  # a plan needs no Ray
    words = ["--device", "cpu", "--threads", "2", "--offpolicy.max-staleness", "40", "--cluster.rollouts"]
    for rollouts, told in ((1, False), (8, True)):
        assert run(["train", "--dry-run", *words, str(rollouts)]) == 0
        assert ("9 processes share 2 CPU threads and slow each other down" in capsys.readouterr().out) == told
