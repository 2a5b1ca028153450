"""What TRL's own tests ask of GRPOTrainer holds of BapoTrainer: each feature trains, moves the weights, logs bounds."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from bapo.adapters.trl import LOSS_TYPES, BapoTrainer
from bapo.core.bounds import StopReason
from bapo.core.entropy_rule import QUADRANTS
from tests.adapters.trl.tiny import config, digits, log_of, model, prompts, tokenizer, trained, weights

BOUNDS = ("bapo/clip_low", "bapo/clip_high", "bapo/share", "bapo/share_at_start", "bapo/share_at_end")


def short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


async def asynchronous(completions, **kwargs):
    return digits(completions)


def by_column(prompts, completions, answer, **kwargs):
    """Uses a column of the dataset, and has no opinion on odd answers."""
    assert [f"{a}:" for a in answer] == prompts
    return [None if a % 2 else float(text.startswith(str(a))) for a, text in zip(answer, completions, strict=True)]


def learned(run, *, before=None):
    """The run finished its updates, logged every bound as a number, and its weights moved."""
    steps = run.state.global_step
    assert steps == run.args.max_steps
    silent = [value == 1 for value in log_of(run, "bapo/stop/no_signal")]
    assert len(silent) == steps
    for key in BOUNDS:
        values = log_of(run, key)
        assert len(values) == steps - sum(silent) > 0, key
        assert all(math.isfinite(value) for value in values), key
    settings = run.args.clip_settings
    assert all(settings.low[0] - 1e-6 <= low <= settings.low[1] + 1e-6 for low in log_of(run, "bapo/clip_low"))
    assert all(settings.high[0] - 1e-6 <= high <= settings.high[1] + 1e-6 for high in log_of(run, "bapo/clip_high"))
    initial = dict((before or model()).named_parameters())
    assert any(not torch.equal(value, initial[name]) for name, value in weights(run).items() if name in initial)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("preset", ["paper", "weak-model", "released-script"])
def test_loss_types_and_presets(tmp_path, loss_type, preset):
    learned(trained(tmp_path, loss_type=loss_type, bapo_preset=preset))


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 3, "max_steps": 6},
        {"steps_per_generation": 4, "num_iterations": 1},
        {"generation_batch_size": 16, "num_iterations": 1},
        {"top_entropy_quantile": 0.2},
        {"off_policy_mask_threshold": 0.1},
        {"delta": 3.0},
        {"gradient_checkpointing": True},
        {"scale_rewards": "batch"},
        {"bapo_weight": "rollout_prob"},
        {"bapo_order": "low_first", "bapo_measure": "surrogate"},
    ],
    ids=str,
)
@pytest.mark.parametrize("scope", ["update", "microbatch"])
def test_options(tmp_path, options, scope):
    learned(trained(tmp_path, bapo_scope=scope, **options))


@pytest.mark.parametrize("rewards", [[digits, short], [asynchronous], [digits, by_column]], ids=str)
def test_reward_functions(tmp_path, rewards):
    run = trained(tmp_path, arguments={"reward_funcs": rewards}, reward_weights=[1.0, 0.5][: len(rewards)])
    learned(run)
    for function in rewards:
        assert log_of(run, f"rewards/{function.__name__}/mean")


def test_one_microbatch_may_be_masked_entirely(tmp_path):
    """Completions that never end are masked; with one per micro-batch most micro-batches hold no token at all."""
    run = trained(
        tmp_path,
        mask_truncated_completions=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_completion_length=3,
    )
    assert max(log_of(run, "completions/clipped_ratio")) > 0.5
    learned(run)


def test_updates_without_a_signal_have_no_bounds_to_log(tmp_path):
    run = trained(tmp_path, arguments={"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)})
    assert log_of(run, "bapo/stop/no_signal") == [1.0] * 4
    assert not any("bapo/clip_high" in entry or "bapo/share" in entry for entry in run.state.log_history)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_peft(tmp_path, checkpointing):
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    run = trained(tmp_path, arguments={"peft_config": adapter}, gradient_checkpointing=checkpointing, beta=0.01)
    assert len(log_of(run, "bapo/clip_high")) == 4
    moved = weights(run)
    assert any(value.abs().sum() > 0 for name, value in moved.items() if "lora_B" in name)
    initial = dict(model().named_parameters())
    frozen = {name.removeprefix("base_model.model."): value for name, value in moved.items() if "lora" not in name}
    assert all(torch.equal(value, initial[name.replace("base_layer.", "")]) for name, value in frozen.items())


def test_chat_messages(tmp_path):
    chat = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i % 10}:"}] for i in range(32)]})
    learned(trained(tmp_path, arguments={"train_dataset": chat}))


def test_streaming_dataset(tmp_path):
    learned(trained(tmp_path, arguments={"train_dataset": prompts().to_iterable_dataset()}))


def test_evaluation_is_trls_own(tmp_path):
    run = trained(
        tmp_path,
        arguments={"eval_dataset": prompts(8)},
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )
    learned(run)
    assert len(log_of(run, "eval_reward")) == 2
    assert not any(key.startswith("eval_bapo") for entry in run.state.log_history for key in entry)


def test_checkpoint_and_resume(tmp_path):
    """TRL does not save its generation buffer, so checkpoints fall where a new generation begins."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    whole = trained(tmp_path / "whole", **options)
    again = BapoTrainer(
        model(),
        digits,
        config(tmp_path / "again", **options),
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.state.global_step == 4
    for key in ("loss", *BOUNDS):
        assert log_of(again, key) == log_of(whole, key)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(again).items())


def test_metrics_go_through_trls_own_log(tmp_path):
    class Seen(TrainerCallback):
        logs = []  # noqa: RUF012

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(logs)

    run = trained(tmp_path, arguments={"callbacks": [Seen()]}, log_completions=True, logging_steps=2)
    assert (tmp_path / "completions" / "completions_00002.parquet").is_file()
    first = Seen.logs[0]
    quadrants = [first[f"bapo/{name}_{fate}"] for name in QUADRANTS for fate in ("retained", "blocked")]
    assert sum(quadrants) == pytest.approx(1)
    assert sum(first[f"bapo/stop/{reason.name.lower()}"] for reason in StopReason) == pytest.approx(1)
    assert "bapo/predicted_entropy_change" in first
    assert "entropy" in first
    assert len(log_of(run, "bapo/share")) == 2


def test_the_model_card_names_the_method(tmp_path):
    run = trained(tmp_path, max_steps=1)
    run.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert "2510.18927" in card
    assert "BAPO" in card
    assert {"trl", "grpo", "bapo"} <= set(run.model.model_tags)
    assert all(f"- {tag}\n" in card for tag in ("trl", "grpo", "bapo"))
    assert "@article{xi2025bapo,\n    title        = {{BAPO: Stabilizing Off-Policy" in card


def test_a_reward_that_verifies_is_learned(tmp_path):
    """Answer with the digit that was asked for: from chance to more than half, each generation used four times."""

    def correct(completions, answer, **kwargs):
        return [float(text.startswith(str(a))) for a, text in zip(answer, completions, strict=True)]

    run = trained(
        tmp_path,
        arguments={
            "reward_funcs": correct,
            "train_dataset": Dataset.from_dict(
                {"prompt": [f"{i % 4}:" for i in range(64)], "answer": [0, 1, 2, 3] * 16}
            ),
        },
        per_device_train_batch_size=64,
        num_generations=16,
        num_iterations=4,
        max_completion_length=2,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        max_steps=160,
    )
    rewards = log_of(run, "reward")
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.6
    assert len(set(log_of(run, "bapo/used_low"))) > 3


def test_the_example_learns(tmp_path):
    script = Path(__file__).parents[3] / "examples" / "trl_bapo.py"
    command = [sys.executable, str(script), "--output_dir", str(tmp_path), "--max_steps=60", "--disable_tqdm=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    correct = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert correct[0] < 0.2
    assert correct[-1] > 0.5
