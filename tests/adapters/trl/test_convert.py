"""`bapo convert` on scripts as TRL has them, with TRL's own reward functions: the recipes pass a dry run."""

import ast
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("math_verify", reason="TRL's accuracy_reward needs it: make test-integrations")

import trl

from bapo.cli import run
from tests.adapters.trl.tiny import tokenizer
from tests.tiny.models import untrained

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
DOCUMENTED = """\
# train_grpo.py
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
LAUNCHED = """\
python trl/scripts/grpo.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/math-reasoning \\
    --learning_rate 1.0e-5 --per_device_train_batch_size 2 --gradient_accumulation_steps=4 --use_peft --lora_r 32 \\
    --lora_alpha 16 --output_dir Qwen2-0.5B-GRPO-LoRA --reward_funcs accuracy_reward think_format_reward
"""


def converted(here, *files):
    """The recipe for these files. Every option and every argument of the trainer stands in it with its place."""
    assert run(["convert", *files, "--out", "recipe.toml"]) == 0
    text = (here / "recipe.toml").read_text()
    for file in files:
        written = (here / file).read_text()
        given = re.findall(r"--(\w+)", written)
        if file.endswith(".py"):
            calls = [node for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Call)]
            (trainer,) = [call for call in calls if getattr(call.func, "id", "") == "GRPOTrainer"]
            filled = {"args", "peft_config", "quantization_config"} if "Parser" in written else set()  # by options
            given = [word.arg for word in trainer.keywords if word.arg not in filled]
            given += ["model_init_kwargs"] if "model_init_kwargs.update" in written else []
        assert [one for one in given if not re.search(rf"#.*:\d+.*\b{one}\b", text)] == [], text
    return text, tomllib.loads(text)


def dry_run(here, *words):
    (here / "train.jsonl").write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"{n}+{n}="}], "solution": f"${2 * n}$"}) + "\n"
            for n in range(8)
        )
    )
    made = tokenizer()
    untrained(made, max_position_embeddings=2048).save_pretrained(here / "model")
    made.save_pretrained(here / "model")
    data = ["--task.train", "train.jsonl", "--task.holdout", "0.25", "--task.answer_column", "solution"]
    return run(["train", "recipe.toml", "--dry-run", *data, "--model.path", "model", "--device", "cpu", *words])


def test_the_documented_example(here, capsys):
    (here / "train_grpo.py").write_text(DOCUMENTED)
    _, keys = converted(here, "train_grpo.py")
    assert (keys["task"]["reward"], keys["task"]["train"]) == (
        "trl.rewards:accuracy_reward",
        ["trl-lib/DeepMath-103K:train"],
    )
    assert keys["learn"]["lr"] == trl.GRPOConfig("out", bf16=False).learning_rate
    assert dry_run(here, "--steps", "1") == 0, capsys.readouterr().err


def test_trls_own_script_with_its_launch_line(here, capsys):
    """Adapters and several rewards, all of them options of the script that comes with TRL."""
    shutil.copy(Path(trl.__file__).parent / "scripts" / "grpo.py", here / "grpo.py")
    (here / "launch.sh").write_text(LAUNCHED)
    _, keys = converted(here, "grpo.py", "launch.sh")
    assert keys["task"]["reward"] == ["trl.rewards:accuracy_reward", "trl.rewards:think_format_reward"]
    assert keys["task"]["train"] == ["trl-lib/math-reasoning:train"]
    assert keys["model"]["lora"] == {"rank": 32, "alpha": 16}
    assert (keys["learn"]["batch_groups"], keys["learn"]["lr"]) == (1, 1e-5)  # 2 x 4 responses are one group of 8
    assert dry_run(here, "--steps", "1") == 0, capsys.readouterr().err


def test_an_example_that_a_parser_fills(here, capsys):
    for name in ("parsed.py", "parsed.sh"):
        shutil.copy(SCRIPTS / name, here / name)
    text, keys = converted(here, "parsed.py", "parsed.sh")
    assert keys["task"]["reward"] == ["trl.rewards:think_format_reward", "trl.rewards:accuracy_reward"]
    assert keys["model"]["lora"] == {"rank": 16, "alpha": 32, "targets": ["q_proj", "v_proj"]}
    assert keys["objective"] == {"name": "gspo", "options": {"low": 0.9997, "high": 1.0004}}
    # 8 per device x 2 processes x 8 steps of generation / 8 responses, and 2 accumulated
    assert (keys["rollout"]["prompts"], keys["learn"]["batch_groups"]) == (16, 4)
    assert "train[:5%]: a part of a split has no name here" in text
    assert dry_run(here, "--steps", "1") == 0, capsys.readouterr().err
