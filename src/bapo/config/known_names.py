"""What somebody meant by a key that a configuration does not have: a name of TRL or verl, or a slip of the pen.

A name is the last part of theirs: actor_rollout_ref.actor.ppo_epochs is known as ppo_epochs. `python docs/names.py`
prints docs/names.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import BaseModel

from bapo.config.words import leaves

_END = r"(?!\w|\.\w)"
"""What follows a whole key."""


class Known(NamedTuple):
    """A setting that people know under another name."""

    trl: str
    """Its names in TRL, separated by commas; empty if TRL has none."""
    verl: str
    """Its names in verl."""
    key: str
    """The key here; empty if there is none."""
    remark: str = ""
    """What differs, as a sentence or several."""


BOUNDS = (
    "The bounds are on the ratio: low = 1 - epsilon, high = 1 + epsilon. They are options of objective.name = "
    '"clip_higher" or "grpo"; presets of bapo have their own. For epsilon 0.2 and epsilon_high 0.28, write '
    "objective.options = { low = 0.8, high = 1.28 }."
)
EPOCHS = "An epoch over n problems takes n / rollout.prompts steps. Where max_steps is set too, TRL goes by max_steps."
GROUPS = (
    "It counts groups: one prompt with all of its responses. From TRL: per_device_train_batch_size x "
    "gradient_accumulation_steps x processes / num_generations. TRL samples for one update at a time, so set "
    "rollout.prompts to the same number, unless steps_per_generation or generation_batch_size is set."
)
PROMPTS = (
    "It counts prompts, each of which gets rollout.responses. If a TRL script sets neither, it samples for one update: "
    "as many prompts as learn.batch_groups."
)
STEPS = (
    "TRL counts optimizer steps. Here one step samples once and makes all updates on it, so divide TRL's number by the "
    "updates per step: num_iterations, unless steps_per_generation is set. The dry run shows them."
)
KL = (
    "It is the k3 estimate (low_var_kl), in the loss; the reference is always the weights with which the run began. It "
    "is not weighed by the ratio, as TRL does unless use_bias_correction_kl=False. It is for runs in one process."
)
NO_KL_IN_REWARD = "No penalty is taken from rewards here. learn.kl adds one to the loss."
ONE_UPDATE = "An update is one optimizer step on the whole batch; this key only divides its work."

NAMES = (
    Known("model_name_or_path", "path", "model.path"),
    Known("torch_dtype, dtype, bf16, fp16", "dtype, model_dtype", "model.dtype"),
    Known("attn_implementation", "attn_implementation", "model.attention"),
    Known("lora_r, r", "lora_rank", "model.lora.rank"),
    Known("lora_alpha", "lora_alpha", "model.lora.alpha"),
    Known("lora_target_modules, target_modules", "target_modules", "model.lora.targets"),
    Known("system_prompt", "", "model.system"),
    Known("chat_template_kwargs", "apply_chat_template_kwargs", "model.template_options"),
    Known("dataset_name, train_dataset", "train_files", "task.train", "Files, directories, benchmarks or hub ids."),
    Known("eval_dataset, dataset_test_split", "val_files", "task.test", "It must be set: every run is evaluated."),
    Known("", "prompt_key", "task.prompt_column", "task.answer_column names the column of the answer."),
    Known("max_prompt_length", "max_prompt_length", "task.max_prompt_tokens", "Longer problems are left out."),
    Known("reward_funcs", "custom_reward_function, compute_score", "task.reward",
          "module:function, or math. The function scores one response, and not a list of them."),
    Known("mask_truncated_completions", "", "", "Truncated responses stay in the batch. task.overlong_tokens takes "
          "reward from responses that come near the limit."),
    Known("", "overlong_buffer, overlong_buffer_len", "task.overlong_tokens"),
    Known(
        "generation_batch_size, steps_per_generation",
        "train_batch_size, gen_batch_size",
        "rollout.prompts",
        PROMPTS,
    ),
    Known("num_generations", "n", "rollout.responses"),
    Known("temperature", "temperature", "rollout.temperature"),
    Known("max_completion_length", "max_response_length", "rollout.max_tokens"),
    Known("top_p, top_k, min_p, repetition_penalty", "top_p, top_k", "", "Responses are sampled from the whole "
          "distribution, so that the recorded log-probs are those of the policy. rollout.temperature may be set."),
    Known("reward_weights", "", "task.reward", "Add the parts up in one function."),
    Known("", "max_num_seqs", "rollout.slots"),
    Known("", "max_num_batched_tokens", "rollout.cache_tokens"),
    Known("num_iterations", "ppo_epochs", "offpolicy.reuse", "Passes over each rollout."),
    Known("", "staleness_threshold", "offpolicy.max_staleness", "It counts updates and holds for every token."),
    Known("", "partial_rollout", "offpolicy.partial_budget", "It counts the tokens that are sampled per step."),
    Known("", "loss_mode", "objective.name"),
    Known("importance_sampling_level", "", "objective.name", "Ratios of whole responses: \"gspo\"."),
    Known("epsilon, epsilon_low", "clip_ratio, clip_ratio_low", "objective.options", BOUNDS),
    Known("epsilon_high", "clip_ratio_high", "objective.options", BOUNDS),
    Known("delta", "clip_ratio_c", "objective.options", "The cap of objective.name = \"dual_clip\"."),
    Known("learning_rate", "lr", "learn.lr"),
    Known("lr_scheduler_type", "lr_scheduler_type, warmup_style", "learn.schedule"),
    Known("warmup_steps, warmup_ratio", "lr_warmup_steps, lr_warmup_steps_ratio", "learn.warmup_updates",
          "It counts updates. A ratio is a part of all of them."),
    Known("adam_beta1, adam_beta2", "betas", "learn.betas", "A list of both."),
    Known("max_grad_norm", "grad_clip, clip_grad", "learn.clip_norm"),
    Known(
        "per_device_train_batch_size, gradient_accumulation_steps", "ppo_mini_batch_size", "learn.batch_groups", GROUPS
    ),
    Known(
        "",
        "ppo_micro_batch_size, ppo_micro_batch_size_per_gpu, ppo_max_token_len_per_gpu, use_dynamic_bsz",
        "learn.micro_tokens",
        ONE_UPDATE,
    ),
    Known("loss_type", "loss_agg_mode", "learn.reduction", "dapo, bnpo and token-mean are token_mean; grpo is "
          "sequence_mean; dr_grpo is fixed_length."),
    Known("scale_rewards", "adv_estimator, norm_adv_by_std_in_grpo", "learn.advantages",
          "TRL's group (or true) is grpo, its none (or false) is dr_grpo. Its batch does not exist here."),
    Known("gradient_checkpointing", "enable_gradient_checkpointing", "learn.activation_checkpointing"),
    Known("torch_compile", "use_torch_compile", "learn.compile"),
    Known("beta", "kl_loss_coef, use_kl_loss, kl_loss_type", "learn.kl", KL),
    Known("", "kl_coef, use_kl_in_reward", "", NO_KL_IN_REWARD),
    Known("", "entropy_coeff", "", "There is no entropy term here. What keeps entropy up is the clip."),
    Known("max_steps", "total_training_steps", "steps", STEPS),
    Known("num_train_epochs", "total_epochs", "steps", EPOCHS),
    Known("output_dir", "default_local_dir", "out"),
    Known("save_steps", "save_freq", "checkpoint_every", STEPS),
    Known("save_total_limit", "max_actor_ckpt_to_keep", "checkpoint_keep"),
    Known("eval_steps, eval_strategy", "test_freq", "eval.every", STEPS),
    Known("num_generations_eval", "val_kwargs", "eval.k"),
    Known("use_vllm, vllm_mode", "", "cluster.engine",
          "vllm, together with cluster.rollouts: engines are then processes of their own, under Ray. Without these "
          "keys, the engine of bapo samples in the process that learns."),
    Known("vllm_tensor_parallel_size", "tensor_model_parallel_size", "cluster.gpus_per_rollout"),
    Known("", "n_gpus_per_node, nnodes", "cluster.learners", "cluster.rollouts says how many processes sample."),
    Known("report_to", "logger", "log.to", "A list. Nothing is uploaded unless the tool's own variables say so."),
    Known("", "project_name", "log.project"),
    Known("logging_steps, log_completions", "log_val_generations", "", "Every step is logged, in the run directory. "
          "`bapo report RUN` shows it."),
)  # fmt: skip


def known_setting(key: str) -> Known | None:
    """The setting that has this name in TRL or verl; None if neither has it."""
    last = _last(key)
    return next((known for known in NAMES if last and any(last in _names(theirs) for theirs in known[:2])), None)


def hint(key: str) -> str | None:
    """What a key that does not exist is called here, in a sentence or two; None if the name is not known."""
    known, last = known_setting(key), _last(key)
    if known is None:
        return None
    whose = [name for name, theirs in (("TRL", known.trl), ("verl", known.verl)) if last in _names(theirs)]
    told = f"In {' and '.join(whose)}, {last} is what {known.key} is here." if known.key else ""
    return " ".join(filter(None, (told, known.remark)))


def known_elsewhere(key: str, schema: type[BaseModel]) -> Known | None:
    """What a name of TRL or verl is called here; None if the schema does not have that key.

    A name that another table has is more likely meant by itself.
    """
    keys = leaves(schema)
    known = None if key.rpartition(".")[2] in {name.rpartition(".")[2] for name in keys} else known_setting(key)
    elsewhere = known is not None and known.key and not any(f"{name}.".startswith(f"{known.key}.") for name in keys)
    return None if elsewhere else known


def similar(key: str, schema: type[BaseModel], *, table: bool) -> list[str]:
    """The keys that may have been meant: the same name in other tables, or else the one with the nearest spelling.

    `table`: what is not known is a table of keys, and so is what was meant.
    """
    known = list(leaves(schema))
    if table:
        known = list(dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name))
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return same or difflib.get_close_matches(key, known, n=1)


def meant(key: str, schema: type[BaseModel], *, table: bool) -> list[str]:
    """The keys and tables that a correction of an unknown key may set."""
    known = known_elsewhere(key, schema)
    return similar(key, schema, table=table) if known is None else [known.key]


def names_any(text: str, keys: Iterable[str], schema: type[BaseModel]) -> bool:
    """Whether a message names one of these keys, or a key in one of these tables.

    A key that is in no table is an ordinary word, such as out. It is named where its value follows.
    """
    meant = [key for key in leaves(schema) if any(f"{key}.".startswith(f"{one}.") for one in keys if one)]
    return any(re.search(rf"(?<![\w.]){re.escape(key)}{_END if '.' in key else '='}", text) for key in meant)


def _last(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",")]
