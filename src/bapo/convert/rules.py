"""Rules for keys that need more than one value under another name: several settings together, or other units.

A rule gets the settings, the key, and the rows of the table that have it. It returns the keys that it makes, usually
that one; a `Left` says why there is none. A key that has no rule takes the value that is given, or what the table calls
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from bapo.config.known_names import Known, names_of
from bapo.config.run import Config
from bapo.config.words import leaves
from bapo.convert.settings import OFF, Left, Theirs, check_values
from bapo.core.settings import OBJECTIVE_OPTIONS, AdvantageName


def same(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    """The one value that is given, under the name that the table has for it."""
    values = {their: our for row in known for their, our in row.values.items()}
    value = next((value for name in theirs.named(known) if (value := theirs[name]) is not None), None)
    return {} if value is None else {key: values.get(str(value).lower(), value)}


def _listed(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    found = same(theirs, key, known)
    return {name: [value] if isinstance(value, str) else value for name, value in found.items()}


def _decided_here(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    """Nothing: memory and processes are those of a machine."""
    for name in theirs.named(known):
        told = f"yours to decide: {key}. {known[0].remark.partition('. ')[0]}".rstrip(". ")
        theirs.leave(OFF if theirs[name] is False else told, name)
    return {}


def _dtype(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    names = {"bf16": "bfloat16", "fp32": "float32", "None": "auto"}
    if theirs["fp16"]:
        raise Left("weights have float32 or bfloat16 here")
    given = theirs["torch_dtype"] or theirs["dtype"] or theirs["model_dtype"]
    if given is None and theirs["bf16"] is not None:
        given = "bfloat16" if theirs["bf16"] else "float32"
    shown = str(given).removeprefix("torch.")
    return {} if given is None else {key: names.get(shown, shown)}


def _lora(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    names = theirs.named(known)
    if theirs.family == "verl":
        rank, alpha = theirs["lora_rank"], theirs["lora_alpha"]
        if not rank:
            return theirs.leave("lora_rank is 0, so all weights are trained", *names)
    else:
        of_peft = theirs["peft_config"] is not None or "r" in theirs.given
        if not of_peft and not theirs["use_peft"]:
            return theirs.leave("use_peft is off", *names)
        rank = theirs["r"] or theirs["lora_r"] or (8 if of_peft else 16)  # peft's default, and that of ModelConfig
        alpha = theirs["lora_alpha"] or (8 if of_peft else 32)
    targets = theirs["target_modules"] or theirs["lora_target_modules"]
    every = targets is None or isinstance(targets, str) or targets == ["all-linear"]
    if every and targets not in ("all-linear", ["all-linear"]):
        told = "all linear layers get adapters here; model.lora.targets names others"
        theirs.remarks |= {"peft_config": told, "target_modules": told}
    return {key: rank, "model.lora.alpha": alpha} | ({} if every else {"model.lora.targets": targets})


def _train(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if theirs.family == "trl" and theirs["dataset_name"]:
        parts = (theirs["dataset_name"], theirs["dataset_config"], theirs["dataset_train_split"] or "train")
        return {key: [":".join(part for part in parts if part)]}
    return _listed(theirs, key, known)


def _test(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if theirs.family == "trl" and theirs["dataset_test_split"]:
        parts = (theirs["dataset_name"], theirs["dataset_config"], theirs["dataset_test_split"])
        return {key: [":".join(part for part in parts if part)]}
    return _listed(theirs, key, known)


def _reward(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if theirs.family == "verl":
        path, name = (theirs[f"custom_reward_function.{part}"] for part in ("path", "name"))
        if path is None:
            return theirs.leave("custom_reward_function.path is not set", "custom_reward_function.name")
        file = Path(path)
        if file.is_absolute() or ".." in file.parts or path.startswith("~"):
            theirs.remarks["custom_reward_function.path"] = f"start where {file.name} is"
            file = Path(file.name)
        return {key: f"{'.'.join(file.with_suffix('').parts)}:{name or 'compute_score'}"}
    given = theirs["reward_funcs"] or []
    functions = [_function(name) for name in ([given] if isinstance(given, str) else given)]
    if len(functions) == 1:
        return {key: functions[0]}
    try:
        check_values({key: functions})
    except Left:
        raise Left(f"{key} takes one function here: add {len(functions)} up in one, with their weights") from None
    weights = theirs["reward_weights"]
    return ({key: functions} if functions else {}) | ({"task.reward_weights": weights} if weights else {})


def _function(name: str) -> str:
    """module:function, for the names by which TRL's command knows functions."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _overlong(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    length = theirs["overlong_buffer.len"] or theirs["overlong_buffer_len"]
    if theirs["overlong_buffer.enable"] is False or not length:
        return theirs.leave("overlong_buffer is off", *theirs.named(known))
    penalty = theirs["overlong_buffer.penalty_factor"]
    return {key: length} | ({} if penalty is None else {"task.overlong_penalty": penalty})


def _prompts(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    return {key: theirs.prompts}


def _batch_groups(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    return {key: theirs.batch_groups}


def _micro_tokens(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    theirs.leave(known[0].remark.rstrip("."), *theirs.named(known))
    tokens = theirs["ppo_max_token_len_per_gpu"]
    theirs.left.pop("ppo_max_token_len_per_gpu", None)
    return {} if tokens is None else {key: tokens}


def _counted(theirs: Theirs) -> int:
    """How many of the steps that they count one of ours has: TRL counts updates, verl counts rollouts."""
    return theirs.updates_per_step if theirs.family == "trl" else 1


def _steps(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    trl = theirs.family == "trl"
    most, epochs = ("max_steps", "num_train_epochs") if trl else ("total_training_steps", "total_epochs")
    steps = theirs[most]
    if steps is None or steps <= 0:
        raise Left(f"yours to decide: steps = {theirs[epochs]:g} x the number of problems / {theirs.prompts}")
    theirs.leave(f"{most} goes first", epochs)
    return {key: math.ceil(steps / _counted(theirs))}


def _every(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    steps, *how = sorted(names_of(known[0], theirs.family), key=lambda name: "strategy" in name)
    strategy, count = theirs[how[0]] if how else None, theirs[steps]
    if strategy == "steps" and count is None:  # transformers' own defaults
        count = 500 if key == "checkpoint_every" else theirs["logging_steps"] or 10
    never = strategy == "no" or (count is not None and count < 0)
    if never and key == "eval.every":
        return {key: 0}
    if never or strategy not in (None, "steps") or (count is not None and count < 1):
        raise Left(f"{key} counts steps, 1 or more")
    return {} if count is None else {key: math.ceil(count / _counted(theirs))}


def _eval_temperature(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    return {key: 0 if theirs["val_kwargs.do_sample"] is False else theirs["val_kwargs.temperature"]}


def _warmup(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if theirs.family == "trl":
        steps, share, all_steps, updates = theirs["warmup_steps"], theirs["warmup_ratio"], theirs["max_steps"], 1
        if steps and steps < 1:
            steps, share = 0, steps
    else:
        steps, share = theirs["lr_warmup_steps"], theirs["lr_warmup_steps_ratio"]
        all_steps, updates = theirs["total_training_steps"], theirs.updates_per_step
    if (steps and steps > 0) or not share:
        return {key: max(0, math.ceil((steps or 0) * updates))}
    if all_steps is None or all_steps <= 0:
        raise Left(f"yours to decide: {key} = {share:g} x all updates")
    return {key: math.ceil(share * all_steps * updates)}


def _betas(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    return {key: theirs["betas"] if theirs.family == "verl" else [theirs["adam_beta1"], theirs["adam_beta2"]]}


def _objective(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    """The clip. TRL's loss_type and verl's loss_mode may choose another objective."""
    trl = theirs.family == "trl"
    kind = theirs["loss_type" if trl else "loss_mode"]
    if trl and kind in OTHER_LOSSES:
        return {key: kind, "objective.options": {ours: theirs[name] for ours, name in OTHER_LOSSES[kind].items()}}
    low, high, cap = (theirs[name] for name in (CLIP_OF_TRL if trl else CLIP_OF_VERL))
    high = low if high is None else high
    if trl and kind == "cispo":
        return {key: kind, "objective.options": {"low": 0.0, "high": high}}
    bounds = {"low": round(1 - low, 10), "high": round(1 + high, 10)}
    if theirs["importance_sampling_level"] == "sequence" or kind == "gspo":
        return {key: "gspo", "objective.options": bounds}
    if not trl and kind != "vanilla":
        if kind not in OBJECTIVE_OPTIONS:
            raise Left(f"there is no objective {kind!r} here; the recipe has the default, the brake")
        return {key: kind}
    theirs.leave("verl goes by clip_ratio_low and clip_ratio_high", "clip_ratio")
    if cap is not None:
        return {key: "dual_clip", "objective.options": bounds | {"cap": cap}}
    return {key: "grpo" if low == high else "clip_higher", "objective.options": bounds}


def _advantages(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if theirs.family == "verl" and theirs["adv_estimator"] == "grpo" and not theirs["norm_adv_by_std_in_grpo"]:
        return {key: "dr_grpo"}
    if theirs.family == "trl":
        apart = theirs["multi_objective_aggregation"] == "normalize_then_sum"
        scaled = [row for row in known if "scale_rewards" in names_of(row, "trl")]
        return {key: "gdpo"} if apart else same(theirs, key, scaled)
    if (name := theirs["adv_estimator"]) not in get_args(AdvantageName):
        raise Left(f"there is no {name!r} here: advantages compare the responses to one prompt")
    return {key: name}


def _kl(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if theirs.family == "trl":
        return {key: theirs["beta"]}
    if not theirs["use_kl_loss"]:
        return theirs.leave("use_kl_loss is off", *theirs.named(known))
    if theirs["kl_loss_type"] not in ("low_var_kl", "k3"):
        raise Left("the penalty is the k3 estimate (low_var_kl) here")
    return {key: theirs["kl_loss_coef"]}


def _kl_reference(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if not theirs["sync_ref_model"] or not theirs["beta"]:
        return theirs.leave("beta is 0" if theirs["sync_ref_model"] else OFF, *theirs.named(known))
    return {key: f"every {theirs['ref_model_sync_steps']}", "learn.kl_mix": theirs["ref_model_mixup_alpha"]}


def _kl_in_reward(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if not theirs["use_kl_in_reward"]:
        return theirs.leave(OFF, *theirs.named(known))
    return {key: theirs["kl_coef"]}


def _entropy(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    if theirs.family == "trl" and theirs["use_adaptive_entropy"]:
        return {key: theirs["entropy_coef_delta"], "learn.entropy_target": theirs["entropy_target"]}
    return {key: theirs["entropy_coef" if theirs.family == "trl" else "entropy_coeff"]}


def _truncated(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    return {key: "mask" if theirs["mask_truncated_completions"] else "keep"}


def _top_k(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    return {key: max(0, theirs["top_k"])}


def _trackers(theirs: Theirs, key: str, known: list[Known]) -> dict[str, Any]:
    found = _listed(theirs, key, known).get(key) or []
    kept = [name for name in found if name in get_args(get_args(leaves(Config)[key])[0])]
    if left := [name for name in found if name not in (*kept, "none", "console")]:
        theirs.remarks[theirs.named(known)[0]] = f"without {', '.join(map(str, left))}"
    return {key: kept} if kept else {}


TOGETHER = {
    "objective.options": "objective.name",
    "model.lora.alpha": "model.lora.rank",
    "model.lora.targets": "model.lora.rank",
    "task.overlong_penalty": "task.overlong_tokens",
    "task.reward_weights": "task.reward",
    "learn.kl_mix": "learn.kl_reference",
    "learn.entropy_target": "learn.entropy",
}
"""Keys that one rule makes together with another key."""
CLIP_OF_TRL, CLIP_OF_VERL = ("epsilon", "epsilon_high", "delta"), ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
OTHER_LOSSES = {
    "sapo": {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"},
    "vespo": {
        "k_positive": "vespo_k_pos",
        "lambda_positive": "vespo_lambda_pos",
        "k_negative": "vespo_k_neg",
        "lambda_negative": "vespo_lambda_neg",
    },
}
"""TRL's loss_type -> the options of our objective of that name, and the settings that they are."""

RULES: dict[str, Callable[[Theirs, str, list[Known]], dict[str, Any]]] = {
    "steps": _steps,
    "checkpoint_every": _every,
    "model.dtype": _dtype,
    "model.lora.rank": _lora,
    "task.train": _train,
    "task.test": _test,
    "task.reward": _reward,
    "task.overlong_tokens": _overlong,
    "rollout.prompts": _prompts,
    "rollout.top_k": _top_k,
    "rollout.cache_tokens": _decided_here,
    "objective.name": _objective,
    "learn.batch_groups": _batch_groups,
    "learn.micro_tokens": _micro_tokens,
    "learn.betas": _betas,
    "learn.warmup_updates": _warmup,
    "learn.advantages": _advantages,
    "learn.kl": _kl,
    "learn.kl_reference": _kl_reference,
    "learn.kl_in_reward": _kl_in_reward,
    "learn.entropy": _entropy,
    "learn.truncated": _truncated,
    "eval.every": _every,
    "eval.temperature": _eval_temperature,
    "cluster.engine": _decided_here,
    "cluster.gpus_per_rollout": _decided_here,
    "cluster.learners": _decided_here,
    "log.to": _trackers,
}
