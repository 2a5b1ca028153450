"""What a finished run says of its model: the README.md beside the weights, and the lines in the terminal.

The card is written from the run's own configuration and figures, so it cannot contradict them. It says what the base
model is, how it was trained, what it scores and how to check the scores. Licence and intended use are the base model's.
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo import __version__
from bapo.config.learning import LearnConfig
from bapo.config.numerals import counted
from bapo.config.run import Config
from bapo.config.sections import ObjectiveConfig, OffPolicyConfig
from bapo.config.sft import SftConfig
from bapo.config.task import EpisodeConfig, TaskConfig
from bapo.rollout.engine import Sampling
from bapo.runs import files, ledger
from bapo.screen.terminal import say
from bapo.screen.view import summary_table
from bapo.tasks.judge import JUDGE

EPISODE_KEYS = EpisodeConfig.model_fields.keys()
"""Keys that are options of `bapo eval` of the same name."""
SELDOM = 0.02
"""With a mean reward below this, most groups have no success at all."""
UNFINISHED_CARD = (
    "This model was trained and exported, but its run was not summarised yet. `bapo resume` writes the card.\n"
)
"""What stands in place of the card until the scores are known."""


def with_changes(
    card: str,
    unit: str,  # what the run counts
    changes: Sequence[str],  # each begins with the step after which it was made
) -> str:
    """The card, with the settings that were changed on the way."""
    if not changes:
        return card
    listed = "\n".join(f"- {change}" for change in dict.fromkeys(changes))
    return f"{card}\n## Changed on the way\n\nSettings that changed when the run was resumed, by {unit}:\n\n{listed}\n"


def model_card(
    config: Config,
    summary: dict[str, Any],  # as in summary.json
    *,
    chat: bool,  # whether prompts were put into the chat template
) -> str:
    """The card of a model that was trained by reinforcement learning."""
    rollout = config.rollout
    facts = {
        "base model": f"`{config.model.path}`, {_trained(config)}",
        "objective": objective_in_words(config.objective),
        "off-policy data": f"{', '.join(sources_in_words(config.offpolicy))}; {_oldest(config, summary)}",
        "updates": f"{summary['updates']}, steps: {config.steps}; {learning_in_words(config.learn)}",
        "rollout": f"{counted(rollout.prompts, 'prompt')} × {counted(rollout.responses, 'response')} per step, "
        f"{Sampling(**rollout.sampling).words}, at most {rollout.max_tokens} tokens",
        "data": _data(config.task),
        "prompts": _prompts(config, chat=chat),
        "seed": str(config.seed),
        "made with": f"bapo {__version__} (arXiv:2510.18927), {config.device}, {config.model.dtype}",
    }
    again = eval_command(config, "MODEL", chat=chat)
    return _card(
        config,
        "[reinforcement-learning, bapo]",
        f"trained with {config.objective.name}",
        "The base model after reinforcement learning on problems whose answers a program checks"
        + ("" if summary["updates"] else ". No update was taken, so the weights did not change")
        + (f". Warning: {summary['warning']}" if "warning" in summary else "")
        + ". Licence and terms are the base model's.",
        facts,
        "## Scores",
        f"{config.eval.problems} held-out problems, at most {config.rollout.max_tokens} tokens per response, 95% "
        "intervals over problems.",
        "\n".join(_scores(config, summary)),
        *(["To measure the scores again, with this directory as MODEL:", f"    {again}"] if again else []),
    )


def sft_card(config: SftConfig, summary: dict[str, Any], data: str) -> str:
    """The card of a supervised run. `data` says in words what happened to its demonstrations."""
    learn, before, after = config.learn, summary["before"], summary["after"]
    facts = {
        "base model": f"`{config.model.path}`, {_trained(config)}",
        "demonstrations": f"{', '.join(config.task.train)}: {data}",
        "updates": f"{summary['updates']} ({counted(config.epochs, 'epoch')} of batches of {learn.batch_sequences}), "
        f"AdamW, learning rate {learn.lr:g} ({learn.schedule})",
        "seed": str(config.seed),
        "made with": f"bapo {__version__}, {config.device}, {config.model.dtype}",
    }
    if before is not None:
        facts["held-out loss"] = f"{before['held_out/loss']:.4f} → {after['held_out/loss']:.4f} nats per token"
    return _card(
        config,
        "[sft, bapo]",
        "supervised",
        "The base model after supervised training on demonstrations: a warm start for reinforcement learning. The "
        "licences and terms of the base model and of the data apply.",
        facts,
    )


def _card(
    config: Config | SftConfig,
    tags: str,
    how: str,  # the model was trained, for the title
    what: str,  # it is, in a sentence or two
    facts: dict[str, str],
    *sections: str,
) -> str:
    """A card with front matter for model hubs, a table of facts, and further sections."""
    front = ["---", f"base_model: {json.dumps(config.model.path)}", "library_name: transformers"]
    front += ["pipeline_tag: text-generation", f"tags: {tags}", "---"]
    table = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items())]
    shared = ["To share it, with this directory as MODEL:", f"    {upload(config, Path('MODEL'))}"]
    parts = ["\n".join(front), f"# {config.model.path}, {how}", what, "\n".join(table), *sections, *shared]
    return "\n\n".join(parts) + "\n"


def upload(config: Config | SftConfig, path: Path) -> str:
    """The command that puts a model on the hub, in the account of whoever gives it."""
    base = Path(config.model.path)
    name = base.parent.name if base.name == "model" and base.parent.name else base.name.removesuffix(".gguf")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
    return f"hf upload {name}-{'sft' if isinstance(config, SftConfig) else 'bapo'} {shlex.quote(str(path))}"


def _trained(config: Config | SftConfig) -> str:
    lora = config.model.lora
    if not lora.rank:
        return "all weights trained"
    where = ", ".join(lora.targets) or "every linear layer but the head"
    alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
    return f"low-rank additions trained and merged: rank {lora.rank}, alpha {alpha:g}, on {where}"


def objective_in_words(objective: ObjectiveConfig) -> str:
    """Which rule decides what a token may change."""
    if objective.name != "bapo":
        told = ", ".join([objective.name, *(f"{name} {value:g}" for name, value in objective.all_options.items())])
    else:
        clip = objective.clip
        low, high = (" to ".join(f"{bound:g}" for bound in dict.fromkeys(pair)) for pair in (clip.low, clip.high))
        told = f"bapo, lower bound {low}, upper bound {high}"
        if clip.searches:
            told += f", chosen anew in every update for a share of {clip.target_share:g} ({clip.measure})"
        told += "" if clip.brake is None else f"; brake {clip.brake:g}"
        told += f"; preset {objective.preset}" if objective.preset else ""
    if objective.has_brake:
        where = "the last update that had any" if objective.sensor == "previous" else "the same update"
        told += f"; the lower bound of used tokens rises to 1 as far as negative ones have fallen in {where}"
    if objective.bound_of_used is not None:
        told += f"; lower bound {objective.bound_of_used:g} for tokens that were trained on before (push once)"
    return told


def sources_in_words(off: OffPolicyConfig) -> list[str]:
    """Where an update gets its groups from, and how often."""
    sources = [f"each rollout batch used {off.reuse} times" if off.reuse > 1 else "each rollout batch used once"]
    if off.replay_fraction:
        oldest = counted(off.replay_max_age, "update")
        sources.append(f"{off.replay_fraction:.0%} of a batch replayed, up to {oldest} old")
    if off.partial_budget is not None:
        sources.append(f"partial rollout of {off.partial_budget:,} tokens per step")
    return sources


def learning_in_words(learn: LearnConfig) -> str:
    """How rewards become one number to learn from, and what else shapes an update if it is asked for."""
    warmup = f", warm-up {counted(learn.warmup_updates, 'update')}" if learn.warmup_updates else ""
    stays = learn.kl_every is None
    of = "the initial weights" if stays else f"a reference that follows {learn.kl_reference} updates"
    target = "" if learn.entropy_target is None else f" towards {learn.entropy_target:g} nats"
    bonus = f", entropy bonus {learn.entropy:g}{target}" if learn.entropy else ""
    penalty = f", KL penalty to {of} {learn.kl:g}" if learn.kl else ""
    penalty += f", KL to {of} in the reward {learn.kl_in_reward:g}" if learn.kl_in_reward else ""
    what = "used tokens of " if learn.opsm_on == "used" else ""
    fell = f"negative responses that fell by more than {learn.opsm} nats per token"
    masked = "" if learn.opsm is None else f", {what}{fell} are masked"
    how = {"mask": "have no loss", "drop": "leave their groups"}.get(learn.truncated)
    cut = f", truncated responses {how}" if how else ""
    return (
        f"AdamW, learning rate {learn.lr:g} ({learn.schedule}{warmup}), {counted(learn.batch_groups, 'group')} per "
        f"update, {learn.reduction} loss, {learn.advantages} advantages{bonus}{penalty}{masked}{cut}"
    )


def _data(task: TaskConfig) -> str:
    if task.name == "environment":
        return f"{task.environment_train} episodes of {task.environment}; held out: {task.environment_test}"
    if task.name == "data":
        held_out = ", ".join(task.test) or f"{task.holdout:.4g} of these problems"
        return f"{', '.join(task.train)}; held out: {held_out}; reward: {', '.join(task.rewards)}"
    if task.name == "gym":
        sets = ", ".join(f"{name} {options}" if options else name for name, options in task.gym.items())
        return f"{task.gym_train} generated problems of reasoning-gym: {sets}; held out: {task.gym_test}"
    return f"{task.name}, as embedded in bapo"


def _prompts(config: Config, *, chat: bool) -> str:
    model = config.model
    parts = ["in the chat template" if chat else "as plain text"]
    if config.task.name == "data" and config.task.template is not None:
        parts.append(f"around each problem: {json.dumps(config.task.template, ensure_ascii=False)}")
    if model.system:
        parts.append(f"system message: {json.dumps(model.system, ensure_ascii=False)}")
    parts += [f"{name} = {value!r}" for name, value in model.template_options.items()]
    return "; ".join(parts)


def _scores(config: Config, summary: dict[str, Any]) -> list[str]:
    first = {"temperature": config.eval.temperature, "before": summary["before"], "after": summary["after"]}
    rows = ["| temperature | score | before | after |", "|---|---|---|---|"]
    for index, entry in enumerate((first, *summary["also_at"])):
        k = 1 if index and entry["temperature"] == 0 else config.eval.k  # see _evaluate of run.py
        for name, key in ((f"avg@{k}", "eval/avg"), (f"pass@{k}", "eval/pass"))[: 1 if k == 1 else 2]:
            values = (_interval(entry[when], key) for when in ("before", "after"))
            rows.append(f"| {entry['temperature']:g} | {name} | {' | '.join(values)} |")
    return rows


def _interval(line: dict[str, Any], key: str) -> str:
    return f"{line[key]:.3f}  [{line[f'{key}_low']:.3f}, {line[f'{key}_high']:.3f}]"


def _oldest(config: Config, summary: dict[str, Any]) -> str:
    oldest = counted(round(summary["staleness_max"]), "update")
    return f"no token older than {oldest} (bound {config.offpolicy.max_staleness})"


def eval_command(config: Config, path: str, *, chat: bool) -> str | None:
    """The command that evaluates a model as the run does. It knows neither reasoning-gym nor judges."""
    task, model = config.task, config.model
    if task.name == "gym" or JUDGE in task.rewards:
        return None
    greedy, sources = config.eval.temperature == 0, task.test or task.train
    data = {"data": ",".join(sources), "environment": None}.get(task.name, task.name)
    options: list[tuple[str, Any]] = [
        ("--data", data),
        ("--holdout", f"{task.holdout:.15g}" if task.holdout else None),
        ("--k", 1 if greedy else config.eval.k),
        ("--temperature", f"{config.eval.temperature:g}"),
        ("--max-tokens", config.rollout.max_tokens),
        ("--seed", config.seed),
        ("--problems", config.eval.problems if len(sources) < 2 else None),
        ("--reward", ",".join(task.rewards) if "reward" in task.changed() else None),
        ("--reward-weights", task.reward_weights or None),
        ("--template", task.template),
        ("--prompt-column", task.prompt_column),
        ("--answer-column", task.answer_column),
        ("--chat", "yes" if chat else "no"),
        ("--system", model.system or None),
        *(("--chat-option", f"{name}={json.dumps(value)}") for name, value in model.template_options.items()),
        *((f"--{key.replace('_', '-')}", getattr(task, key)) for key in sorted(EPISODE_KEYS & {*task.changed()})),
    ]
    given = " ".join(f"{name} {_words(value)}" for name, value in options if value is not None)
    return f"bapo eval --model {path} {given}"


def _words(value: Any) -> str:
    """A value as the words of a command."""
    listed = [word for pair in value.items() for word in pair] if isinstance(value, dict) else value
    return shlex.join(map(str, listed if isinstance(listed, list | tuple) else [listed]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# In the terminal.


def show_ending(config: Config, summary: dict[str, Any], path: Path, *, drift: str) -> None:
    """Print what training changed, and what went wrong.

    `drift`: since when sampler and learner have not meant the same policy, in words; empty if they do.
    """
    if "warning" in summary:
        say(f"warning: {summary['warning']}.")
    title = f"{counted(config.eval.problems or 0, 'held-out problem')}, temperature {config.eval.temperature:g}"
    summary_table(title, _rows(summary, config.eval.k))
    if not summary["updates"] and not summary["skipped"]:
        say(_why_no_update(config, summary["after"]))
    failures = path / "failures.jsonl"
    if failures.exists() and (lines := files.read(failures).splitlines()):
        told = counted(len(lines), "response was", "responses were")
        say(f"{told} left out, because the verifier failed: {failures}")
    updates, seconds = counted(summary["updates"], "update"), summary["training_seconds"]
    say(f"{updates} in {seconds:.0f} s of training; {_oldest(config, summary)}")
    if "restarts" in summary:
        times = ", ".join(f"{who} ({count})" for who, count in summary["restarts"].items())
        say(f"restarts: {times}; history.jsonl says when and why" if times else "restarts: none")
    if drift:
        say(f"sampler and learner differ since {drift}")
    bound, groups = config.offpolicy.max_staleness, ledger.read(path)
    found = ledger.balance(groups, max_staleness=bound, ended=True, all_used=config.cluster.on)
    say(f"ledger: {found.line()}" + (f" (`bapo ledger {path}` lists them)" if found.wrong else ""))


def _why_no_update(config: Config, after: dict[str, Any]) -> str:
    """Say why a run learned nothing and what to change."""
    told = "No update was taken: no group finished with different rewards."
    if config.offpolicy.partial_budget is not None:
        return f"{told} Raise offpolicy.partial_budget or steps."
    if after["eval/avg"] < SELDOM:
        return f"{told} The model hardly ever earns a reward. Warm-start it (docs/sft.md), or give it easier problems."
    return f"{told} Use problems that the model sometimes solves, larger groups, or more steps."


def _rows(summary: dict[str, Any], k: int) -> list[tuple[str, str, str]]:
    """What training changed, as rows of the table: name, before, after."""
    before, after = summary["before"], summary["after"]
    rows = [
        (f"avg@{k}", _interval(before, "eval/avg"), _interval(after, "eval/avg")),
        (f"pass@{k}", _interval(before, "eval/pass"), _interval(after, "eval/pass")),
        ("response length", f"{before['eval/length']:.1f}", f"{after['eval/length']:.1f}"),
    ]
    if "eval/entropy" in before and "eval/entropy" in after:  # otherwise the engine does not give entropies
        rows.insert(2, ("entropy, nats per token", f"{before['eval/entropy']:.3f}", f"{after['eval/entropy']:.3f}"))
    for other in summary["also_at"]:
        samples = 1 if other["temperature"] == 0 else k
        name = f"avg@{samples} at temperature {other['temperature']:g}"
        rows.append((name, _interval(other["before"], "eval/avg"), _interval(other["after"], "eval/avg")))
    return rows
