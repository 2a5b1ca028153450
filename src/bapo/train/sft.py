"""A supervised run: prompts and responses in, a model that writes such responses out. The warm start of RL.

    every update takes the next batch of the shuffled demonstrations, packs it and raises the log-prob of its responses

Learner, packing, checkpoints, run directory and live view are those of reinforcement learning; there is no sampling, so
nothing is said about what the model writes: `bapo eval` does that. The directory holds:

config.json      the resolved configuration; its kind is sft
data.json        what became of the rows of the data, and how many updates they make
metrics.jsonl    one line per update (kind imitation) and per measurement of the held-out loss (kind held_out)
timing.jsonl     wall-clock figures, one line per update
checkpoints/     see checkpoint.py
model/           the trained model, in transformers format: `bapo train --model.path RUN/model`
adapter/         low-rank additions by themselves, in peft's format, if those were trained
summary.json     held-out loss before and after; written last, so its presence means the run is complete
lock             held by the process at work
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bapo import __version__
from bapo.config.errors import CheckpointError, ConfigError, Interrupted
from bapo.config.sft import SftConfig
from bapo.learn.learner import Learner, LearnerSettings
from bapo.learn.packing import pack_demonstrations
from bapo.learn.sft import fit, imitate
from bapo.models import Policy
from bapo.models.export import save_additions, save_policy
from bapo.runs.metrics import check_declared
from bapo.runs.write import RunDirectory
from bapo.screen.view import View, make_view, summary_table
from bapo.train import checkpoint
from bapo.train.build import make_policy, resolve
from bapo.train.card import sft_card
from bapo.train.demonstrations import Batches, Example, Examples, describe, load, make_examples
from bapo.train.life_cycle import save, stop_on_signal
from bapo.types import TokenBatch


@dataclass
class SftParts:
    """Everything a supervised run is made of."""

    config: SftConfig
    policy: Policy
    examples: Examples
    batches: Batches
    learner: Learner


def start(config: SftConfig, *, plain: bool | None = None) -> dict[str, Any]:
    """Train from the beginning; returns the summary."""
    config = resolve(config)
    parts = _built(config)
    run = RunDirectory.create(config)
    with run.held():
        run.write("data.json", parts.examples.counts | {"updates": parts.batches.total})
        return _go(run, parts, plain=plain)


def resume(path: Path, *, plain: bool | None = None) -> dict[str, Any]:
    """Continue a run from its newest checkpoint; a complete run only returns its summary."""
    run = RunDirectory(path)
    config = run.config(SftConfig)
    if (finished := run.summary()) is not None:
        return finished
    with run.held():
        return _continue(run, config, plain=plain)


def _continue(run: RunDirectory, config: SftConfig, *, plain: bool | None) -> dict[str, Any]:
    source = checkpoint.newest(run.path / "checkpoints")
    parts = _built(resolve(config))
    state = checkpoint.load(source, parts.learner)
    if state["examples"] != parts.examples.fingerprint:
        named = ", ".join((*config.data.sources, *config.data.held_out))
        raise CheckpointError(
            f"{named} or the tokenizer of {config.model.path} changed since {run.path} began, so it cannot be "
            "continued as it was. Restore them, or start a new run."
        )
    run.cut(state["logs"])
    return _go(run, parts, plain=plain)


def _built(config: SftConfig) -> SftParts:
    try:
        return build(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build(config: SftConfig) -> SftParts:
    """The parts of a run, at its beginning. Data first: it fails sooner than a model loads."""
    loaded = load(config.data)
    torch.set_num_threads(config.threads)
    policy = make_policy(config)
    examples = make_examples(loaded, config.data, policy)
    batches = Batches(examples.train, size=config.learn.batch_sequences, epochs=config.epochs, seed=config.seed)
    return SftParts(config, policy, examples, batches, Learner(policy.model, learner_settings(config, batches.total)))


def learner_settings(config: SftConfig, updates: int) -> LearnerSettings:
    """What the learner needs of the configuration."""
    learn = config.learn
    return LearnerSettings(
        lr=learn.lr,
        betas=learn.betas,
        weight_decay=learn.weight_decay,
        clip_norm=learn.clip_norm,
        warmup_updates=round(learn.warmup * updates),
        schedule=learn.schedule,
        total_updates=updates,
        activation_checkpointing=learn.activation_checkpointing,
        compile=learn.compile,
    )


def _go(run: RunDirectory, parts: SftParts, *, plain: bool | None) -> dict[str, Any]:
    """Measure, learn, measure, save; checkpoints and logs on the way."""
    config, learner, total = parts.config, parts.learner, parts.batches.total
    stopping: list[str] = []
    title = f"sft · {config.model.path} · {run.path}"
    with make_view(total, title=title, plain=plain, samples=False) as view:
        view.note(describe(parts.examples.counts))
        if learner.version == 0:
            _save(run, parts)
            _measure(run, parts, view)
        else:
            view.note(f"resumed after update {learner.version}")
        with stop_on_signal(stopping):
            while learner.version < total and not stopping:
                _update(run, parts, view)
                last = learner.version == total
                if config.eval_every and learner.version % config.eval_every == 0 and not last:
                    _measure(run, parts, view)
                if learner.version % config.checkpoint_every == 0 or last or stopping:
                    _save(run, parts)
        if learner.version < total:
            raise Interrupted(
                f"stopped after update {learner.version}, which is saved. Continue with: bapo resume {run.path}"
            )
        _measure(run, parts, view)
        summary = _summarize(run)
        card = sft_card(config, summary, describe(parts.examples.counts), version=__version__)
        save_policy(parts.policy, run.path / "model", card=card)
        if parts.policy.adapters is not None:
            save_additions(parts.policy, run.path / "adapter", card=card, base=config.model.path)
    run.write("summary.json", summary)
    _show(summary, parts, run)
    return summary


def _update(run: RunDirectory, parts: SftParts, view: View) -> None:
    """One optimizer step and its lines."""
    began = time.perf_counter()
    batch = parts.batches.at(parts.learner.version)
    update = imitate(parts.learner, _packed(batch, parts))
    seconds = time.perf_counter() - began
    step = update.version
    line = {"kind": "imitation", "step": step, "version": step, "imitation/epoch": step / parts.batches.per_epoch}
    line |= update.metrics | {"imitation/sequences": len(batch)}
    check_declared(line)
    timing = {"seconds": seconds, "tokens_per_second": update.tokens / seconds}
    run.append("metrics.jsonl", line)
    run.append("timing.jsonl", {"step": step} | timing)
    view.step(step, {key: value for key, value in update.metrics.items() if not isinstance(value, list)}, timing)


def _measure(run: RunDirectory, parts: SftParts, view: View) -> None:
    """The held-out loss of the current weights, if anything is held out."""
    if not parts.examples.held_out:
        return
    found, version = fit(parts.learner, _packed(parts.examples.held_out, parts)), parts.learner.version
    line = {
        **{"kind": "held_out", "step": version, "version": version},
        "held_out/loss": found.loss,
        "held_out/perplexity": math.exp(min(found.loss, MOST_NATS)),
        "held_out/accuracy": found.accuracy,
        "held_out/tokens": found.tokens,
    }
    check_declared(line)
    run.append("metrics.jsonl", line)
    view.note(
        f"update {version}: held-out loss {found.loss:.4f} nats per token, next token right in {found.accuracy:.1%}"
    )


MOST_NATS = 700.0
"""exp of more is no float."""


def _packed(examples: list[Example], parts: SftParts) -> list[TokenBatch]:
    return pack_demonstrations(
        ((example.prompt, example.response) for example in examples),
        micro_tokens=parts.config.learn.micro_tokens,
        device=parts.learner.device,
        padded=parts.learner.padded,
    )


def _save(run: RunDirectory, parts: SftParts) -> None:
    """The learner's version is all the progress there is."""
    state = {"examples": parts.examples.fingerprint}
    save(run, parts.learner.version, parts.learner, state, keep=parts.config.checkpoint_keep)


def _summarize(run: RunDirectory) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    seconds = [json.loads(line)["seconds"] for line in (run.path / "timing.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["kind"] == "held_out"] or [None]
    updates = [line for line in lines if line["kind"] == "imitation"]
    return {
        "before": measured[0],
        "after": measured[-1],
        "updates": len(updates),
        "tokens": sum(line["tokens"] for line in updates),
        "training_seconds": sum(seconds),
    }


def _show(summary: dict[str, Any], parts: SftParts, run: RunDirectory) -> None:
    """One screen: what training changed, and where everything is."""
    before, after = summary["before"], summary["after"]
    if before is not None:
        shown = (
            ("loss, nats per token", "held_out/loss", ".4f"),
            ("perplexity", "held_out/perplexity", ".3f"),
            ("next token right", "held_out/accuracy", ".1%"),
        )
        rows = [(name, f"{before[key]:{how}}", f"{after[key]:{how}}") for name, key, how in shown]
        summary_table(f"{len(parts.examples.held_out):,} held-out demonstrations", rows)
    print(
        f"{summary['updates']:,} updates on {summary['tokens']:,.0f} response tokens in "
        f"{summary['training_seconds']:.0f} s of training\n"
        f"run directory   {run.path}\ntrained model   {run.path / 'model'}\n"
        f"from here on    bapo train RECIPE.toml --model.path {run.path / 'model'} "
        f"--model.chat {parts.config.model.chat}"
    )
