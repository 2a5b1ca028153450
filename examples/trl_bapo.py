"""BAPO in a TRL script: a GRPOTrainer script with two names changed.

A small Llama with random weights learns to add one from the reward alone (the answer to `7+1=` is `8`). Each generation
is used for four optimizer steps. It runs offline, on CPU, in about half a minute:

    pip install -c constraints/base.txt -c constraints/trl.txt '.[trl]'
    python examples/trl_bapo.py [--max_steps 100] [--bapo_objective grpo] [--bapo_preset paper]

Every option of GRPOConfig is an option here too. On several devices, start the script with `accelerate launch`.
"""

from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed

from bapo.adapters.trl import BapoConfig, BapoTrainer
from bapo.demo import model_path

DEFAULTS = {
    "output_dir": "runs/trl_bapo",
    "per_device_train_batch_size": 128,
    "gradient_accumulation_steps": 2,
    "num_generations": 16,
    "num_iterations": 4,
    "max_completion_length": 2,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 100,
    "logging_steps": 10,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
}


def correct(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """1 if the completion starts with the answer, otherwise 0."""
    return [float(text.startswith(right)) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    parser = HfArgumentParser(BapoConfig)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)  # also seeds the initial weights

    tokenizer = AutoTokenizer.from_pretrained(model_path(), padding_side="left")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    questions = [{"prompt": f"{digit}+1=", "answer": str(digit + 1)} for digit in range(9)] * 8

    trainer = BapoTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **special)),
        reward_funcs=correct,
        args=args,
        train_dataset=Dataset.from_list(questions),
        processing_class=tokenizer,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print("step {step:4d}  correct {reward:.3f}  entropy {entropy:.3f}".format_map(entry), end="  ")
            low, high, share = (entry.get(f"bapo/{name}", float("nan")) for name in ("clip_low", "clip_high", "share"))
            print(f"bounds {low:.2f} {high:.2f}  share {share:.2f}")  # nan where no reward differed


if __name__ == "__main__":
    main()
