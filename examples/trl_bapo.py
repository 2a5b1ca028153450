"""BAPO in a TRL script: what would be a GRPOTrainer script, with two names changed.

The embedded model (0.8M parameters) learns countdown by search, each generation used for four optimizer steps. Offline,
on CPU, about two minutes:

    pip install -c constraints.txt -c constraints-trl.txt '.[trl]'
    python examples/trl_bapo.py [--max_steps 120] [--bapo_preset weak-model] [--bapo_scope microbatch]

Every option of GRPOConfig works too; on several devices start it with `accelerate launch`.
"""

from dataclasses import asdict

from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser

from bapo.adapters.trl import BapoConfig, BapoTrainer
from bapo.demo import MAX_RESPONSE_TOKENS, model_path
from bapo.tasks.countdown import Countdown
from bapo.types import Problem

DEFAULTS = {
    "output_dir": "runs/trl_bapo",
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "num_iterations": 4,
    "max_completion_length": MAX_RESPONSE_TOKENS,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 120,
    "logging_steps": 4,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
}

task = Countdown()


def solved(completions: list[str], problem: list[dict], **kwargs: object) -> list[float]:
    """1 where the last try of a closed search really makes the target."""
    return [task.score(Problem(**row), text) for row, text in zip(problem, completions, strict=True)]


def main() -> None:
    parser = HfArgumentParser(BapoConfig)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    trainer = BapoTrainer(
        model=str(model_path()),
        reward_funcs=solved,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "problem": asdict(p)} for p in task.train]),
        processing_class=AutoTokenizer.from_pretrained(model_path(), padding_side="left"),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"solved: {first:.3f} in the first five logs, {last:.3f} in the last five")


if __name__ == "__main__":
    main()
