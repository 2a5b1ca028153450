"""`bapo convert`: recipes from three scripts of different shape, and what a file says without being run."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from bapo.cli import run
from bapo.config.known_names import UNSET
from bapo.config.words import flat
from bapo.convert.launch import read_launch, read_tables
from bapo.convert.recipe import Setting, Unknown, convert, keys_of
from bapo.convert.script import read_script
from tests.tiny.models import untrained
from tests.tiny.tokenizers import characters

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with a chat template, and room for the longest response of the scripts."""
    place, tokenizer = tmp_path_factory.mktemp("models") / "tiny", characters(chat=True)
    untrained(tokenizer, max_position_embeddings=4096).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def given_in(path):
    """The names of all settings of a script, found by other means than those of bapo."""
    text = path.read_text()
    if path.suffix == ".sh":
        return set(re.findall(r"^    \+?([\w.]+)=", text, flags=re.MULTILINE))
    names = {"GRPOConfig", "LoraConfig", "GRPOTrainer"}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    words = {word.arg for call in calls if getattr(call.func, "id", "") in names for word in call.keywords}
    return words - {"args"} | ({"seed", "torch_dtype", "attn_implementation"} if "LoraConfig" in text else set())


@pytest.mark.parametrize("name", ["quickstart.py", "several_rewards.py", "launch.sh", "arrays.sh"])
def test_a_recipe_passes_a_dry_run_and_every_setting_is_there_or_named(name, here, model, capsys):
    assert run(["convert", str(SCRIPTS / name)]) == 0
    said = capsys.readouterr().out
    recipe = here / Path(name).with_suffix(".toml")
    text = recipe.read_text()
    given = given_in(SCRIPTS / name)
    assert len(given) >= 5
    assert [one for one in given if not re.search(rf"# .*:\d+ +(\S+\.)?{one}\b", text)] == []
    left = [line[2:] for line in text.partition("# Not taken over:\n")[2].splitlines()]
    assert left == [line[2:] for line in said.splitlines() if line.startswith("  ")]
    if name.endswith(".sh"):
        (here / "my_rewards").mkdir()
        (here / "my_rewards" / "gsm.py").write_text("def compute_score(response, answer): return answer in response\n")
        text = re.sub("^test = .*", "holdout = 0.25", text, flags=re.MULTILINE)  # its test file is not here
    if name == "several_rewards.py":  # its functions want chats
        rows = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "answer": str(2 * n)} for n in range(8)]
        (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.write_text(text)
    words = ["--task.train", "train.jsonl", "--task.holdout", "0.25", "--model.path", str(model), "--device", "cpu"]
    assert run(["train", str(recipe), "--dry-run", *words]) == 0, capsys.readouterr().err
    assert re.search("^Nothing (is wrong|stops this run)", capsys.readouterr().out, flags=re.MULTILINE)


def test_settings_become_the_keys_that_mean_the_same(here, capsys):
    for name in ("quickstart.py", "several_rewards.py", "launch.sh"):
        assert run(["convert", str(SCRIPTS / name)]) == 0
    quick, several, launch = (
        dict(flat(tomllib.loads(Path(name).read_text())))
        for name in ("quickstart.toml", "several_rewards.toml", "launch.toml")
    )
    assert (quick["task.train"], quick["task.reward"]) == (["trl-lib/tldr:train"], "quickstart_rewards:reward_len")
    # what TRL does if nothing is set: 8 responses per device are one group, and one update on it
    assert (quick["rollout.prompts"], quick["learn.batch_groups"], quick["offpolicy.reuse"]) == (1, 1, 1)
    assert (quick["learn.lr"], quick["learn.schedule"], quick["learn.warmup_updates"]) == (1e-6, "linear", 0)
    assert (quick["objective.name"], quick["objective.options.low"], quick["objective.options.high"]) == (
        "grpo",
        0.8,
        1.2,
    )
    # 4 per device x 4 accumulated / 8 responses = 2 groups; 500 optimizer steps, 2 on each rollout; a tenth warms up
    assert (several["learn.batch_groups"], several["rollout.prompts"], several["steps"]) == (2, 2, 250)
    assert (several["checkpoint_every"], several["learn.warmup_updates"], several["seed"]) == (50, 50, 7)
    assert (several["objective.name"], several["objective.options.high"]) == ("clip_higher", 1.28)
    assert (several["learn.lr"], several["learn.kl"], several["learn.betas"]) == (5e-6, 0.04, [0.9, 0.99])
    assert (several["model.lora.rank"], several["model.lora.alpha"], several["model.dtype"]) == (16, 64, "bfloat16")
    assert several["task.reward_weights"] == [1.0, 0.5]
    assert [name.rpartition(":")[2] for name in several["task.reward"]] == [
        "correctness_reward_func",
        "format_reward_func",
    ]
    assert (several["model.path"], several["out"]) == ("Qwen/Qwen2.5-1.5B-Instruct", "outputs/Qwen2.5-1.5B-Instruct")
    assert launch["task.train"] == ["~/data/gsm8k/train.parquet", "data/math/train.parquet"]
    assert (launch["rollout.max_tokens"], launch["rollout.prompts"], launch["learn.batch_groups"]) == (2048, 1024, 256)
    # verl's own loss is PPO's with the dual clip, and its bounds are stated one by one
    assert (launch["objective.name"], launch["objective.options.high"], launch["objective.options.cap"]) == (
        *("dual_clip", 1.28, 3.0),
    )
    assert (launch["eval.temperature"], launch["eval.every"], launch["offpolicy.replay_capacity"]) == (0.6, 5, 2048)
    assert launch["task.reward"] == "my_rewards.gsm:compute_score"


def test_copied_reward_functions_bring_what_they_need_and_nothing_else(here):
    assert run(["convert", str(SCRIPTS / "several_rewards.py")]) == 0
    text = (here / "several_rewards_rewards.py").read_text()
    names = {}
    exec(text, names)
    right = [[{"role": "assistant", "content": "<reasoning>a</reasoning>\n<answer>\n7\n</answer>"}]]
    assert names["correctness_reward_func"]([""], right, answer=["7"]) == [2.0]
    assert names["format_reward_func"](right) == [0.5]
    assert not {"torch", "GRPOTrainer", "load_dataset", "SYSTEM_PROMPT", "main", "argparse"} & names.keys()


HEAD = "from trl import GRPOConfig, GRPOTrainer\n"


def values(body):
    """What is read of `GRPOConfig(beta=X)` at the end of a script."""
    return {one.name: one.value for one in read_script(HEAD + body, "a.py", "a_rewards", {})[0]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("GRPOConfig(beta=1e-3 * 2)", 0.002),
        ("a = 1\na = 2\nGRPOConfig(beta=a)\na = 3", 2),
        ("def f(a):\n    pass\na = 2\nGRPOConfig(beta=a)", 2),
        ("S = dict(b=0.5)\nGRPOConfig(beta=S['b'])", 0.5),
        ("GRPOConfig(**{'beta': 0.1})", 0.1),
        ("c = GRPOConfig(beta=0.1)\nc.beta = 0.2", 0.2),
        ("class C:\n    b = 0.3\nc = C()\nGRPOConfig(beta=c.b)", 0.3),
        ("class C:\n    b = 0.3\nc = C(b=0.4)\nGRPOConfig(beta=c.b)", 0.4),
        ("B = 0.7\ndef main():\n    c = GRPOConfig(beta=B)\n    GRPOTrainer(model='m', args=c)\nmain()", 0.7),
        ("p.add_argument('--my-beta', default=0.6)\na = p.parse_args()\nGRPOConfig(beta=a.my_beta)", 0.6),
        ("import torch\nGRPOConfig(beta=torch.bfloat16)", "bfloat16"),
        ("if x:\n    a = 1\nGRPOConfig(beta=a)", None),
        ("a = 1\nif x:\n    a = 2\nGRPOConfig(beta=a)", None),
        ("a = 1\nfor a in y:\n    pass\nGRPOConfig(beta=a)", None),
        ("a = 1\na += 1\nGRPOConfig(beta=a)", None),
        ("S = {'b': 1}\nS['b'] = 2\nGRPOConfig(beta=S['b'])", None),
        ("S = [1]\nS.append(2)\nGRPOConfig(beta=S)", None),
        ("def f(a):\n    GRPOConfig(beta=a)", None),
        ("def f():\n    GRPOConfig(beta=a)\na = 1\nf()\na = 2", None),
        ("p.add_argument('--b', type=float)\nargs = p.parse_args()\nGRPOConfig(beta=args.b)", None),
        ("c = GRPOConfig(beta=0.1)\nif x:\n    c.beta = 0.2", None),
        ("GRPOConfig(beta=9 ** 9 ** 9 ** 9)", None),
        ("a = a + 1\nGRPOConfig(beta=a)", None),
        ("GRPOConfig(beta=f())", None),
        ("a0 = 1\n" + "".join(f"a{n + 1} = [a{n}, a{n}]\n" for n in range(30)) + "GRPOConfig(beta=a30)", None),
    ],
)
def test_a_value_is_read_if_it_is_certain_and_otherwise_unknown(body, expected):
    found = values(body)["beta"]
    assert isinstance(found, Unknown) if expected is None else found == expected


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ("load_dataset('o/n', split='train')", ["o/n:train"]),
        ("load_dataset('o/n', 'main')['test']", ["o/n:main:test"]),
        ("load_dataset('json', data_files='a.jsonl')['train']", ["a.jsonl"]),
        ("load_dataset('csv', data_files={'train': ['a.csv', 'b.csv']}, split='train').shuffle()", ["a.csv", "b.csv"]),
        ("load_dataset('o/n', split='train[:5%]')", None),
        ("make()", None),
    ],
)
def test_data_sets_have_our_names(loaded, expected):
    found = values(f"d = {loaded}\nGRPOTrainer(model='m', train_dataset=d)")["train_dataset"]
    assert isinstance(found, Unknown) if expected is None else found == expected


def test_what_a_script_does_to_its_data_is_said_and_a_split_is_a_holdout():
    body = "d = load_dataset('o/n', split='train').map(f)\nd = d.train_test_split(test_size=0.2)\n"
    body += "GRPOTrainer(model='m', train_dataset=d['train'], eval_dataset=d['test'])"
    made = convert("trl", read_script(HEAD + body, "a.py", "a_rewards", {})[0])
    keys = keys_of(made)
    assert (keys["task.train"], keys["task.holdout"], "task.test" in keys) == (["o/n:train"], 0.2, False)
    assert next(one.note for one in made if one.name == "train_dataset").endswith("with .map(f)")


def test_functions_of_other_modules_and_of_calls_have_names():
    body = "import mine\nfrom pack.rewards import r as q\nfrom functools import partial\n"
    body += "def f(completions, k): return [k]\n"
    body += "GRPOTrainer(model='m', reward_funcs=[mine.r, q, partial(f, k=1), lambda c: c])"
    settings, text = read_script(HEAD + body, "a.py", "a_rewards", {})
    (found,) = [one.value for one in settings if one.name == "reward_funcs"]
    assert found == ["mine:r", "pack.rewards:r", "a_rewards:reward_1", "a_rewards:reward_2"]
    names = {}
    exec(text, names)
    assert names["reward_1"]([1]) == [1]
    assert values("GRPOTrainer(model='m', reward_funcs='a/reward-model')")["reward_funcs"].why.endswith("may call it")


def test_a_script_is_never_run(here, capsys):
    (here / "bad.py").write_text(
        f"open('ran', 'w')\n{HEAD}open('ran', 'w')\nGRPOConfig(beta=open('ran', 'w').fileno())\n"
    )
    assert run(["convert", "bad.py"]) == 0
    assert not (here / "ran").exists()
    assert "computed at run time" in capsys.readouterr().out


def test_a_reward_that_needs_what_its_function_was_given_is_not_copied():
    found = values("def main(k):\n    def r(completions): return [k]\n    GRPOTrainer(model='m', reward_funcs=r)")
    assert "it needs 'k', a parameter" in found["reward_funcs"].why


def test_a_launch_line_is_filled_with_what_its_script_sets():
    text = """
A=3
B='$A'
N=${N:-4}
X=$(hostname)
C=1
C=2
FLAGS=(
    data.train_batch_size=$((A * N + 1))
)
python3 -m verl.trainer.main_ppo "${FLAGS[@]}" data.seed=$C trainer.nnodes=$X \\
    data.train_files="['$A.parquet']" # data.val_files=no
"""
    family, settings = read_launch(text, "a.sh")
    found = {one.name: (one.value, one.where) for one in settings}
    assert family == "verl"
    assert found["data.train_batch_size"] == (13, "a.sh:9")
    assert found["data.train_files"] == (["3.parquet"], "a.sh:12")
    assert isinstance(found["data.seed"][0], Unknown)
    assert isinstance(found["trainer.nnodes"][0], Unknown)
    assert len(found) == 4


def test_tables_of_settings_are_read_too(here):
    trl = {"learning_rate": 1e-5, "use_peft": True, "lora_r": 4, "model_init_kwargs": {"dtype": "float32"}}
    (here / "trl.json").write_text(json.dumps(trl, indent=1))
    family, settings = read_tables((here / "trl.json").read_text(), "trl.json")
    made = keys_of(convert(family, settings))
    assert (family, made["learn.lr"], made["model.lora.rank"], made["model.lora.alpha"]) == ("trl", 1e-5, 4, 32)
    assert made["model.dtype"] == "float32"
    verl = "actor_rollout_ref:\n  actor:\n    optim: {lr: 1e-5}\n  rollout:\n    n: 6\n    temperature: ${data.t}\n"
    family, settings = read_tables(verl, "verl.yaml")
    made = convert(family, settings)
    assert (family, keys_of(made)["learn.lr"], keys_of(made)["rollout.responses"]) == ("verl", 1e-5, 6)
    # where a line holds several, none is named
    assert [one.where for one in made[:3]] == ["verl.yaml", "verl.yaml:5", "verl.yaml:6"]
    assert made[2].note == "computed at run time"


def test_what_is_off_anyway_says_so_and_a_value_that_no_key_takes_is_named():
    settings = [Setting(name, UNSET["trl"][name]) for name in ("use_vllm", "push_to_hub", "repetition_penalty")]
    settings += [Setting("temperature", 0), Setting("lr_scheduler_type", "polynomial"), Setting("loss_type", "luspo")]
    made = convert("trl", settings)
    notes = [one.note for one in made[:6]]
    assert notes[1:3] == ["off, as here"] * 2
    assert notes[3:5] == ["rollout.temperature takes no 0", "learn.schedule takes no 'polynomial'"]
    assert notes[5] == "learn.reduction takes no 'luspo'"
    assert not {"rollout.temperature", "learn.schedule", "learn.reduction"} & keys_of(made).keys()


def test_adapters_of_a_script_are_known_or_left_and_never_made_up():
    known = [Setting("peft_config", "LoraConfig"), Setting("peft_config.target_modules", ".*proj")]
    made = convert("trl", known)
    assert (keys_of(made)["model.lora.rank"], keys_of(made)["model.lora.alpha"]) == (8, 8)  # peft's defaults
    assert "model.lora.targets" not in keys_of(made)
    assert "all linear layers" in made[1].note
    made = convert("trl", [Setting("peft_config", Unknown("get_peft_config(args)"))])
    assert "model.lora.rank" not in keys_of(made)
    assert made[0].note == "computed at run time"


def test_what_is_done_every_so_often_counts_steps_of_ours():
    asked = [Setting("eval_strategy", "steps"), Setting("logging_steps", 6), Setting("save_strategy", "epoch")]
    keys = keys_of(convert("trl", [*asked, Setting("num_iterations", 3)]))
    assert (keys["eval.every"], "checkpoint_every" in keys) == (2, False)
    assert keys_of(convert("trl", [Setting("eval_strategy", "no")]))["eval.every"] == 0
    assert keys_of(convert("verl", [Setting("trainer.test_freq", -1)]))["eval.every"] == 0


def test_sizes_of_a_batch_count_processes():
    settings = [Setting("per_device_train_batch_size", 4), Setting("num_generations", 16)]
    settings += [Setting("steps_per_generation", 8), Setting("max_steps", 100)]
    made = convert("trl", settings)
    one, eight = keys_of(made), keys_of(convert("trl", settings, processes=8))
    assert (eight["rollout.prompts"], eight["learn.batch_groups"], eight["steps"]) == (16, 2, 13)
    assert keys_of(convert("trl", [*settings, Setting("num_processes", 8)])) == eight
    assert (one["rollout.prompts"], one["learn.batch_groups"]) == (2, 1)
    assert "4 responses on 1 processes" in made[0].note


def test_nothing_is_overwritten_and_mistakes_are_told(here, capsys):
    assert run(["convert", str(SCRIPTS / "quickstart.py"), "--out", "a.toml"]) == 0
    assert run(["convert", str(SCRIPTS / "quickstart.py"), "--out", "a.toml"]) == 2
    assert "a.toml and quickstart_rewards.py exists, and nothing is overwritten" in capsys.readouterr().err
    for name, text, told in (
        ("none.py", "print(1)", "calls neither GRPOConfig nor GRPOTrainer"),
        ("broken.py", "def", "broken.py:1 is not valid Python"),
        ("deep.py", "(" * 500 + ")" * 500, "deep.py"),
        ("none.sh", "echo a=1", "has no settings of verl"),
        ("broken.yaml", "a: [", "is no GRPOConfig and no table of verl in YAML"),
        ("list.json", "[1]", "holds no settings"),
        ("deep.json", '{"a": ' * 2000 + "1" + "}" * 2000, "is no GRPOConfig and no table of verl in JSON"),
        ("bomb.yaml", "a0: &a0 1\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(30)), "aliases"),
        ("round.yaml", "a: &a [*a]\n", "aliases"),
    ):
        (here / name).write_text(text)
        assert run(["convert", name]) == 2, name
        assert told in capsys.readouterr().err
