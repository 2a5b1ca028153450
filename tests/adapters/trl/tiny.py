"""The smallest real thing: a one-layer Llama, the embedded model's character tokenizer, and digits as prompts."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func

from datasets import Dataset
from transformers import AutoTokenizer

from bapo.adapters.trl import BapoConfig, BapoTrainer
from bapo.demo import model_path
from tests.tiny.models import untrained

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
FIXED = {"bapo_low": [0.8, 0.8], "bapo_high": [1.2, 1.2]}


def tokenizer():
    loaded = AutoTokenizer.from_pretrained(model_path(), padding_side="left")
    loaded.chat_template = CHAT_TEMPLATE
    return loaded


def model(**options):
    return untrained(tokenizer(), num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, **options)


def prompts(count=64):
    return Dataset.from_dict({"prompt": [f"{i % 10}:" for i in range(count)], "answer": [i % 10 for i in range(count)]})


def digits(completions, **kwargs):
    """Share of characters that are digits: graded, so that nearly every group has a signal."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


SMALL = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 4,
    "num_iterations": 2,
    "learning_rate": 1e-2,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}
"""Off-policy in every second update, two micro-batches in each."""


def config(out, kind=BapoConfig, **options):
    return kind(output_dir=str(out), **{**SMALL, **options})


def trained(out, trainer=BapoTrainer, kind=BapoConfig, *, arguments=None, **options):
    """A trainer after training."""
    arguments = {
        "model": model(),
        "reward_funcs": digits,
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
        **(arguments or {}),
    }
    built = trainer(args=config(out, kind, **options), **arguments)
    built.train()
    return built


def log_of(trainer, key):
    """The values of one metric, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
