"""The time of an optimizer step of BapoTrainer against TRL's GRPOTrainer, in one run, on the same tokens.

    .venv-trl/bin/python benchmarks/trl_overhead.py [--rounds 5] [--layers 4] [--hidden 256] [--length 64] [--threads N]

Three trainers take turns: GRPOTrainer, BapoTrainer at scope microbatch, and BapoTrainer at scope update. The target
share is 0, so BAPO's search looks at all its candidates and always stays at (0.8, 1.2), GRPO's own bounds. All three
train on the same tokens to the same weights, which is checked, and do the same work apart from BAPO's own. On CPU the
clock is the process's CPU time, so that other programs on a shared machine matter less; on CUDA it is the wall clock.
Each generation is used for `--iterations` steps: `train` counts the steps without generation, and `all` counts every
step. A step's work is the same in every round, so its time is the minimum over rounds. Next to each ratio are the
lowest and the highest ratio of the paired rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from timing import synchronize, table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bapo.adapters.trl import BapoConfig, BapoTrainer
from bapo.demo import model_path

BAPO = {"bapo_target_share": 0.0, "bapo_low": [0.8, 0.9], "bapo_high": [1.2, 3.0]}
CANDIDATES = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig, {}),
    "bapo microbatch": (BapoTrainer, BapoConfig, {**BAPO, "bapo_scope": "microbatch"}),
    "bapo update": (BapoTrainer, BapoConfig, {**BAPO, "bapo_scope": "update"}),
}


def reward(completions: list[str], **kwargs: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / len(text) for text in completions]


class Clock(TrainerCallback):
    """Seconds of each optimizer step."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, []

    def now(self) -> float:
        synchronize(self.device)
        return time.process_time() if self.device == "cpu" else time.perf_counter()

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.begin = self.now()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.times.append(self.now() - self.begin)


def step_times(name: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """The seconds of each step, and a sum of the weights that shows whether two runs ended at the same ones."""
    trainer_class, config_class, extra = CANDIDATES[name]
    tokenizer = AutoTokenizer.from_pretrained(model_path(), padding_side="left")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    on_cpu = options.device == "cpu"
    with tempfile.TemporaryDirectory() as out:
        config = config_class(
            output_dir=out,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            num_generations=8,
            num_iterations=options.iterations,
            max_completion_length=options.length,
            # every completion has full length, in tokens that the small tokenizer can decode
            generation_kwargs={
                "min_new_tokens": options.length,
                "suppress_tokens": list(range(len(tokenizer), options.vocabulary)),
            },
            max_steps=options.iterations * 2,
            learning_rate=1e-3,
            bf16=not on_cpu,
            use_cpu=on_cpu,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **extra,
        )
        rows = [f"{i % 10}:" for i in range(256)]
        clock = Clock(options.device)
        trainer_class(
            model,
            reward,
            config,
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=tokenizer,
            callbacks=[clock],
        ).train()
        return clock.times, sum(float(p.detach().double().sum()) for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in {
        "rounds": 5,
        "layers": 4,
        "hidden": 256,
        "vocabulary": 4096,
        "length": 64,
        "batch": 8,
    }.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 1)))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    measured: dict[str, list[list[float]]] = {name: [] for name in CANDIDATES}  # by round, then step
    for turn in range(options.rounds + 1):
        weights = {}
        for name in CANDIDATES:
            times, weights[name] = step_times(name, options)
            if turn:  # the first round warms up
                measured[name].append(times)
        assert len(set(weights.values())) == 1, f"the runs differ: {weights}"

    steps = range(options.iterations * 2)
    kinds = ([step for step in steps if step % options.iterations], list(steps))
    rows = []
    for name, rounds in measured.items():
        row = [name]
        for kind in kinds:
            least, base = (
                statistics.mean(min(times[step] for times in measured[which]) for step in kind)
                for which in (name, "GRPOTrainer")
            )
            paired = [
                sum(ours[step] for step in kind) / sum(theirs[step] for step in kind)
                for ours, theirs in zip(rounds, measured["GRPOTrainer"], strict=True)
            ]
            row += [f"{least * 1e3:.1f}", f"{least / base:.3f}  [{min(paired):.3f}, {max(paired):.3f}]"]
        rows.append(row)
    tokens = options.batch * options.accumulation * options.length
    print(
        f"{tokens} tokens per step in {options.accumulation} micro-batches, {options.rounds} rounds, {options.device}\n"
    )
    print(table(["", "train ms", "ratio", "all ms", "ratio"], rows))


if __name__ == "__main__":
    main()
