"""What helps to begin: init, doctor, schema, completion, and a dry run."""

import ast
import json
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest

from bapo.cli import COMMANDS, run
from bapo.commands.completion import completed
from bapo.commands.schema import schema_of
from bapo.config.recipe import check, command_for, read_recipe
from bapo.config.run import Config
from bapo.config.shipped import shipped
from bapo.config.words import leaves
from bapo.preflight.memory import GIB, Shape, memory, seconds

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
    assert f"there is already {name}" in capsys.readouterr().err


def test_the_demo_recipe_states_the_defaults(here):
    assert run(["init", "demo"]) == 0
    assert check(Config, read_recipe("demo.toml"))[0] == Config()


def test_the_reward_to_start_from_tells_right_from_wrong(here):
    assert run(["init", "data"]) == 0
    names = {}
    exec((here / "rewards.py").read_text(), names)
    assert [names["score"](text, "4") for text in ("It is 4.", "$4$", "It is 5.", "")] == [1.0, 1.0, 0.0, 0.0]


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
    assert subprocess.run(["bash", "-n", "train_verl.sh"], check=False).returncode == 0
    assert "${TRAIN_FILES:?" in text
    assert "bash train_verl.sh" in text
    page = (ROOT / "docs" / "adapters" / "verl.md").read_text()
    for line in text.splitlines():
        if "policy_loss." in line and not line.startswith("#"):
            assert line.split("=")[0].strip() in page


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


def test_the_other_shells_know_the_same(capsys):
    assert run(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert run(["completion", "fish"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        'complete -c bapo -n "__fish_seen_subcommand_from train" -l learn.schedule -x -a "constant linear cosine"'
        in said
    )
    assert all(any(f"from {name}" in line for line in said) for name in COMMANDS)


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
        "lower bound 0.8, upper bound 1.2; preset fixed",
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


def test_a_dry_run_lists_every_mistake_after_what_it_knows(capsys):
    assert run(["train", "--dry-run", "--rollout.max-tokens", "600", "--learn.lr", "-1", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert "gets reward 1" in said.out
    assert "learn.lr = -1.0: give a number greater than 0" in said.err
    assert "rollout.max_tokens=600" in said.err


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
