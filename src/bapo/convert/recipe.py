"""From the settings of TRL or verl to the keys of a recipe, by the table of names (`config/known_names.toml`).

A setting that the table gives a key becomes that key, under the name that the table has for its value. `RULES` makes
the keys that need more: several settings together, or other units. What TRL and verl do if nothing is set is in the
table, too: the recipe says it wherever we would do something else. Nothing is dropped in silence: every setting says
which keys it became, or why it became none.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from bapo.config.known_names import NAMES, UNSET, Family, find, names_of
from bapo.config.recipe import check
from bapo.config.run import Config
from bapo.config.words import flat, leaves
from bapo.core.settings import OBJECTIVE_OPTIONS, AdvantageName
from bapo.types import batches_per_pass

HELD_OUT = 0.1
"""The share of the problems that is held out where nobody named others to evaluate on."""
OFF = "off, as here"
YOURS = ("rollout.cache_tokens", "cluster.engine", "cluster.gpus_per_rollout", "cluster.learners")
"""Keys that are for a machine, as memory and processes are."""
TOGETHER = {
    **{"objective.options": "objective.name", "task.overlong_penalty": "task.overlong_tokens"},
    **{"model.lora.alpha": "model.lora.rank", "model.lora.targets": "model.lora.rank"},
    **{"task.reward_weights": "task.reward", "learn.kl_mix": "learn.kl_reference"},
    "learn.entropy_target": "learn.entropy",
}
"""Keys that one rule makes together with another key."""


@dataclass(frozen=True)
class Unknown:
    """A value that only a run would tell."""

    text: str
    """What is written there."""
    why: str = "computed at run time"


@dataclass(frozen=True)
class Setting:
    """A setting of TRL or verl, and what it became. Those that nobody gave have no value."""

    name: str
    value: Any = None
    where: str = ""
    """The file and the line."""
    note: str = ""
    """What a person should know: how its value was found, what differs, or why there is no key."""
    keys: dict[str, Any] = field(default_factory=dict)


class Left(Exception):  # noqa: N818
    """A setting becomes no key, for this reason."""


class Theirs:
    """The settings that were given, by their names in the table, and the defaults of the others."""

    def __init__(self, family: Family, settings: list[Setting], processes: int | None) -> None:
        self.family, self.trl = family, family == "trl"
        self.given: dict[str, Setting] = {}
        self.notes: dict[str, str] = {}
        for setting in settings:
            _, name = find(setting.name, [family]) or (None, "*")
            if not name.endswith("*") and self.given.get(name, setting).name == setting.name:
                self.given[name] = setting  # where a setting is given twice, the last one counts
        self.processes: int = processes or next((s.value for s in settings if s.name == "num_processes"), 1)

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, as the table calls it, or what is done if nobody gave one; None if nothing is."""
        value = self.given[name].value if name in self.given else UNSET[self.family].get(name)
        if isinstance(value, Unknown):
            raise Left(f"{name} is {value.why}")
        found = find(name, [self.family])
        return found[0].values.get(str(value).lower(), value) if found else value

    def first(self, *names: str) -> Any:
        """The value of the first of these that has one, among those that are known before the others."""
        known = [name for name in names if name in self.given and not isinstance(self.given[name].value, Unknown)]
        return next((value for name in (*known, *names) if (value := self[name]) is not None), None)

    def groups(self, name: str) -> int:
        """Groups of responses: of one update, or (generation_batch_size) that are sampled at a time."""
        sampled = name == "generation_batch_size"
        if not self.trl:
            return int((self["gen_batch_size"] or self["train_batch_size"]) if sampled else self["ppo_mini_batch_size"])
        batches = (sampled and self["steps_per_generation"]) or self["gradient_accumulation_steps"]
        asked = self["per_device_train_batch_size"] * self.processes * batches
        asked = int((sampled and self["generation_batch_size"]) or asked)
        if asked % self["num_generations"]:
            self.notes[name] = (
                f"{asked} responses on {self.processes} processes (--processes) are no whole groups of "
                f"{self['num_generations']}: rounded up"
            )
        return math.ceil(asked / int(self["num_generations"]))

    def per_step(self) -> int:
        """Updates on what was sampled at a time."""
        sampled, batch = self.groups("generation_batch_size"), self.groups("per_device_train_batch_size")
        return int(self["num_iterations" if self.trl else "ppo_epochs"]) * batches_per_pass(sampled, batch)


def convert(family: Family, settings: list[Setting], *, processes: int | None = None) -> list[Setting]:
    """The settings with what they became, and what the recipe needs besides."""
    theirs, ours = Theirs(family, settings, processes), dict(flat(Config().model_dump()))
    became: dict[str, dict[str, Any] | str] = {}
    unasked: list[Setting] = []
    rows: dict[str, list[str]] = {}
    for row in NAMES:
        rows.setdefault(TOGETHER.get(row.key, row.key), []).extend(names_of(row, family))
    for key, names in rows.items():
        is_given = any(name in theirs.given for name in names)
        if not key or not (is_given or key in RULES or any(name in UNSET[family] for name in names)):
            continue
        try:
            if key in YOURS:
                raise Left(f"yours to decide: {key}")
            value = RULES[key](theirs) if key in RULES else theirs.first(*names)
            made = {
                one: v
                for one, v in (value if key in RULES and isinstance(value, dict) else {key: value}).items()
                if v is not None
            }
            for one, inner in made.items():
                if any(f"{one} = " in line for line in check(Config, tomllib.loads(f"{one} = {toml(inner)}"))[1]):
                    raise Left(f"{one} takes no {inner!r}")
            became |= dict.fromkeys(names, made)
            unasked += [] if is_given else [Setting("", keys={one: v for one, v in made.items() if v != ours.get(one)})]
        except (Left, TypeError, ValueError, ArithmeticError) as error:
            told = str(error) if isinstance(error, Left) else f"a value of it cannot be read ({error})"
            became |= dict.fromkeys(names, told)
            unasked += [] if is_given or key in YOURS else [Setting(key, note=told)]
    found = [*(_told(theirs, setting, became) for setting in settings), *unasked]
    return [*found, *_completed(theirs, keys_of(found))]


def _told(theirs: Theirs, setting: Setting, became: dict[str, dict[str, Any] | str]) -> Setting:
    """A setting with the keys that it became, or why it became none."""
    known, name = find(setting.name, [theirs.family]) or (None, "")
    taken, made = theirs.given.get(name, setting), became.get(name, "")
    if known is None:
        note = setting.value.why if isinstance(setting.value, Unknown) else "bapo has no such setting"
    elif not known.key:
        unset = name in UNSET[theirs.family] and setting.value == UNSET[theirs.family][name]
        note = OFF if unset else known.remark.rstrip(".")
    elif taken is not setting:
        note = "the last one counts" if taken.name == setting.name else f"{taken.name} was taken. {known.remark}"
    elif isinstance(setting.value, Unknown):
        note = setting.value.why
    elif isinstance(made, str):
        note = made or known.remark
    else:
        return replace(setting, keys=made, note=theirs.notes.get(name, setting.note if made else OFF))
    return replace(setting, note=note.strip())


def keys_of(settings: list[Setting]) -> dict[str, Any]:
    """The keys of the recipe, with dots between tables."""
    return {key: value for setting in settings for key, value in setting.keys.items()}


def _completed(theirs: Theirs, keys: dict[str, Any]) -> Iterator[Setting]:
    """What a recipe needs besides, so that its keys can work together, and why."""
    if not keys.get("task.train"):
        yield Setting("", note="no data set is known", keys={"task.name": "data"})
    if not keys.get("task.test") and not keys.get("task.holdout"):
        yield Setting(
            "", note="every run is evaluated, and no other problems are named", keys={"task.holdout": HELD_OUT}
        )
    if theirs.trl:
        yield Setting("", note="TRL leaves text prompts as they are", keys={"model.chat": "no"})
    if not keys.get("task.reward"):
        note = "no reward function is known" if theirs.trl else "verl chooses a verifier by data_source"
        yield Setting("", note=note, keys={"task.reward": "math"})
    prompts, groups, reuse = (keys.get(key) for key in ("rollout.prompts", "learn.batch_groups", "offpolicy.reuse"))
    if prompts and groups:
        off, oldest = Config().offpolicy, (reuse or 1) * batches_per_pass(prompts, groups) - 1
        if oldest > off.max_staleness:
            yield Setting("", note="the updates of one step", keys={"offpolicy.max_staleness": oldest})
        if 2 * prompts > off.replay_capacity:
            yield Setting("", note="twice rollout.prompts", keys={"offpolicy.replay_capacity": 2 * prompts})


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        names = (key if str(key).isidentifier() else json.dumps(str(key)) for key in value)
        return (
            f"{{ {', '.join(f'{name} = {toml(inner)}' for name, inner in zip(names, value.values(), strict=True))} }}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    text = repr(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _lora(t: Theirs) -> Any:
    of_peft = t["peft_config"] is not None or "r" in t.given
    if not (t["lora_rank"] or of_peft or t["use_peft"]):
        return None
    rank, alpha = (8, 8) if of_peft else (16, 32)  # what peft does if nothing is set, and what TRL's ModelConfig does
    targets = t.first("target_modules", "lora_target_modules")
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        told = "all linear layers get adapters here; model.lora.targets names others"
        t.notes |= {"peft_config": told, "target_modules": told}
    return {
        "model.lora.rank": t["lora_rank"] or t["r"] or t["lora_r"] or rank,
        "model.lora.alpha": t["lora_alpha"] or alpha,
        "model.lora.targets": targets if isinstance(targets, list) and targets != ["all-linear"] else None,
    }


def _data(t: Theirs, split: str, *names: str) -> Any:
    """A data set by its name, configuration and split, or what a script loads."""
    if t["dataset_name"] and (chosen := t[split] or (split == "dataset_train_split" and "train")):
        return [":".join(part for part in (t["dataset_name"], t["dataset_config"], chosen) if part)]
    return _listed(t.first(*names))


def _reward(t: Theirs) -> Any:
    if path := t["custom_reward_function.path"]:
        file = Path(path)
        if file.is_absolute() or ".." in file.parts or path.startswith("~"):
            t.notes["custom_reward_function.path"] = f"start where {file.name} is"
            file = Path(file.name)
        return f"{'.'.join(file.with_suffix('').parts)}:{t['custom_reward_function.name'] or 'compute_score'}"
    functions = []
    for name in _listed(t["reward_funcs"] or []):  # TRL's command knows those of trl.rewards by their names
        module, _, function = name.rpartition(".")
        functions.append(name if ":" in name else f"{module or 'trl.rewards'}:{function}")
    if len(functions) < 2:
        return functions[0] if functions else None
    return {"task.reward": functions, "task.reward_weights": t["reward_weights"]}


def _overlong(t: Theirs) -> Any:
    length = t["overlong_buffer.enable"] is not False and t.first("overlong_buffer.len", "overlong_buffer_len")
    penalty = t["overlong_buffer.penalty_factor"]
    return {"task.overlong_tokens": length, "task.overlong_penalty": penalty} if length else None


def _steps(t: Theirs) -> Any:
    most, epochs = ("max_steps", "num_train_epochs") if t.trl else ("total_training_steps", "total_epochs")
    steps = t[most] or 0
    if steps <= 0:
        prompts = t.groups("generation_batch_size")
        raise Left(f"yours to decide: {t[epochs]:g} x the number of problems / {prompts}")
    t.notes[epochs] = f"{most} goes first"
    return math.ceil(steps / (t.per_step() if t.trl else 1))


def _every(t: Theirs, kind: str, freq: str, default: int) -> int | None:
    """TRL counts updates, verl counts rollouts. `default`: that of transformers, if only a strategy is given."""
    strategy, count = t[f"{kind}_strategy"], t.first(f"{kind}_steps", freq)
    count = default if strategy == "steps" and count is None else count
    never = strategy == "no" or (count is not None and count < 0)
    if never and kind == "eval":
        return 0
    if never or strategy not in (None, "steps") or count == 0:
        raise Left("it counts steps here, 1 or more")
    return None if count is None else math.ceil(count / (t.per_step() if t.trl else 1))


def _warmup(t: Theirs) -> Any:
    steps, share = t.first("warmup_steps", "lr_warmup_steps") or 0, t.first("warmup_ratio", "lr_warmup_steps_ratio")
    if 0 < steps < 1:
        steps, share = 0, steps
    updates = 1 if t.trl else t.per_step()
    if steps <= 0 and share:
        steps = share * (t.first("max_steps", "total_training_steps") or 0)
        if steps <= 0:
            raise Left(f"yours to decide: {share:g} x all updates")
    return math.ceil(max(0, steps) * updates)


def _objective(t: Theirs) -> Any:
    """The clip. TRL's loss_type and verl's loss_mode may choose another objective."""
    kind = t.given["loss_type"].value if "loss_type" in t.given else t["loss_mode"]
    if t.trl and kind in ("sapo", "vespo"):
        names = {
            one: re.sub("(pos|neg)\\w+", r"\1", one.replace("tau", "temperature")) for one in OBJECTIVE_OPTIONS[kind]
        }
        return {
            "objective.name": kind,
            "objective.options": {ours: t[f"{kind}_{name}"] for ours, name in names.items()},
        }
    low, high = t.first("epsilon", "clip_ratio_low"), t.first("epsilon_high", "clip_ratio_high")
    high, cap = low if high is None else high, t.first("delta", "clip_ratio_c")
    bounds = {"low": round(1 - low, 10), "high": round(1 + high, 10)}
    t.notes["clip_ratio"] = "verl goes by clip_ratio_low and clip_ratio_high"
    if t.trl and kind == "cispo":
        return {"objective.name": kind, "objective.options": {"low": 0.0, "high": high}}
    if t["importance_sampling_level"] == "sequence" or kind == "gspo":
        return {"objective.name": "gspo", "objective.options": bounds}
    if not t.trl and kind != "vanilla":
        if kind not in OBJECTIVE_OPTIONS:
            raise Left(f"there is no objective {kind!r} here; the recipe has the default, the brake")
        return kind
    if cap is not None:
        return {"objective.name": "dual_clip", "objective.options": bounds | {"cap": cap}}
    return {"objective.name": "grpo" if low == high else "clip_higher", "objective.options": bounds}


def _advantages(t: Theirs) -> Any:
    name = (
        "gdpo"
        if t["multi_objective_aggregation"] == "normalize_then_sum"
        else t.first("scale_rewards", "adv_estimator")
    )
    if name not in get_args(AdvantageName):
        raise Left(f"there is no {name!r} here: advantages compare the responses to one prompt")
    return "dr_grpo" if name == "grpo" and t["norm_adv_by_std_in_grpo"] is False else name


def _kl(t: Theirs) -> Any:
    if t["use_kl_loss"] and t["kl_loss_type"] not in ("low_var_kl", "k3"):
        raise Left("the penalty is the k3 estimate (low_var_kl) here")
    return t["kl_loss_coef"] if t["use_kl_loss"] else t["beta"]


def _kl_reference(t: Theirs) -> Any:
    moves = t["sync_ref_model"] and t["beta"]
    every, mix = f"every {t['ref_model_sync_steps']}", t["ref_model_mixup_alpha"]
    return {"learn.kl_reference": every, "learn.kl_mix": mix} if moves else None


def _entropy(t: Theirs) -> Any:
    if t["use_adaptive_entropy"]:
        return {"learn.entropy": t["entropy_coef_delta"], "learn.entropy_target": t["entropy_target"]}
    return t.first("entropy_coef", "entropy_coeff")


def _trackers(t: Theirs) -> Any:
    found = _listed(t.first("report_to", "logger")) or []
    kept = [one for one in found if one in get_args(get_args(leaves(Config)["log.to"])[0])]
    if left := [str(one) for one in found if one not in (*kept, "none", "console")]:
        t.notes |= dict.fromkeys(("report_to", "logger"), f"without {', '.join(left)}")
    return kept or None


RULES: dict[str, Callable[[Theirs], Any]] = {
    "steps": _steps,
    "checkpoint_every": lambda t: _every(t, "save", "save_freq", 500),
    "model.lora.rank": _lora,
    "task.train": lambda t: _data(t, "dataset_train_split", "train_dataset", "train_files"),
    "task.test": lambda t: _data(t, "dataset_test_split", "eval_dataset", "val_files"),
    "task.reward": _reward,
    "task.overlong_tokens": _overlong,
    "rollout.prompts": lambda t: t.groups("generation_batch_size"),
    "rollout.top_k": lambda t: max(0, t["top_k"]),
    "objective.name": _objective,
    "learn.batch_groups": lambda t: t.groups("per_device_train_batch_size"),
    "learn.betas": lambda t: t["betas"] or [t["adam_beta1"], t["adam_beta2"]],
    "learn.warmup_updates": _warmup,
    "learn.advantages": _advantages,
    "learn.kl": _kl,
    "learn.kl_reference": _kl_reference,
    "learn.kl_in_reward": lambda t: t["kl_coef"] if t["use_kl_in_reward"] else None,
    "learn.entropy": _entropy,
    "eval.every": lambda t: _every(t, "eval", "test_freq", t["logging_steps"] or 10),
    "eval.temperature": lambda t: 0 if t["val_kwargs.do_sample"] is False else t["val_kwargs.temperature"],
    "log.to": _trackers,
}
"""What makes keys that need more than one value under another name: the value of the key, or several keys."""
