"""A run of supervised training, as `life_cycle.py` drives it: the warm start of reinforcement learning.

Demonstrations go in, a model that writes such responses comes out:

    every update takes the next batch of the shuffled demonstrations, packs it and raises the log-prob of its responses

Learner, packing, checkpoints, run directory and live view are the same as in reinforcement learning. Nothing is
sampled, so these files say nothing about what the model writes: `bapo eval` measures that. The directory holds:

config.json      the resolved configuration; its kind is sft
data.json        what happened to the rows of the data, and how many updates they make
metrics.jsonl    one line per update (kind imitation) and per measurement of the held-out loss (kind held_out)
timing.jsonl     wall-clock figures, one line per update
checkpoints/     see checkpoint.py
model/           the trained model, in transformers format: `bapo train --model.path RUN/model`
adapter/         the low-rank additions alone, in peft's format, if they were trained
summary.json     held-out loss before and after; written last, so its presence means the run is complete
model.sha256     the checksums of the trained model, for `sha256sum --check`
history.jsonl    each start and resume: the run's identity, changed settings, threads and versions
lock             held by the process at work
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bapo.config.errors import CheckpointError
from bapo.config.numerals import counted
from bapo.config.sft import SftConfig
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.supervised import measure_fit, sft_step
from bapo.preflight.examine import Demonstrations, load_sft
from bapo.screen.terminal import say
from bapo.screen.view import summary_table
from bapo.train import life_cycle
from bapo.train.card import sft_card, upload
from bapo.train.job import Job, Log, Summary, When, count_skipped, ends_run, skipped_line, stop_after
from bapo.train.machine import make_policy, on_the_cpu, optimizer_settings, slow_precision
from bapo.train.sft_data import Batches, describe, encode_demonstrations
from bapo.train.torchrun import ALONE, Team, make_learner

MOST_NATS = 700.0
"""The exponential of a larger number does not fit into a float."""


def start(config: SftConfig, *, demonstrations: Demonstrations | None = None, plain: bool | None = None) -> Summary:
    """Train from the beginning. Returns the summary. `demonstrations`: the data, if it was read already."""
    return life_cycle.start(partial(SupervisedTraining, demonstrations=demonstrations), config, plain=plain)


class SupervisedTraining(Job):
    """Updates on demonstrations, and the loss on held-out ones. The learner's version is the only progress to keep."""

    unit, title = "update", "sft"
    shows_samples = False
    learner: Learner

    def __init__(self, config: SftConfig, team: Team = ALONE, demonstrations: Demonstrations | None = None) -> None:
        """Load the data first, so that mistakes in it show before a model is loaded."""
        loaded = load_sft(config.task) if demonstrations is None else demonstrations
        torch.set_num_threads(max(1, config.threads // team.on_this_machine))
        self.config: SftConfig = config
        self.skipped = 0  # updates in a row, up to the last one
        self.policy = make_policy(config if team.size == 1 else on_the_cpu(config))
        self.data = encode_demonstrations(loaded, config.task, self.policy)
        self.batches = Batches(
            self.data.train, size=config.learn.batch_sequences, epochs=config.epochs, seed=config.seed
        )
        self.total = self.batches.total
        self.notes = [describe(self.data.counts), *slow_precision(config)]
        settings = learner_settings(config, self.total)
        self.learner = make_learner(self.policy.model, settings, config, team)

    @property
    def done(self) -> int:
        """How many updates are taken."""
        return self.learner.version

    def files(self) -> dict[str, Any]:
        """Count what happened to the rows of the data, for data.json."""
        return {"data.json": self.data.counts | {"updates": self.total}}

    def advance(self, log: Log) -> None:
        """Take one update on the next batch, and log it."""
        began = time.perf_counter()
        batch = self.batches.at(self.learner.version)
        update = sft_step(self.learner, batch)
        seconds = time.perf_counter() - began
        step = update.version
        self.skipped = count_skipped(update, self.skipped)
        line = {"kind": "imitation", "step": step, "version": step, "imitation/epoch": step / self.batches.per_epoch}
        if update.skipped is not None:
            line |= skipped_line(update, step)
            log.view.note(f"update {step} was skipped: {update.skipped.cause}")
        log.metrics(line | update.metrics | {"imitation/sequences": len(batch)})
        timing = {"seconds": seconds, "tokens_per_second": update.tokens / seconds}
        log.timing({"step": step} | timing)
        if ends_run(update, self.config.learn.skip_limit):
            stop_after(log.run, update, lr=self.config.learn.lr, sampled=False)
        log.view.step(
            step, {key: value for key, value in update.metrics.items() if not isinstance(value, list)}, timing
        )

    def measure(self, log: Log, when: When) -> None:
        """Measure the held-out loss of the current weights, if anything is held out."""
        if not self.data.held_out:
            return
        version = self.learner.version
        found = measure_fit(self.learner, self.data.held_out)
        log.metrics(
            {
                **{"kind": "held_out", "step": version, "version": version},
                "held_out/loss": found.loss,
                "held_out/perplexity": math.exp(min(found.loss, MOST_NATS)),
                "held_out/accuracy": found.accuracy,
                "held_out/tokens": found.tokens,
            }
        )
        log.view.note(
            f"update {version}: held-out loss {found.loss:.4f} nats per token, next token right in {found.accuracy:.1%}"
        )

    def state(self) -> dict[str, Any]:
        """Name the data, so that a resumed run notices other data, and the updates skipped in a row."""
        return {"examples": self.data.fingerprint, "skipped": self.skipped}

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Continue after the learner's version, if the data is the same."""
        if state["examples"] != self.data.fingerprint:
            named = ", ".join((*self.config.task.train, *self.config.task.test))
            raise CheckpointError(
                f"{named} or the tokenizer of {self.config.model.path} changed since {path} began, so the run "
                "cannot be continued. Restore them, or start a new run."
            )
        if type(state["skipped"]) is not int:
            raise TypeError(f"skipped is {state['skipped']!r}, and not a number of updates")
        self.skipped = state["skipped"]

    def summary(self, lines: list[dict[str, Any]], path: Path) -> Summary:
        """Compare the held-out loss before and after, and count updates."""
        measured: list[Any] = [line for line in lines if line["kind"] == "held_out"] or [None]
        updates = [line for line in lines if line["kind"] == "imitation"]
        return {
            "before": measured[0],
            "after": measured[-1],
            "updates": len(updates),
            "skipped": sum(line["kind"] == "skipped" for line in lines),
            "tokens": sum(line["tokens"] for line in updates),
        }

    def card(self, summary: Summary) -> str:
        """The README.md of the trained model."""
        return sft_card(self.config, summary, describe(self.data.counts))

    def show(self, summary: Summary, path: Path) -> None:
        """Print the held-out loss before and after."""
        before, after = summary["before"], summary["after"]
        if before is not None:
            shown = (
                ("loss, nats per token", "held_out/loss", ".4f"),
                ("perplexity", "held_out/perplexity", ".3f"),
                ("next token right", "held_out/accuracy", ".1%"),
            )
            rows = [(name, f"{before[key]:{how}}", f"{after[key]:{how}}") for name, key, how in shown]
            summary_table(counted(len(self.data.held_out), "held-out demonstration"), rows)
        say(
            f"{counted(summary['updates'], 'update')} on {summary['tokens']:,.0f} response tokens in "
            f"{summary['training_seconds']:.0f} s of training"
        )

    def next_steps(self, path: Path) -> list[str]:
        """Reinforcement learning that starts from the trained model, and the report."""
        warm = f"--model.path {path / 'model'} --model.chat {self.config.model.chat}"
        return [f"bapo train RECIPE {warm}", f"bapo report {path}", upload(self.config, path / "model")]


resume = partial(life_cycle.resume, SupervisedTraining, SftConfig)
"""Continue the run in a directory, as `life_cycle.resume` says."""


def learner_settings(config: SftConfig, updates: int) -> LearnerSettings:
    """The part of the configuration that the learner needs."""
    given = config.learn.warmup_updates
    return LearnerSettings(
        **optimizer_settings(config.learn),
        warmup_updates=round(config.learn.warmup * updates) if given is None else given,
        total_updates=updates,
        float32_head=config.model.float32_head,
    )
