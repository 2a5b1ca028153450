"""A run of supervised training, as `life_cycle.py` drives it: the warm start of reinforcement learning.

Demonstrations go in, a model that writes such responses comes out:

    every update takes the next batch of the shuffled demonstrations, packs it and raises the log-prob of its responses

    ids = prompt as the sampler will put it  +  response  +  the token that ends a response

The response is tokenised separately from the prompt, because the model also samples it separately, one token at a time
after the prompt's tokens. The end token is learned too; without it the model would never stop. It is the token that the
chat template writes after an assistant's turn if the sampler stops there, otherwise the tokenizer's own end token.

Held-out prompts are those with the smallest ids. Ids are hashes of questions, so the held-out prompts do not depend on
the seed or on the order of the rows, and all responses to one prompt are on the same side.

Learner, packing, checkpoints, run directory and live view are the same as in reinforcement learning. Nothing is
sampled, so these files say nothing about what the model writes: `bapo eval` measures that. The directory is that of
run.py without what is about responses. In addition, and otherwise:

data.json        what happened to the rows of the data, and how many updates they make
metrics.jsonl    one line per update (kind imitation) and per measurement of the held-out loss (kind held_out)
summary.json     held-out loss before and after; written last, so its presence means the run is complete
"""

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bapo.config.errors import CheckpointError
from bapo.config.numerals import counted
from bapo.config.sft import SftConfig, SftTaskConfig
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.supervised import measure_fit, sft_step
from bapo.models.policy import Policy, end_of_turn
from bapo.preflight.examine import Demonstrations, load_sft
from bapo.screen.terminal import say
from bapo.screen.view import summary_table
from bapo.tasks.data.problems import Demonstration, smallest
from bapo.train import life_cycle
from bapo.train.card import sft_card, upload
from bapo.train.job import Job, Log, Summary, When, count_skipped, ends_run, skipped_line, stop_after
from bapo.train.machine import make_policy, on_the_cpu, optimizer_settings, slow_precision
from bapo.train.torchrun import ALONE, Team, make_learner
from bapo.types import Message, batches_per_pass, even_part

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
        log.view.step(step, update.metrics, timing)

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


# The demonstrations.


class Encoded(NamedTuple):
    """A demonstration in the tokens of a model."""

    prompt: list[int]
    response: list[int]
    """Includes the token that ends it."""


@dataclass(frozen=True)
class SftData:
    """The demonstrations that a run learns from, those it only measures, and what happened to the rest."""

    train: list[Encoded]
    held_out: list[Encoded]
    counts: dict[str, int]
    """Rows read, demonstrations used and held out, and how many were left out for which reason."""

    @cached_property
    def fingerprint(self) -> str:
        """One value for all demonstrations, in order. A resumed run must find the same value that it began with."""
        lines = (json.dumps([encoded.prompt, encoded.response]) for encoded in (*self.train, *self.held_out))
        return sha256("\n".join(lines).encode()).hexdigest()


class Batches:
    """Batches in a shuffled order that a single number can resume: update i of (seed, epoch) is always the same.

    An epoch is cut into batches whose sizes differ by one at most, so no demonstration is left over.
    """

    def __init__(self, data: Sequence[Encoded], *, size: int, epochs: int, seed: int) -> None:
        self.data = data
        self.per_epoch = batches_per_pass(len(data), size)
        self.total = epochs * self.per_epoch
        self.seed = seed
        self._epoch, self._order = -1, list[int]()

    def at(self, update: int) -> list[Encoded]:
        """The batch of one update. Updates count from 0."""
        epoch, index = divmod(update, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.data)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)  # noqa: S311
        begin, end = even_part(len(self._order), self.per_epoch, index)
        return [self.data[i] for i in self._order[begin:end]]


def encode_demonstrations(loaded: Demonstrations, config: SftTaskConfig, policy: Policy) -> SftData:
    """Encode demonstrations in the model's tokens. Those that are too long for the model are left out and counted."""
    train, held_out, reports = loaded
    counts = {key: sum(asdict(report)[key] for report in reports) for key in COUNTED}
    encoder = Encoder(policy, config.max_tokens)
    learned = [(question(d), encoded) for d in train if (encoded := encoder(d))]
    measured = [(question(d), encoded) for d in held_out if (encoded := encoder(d))]
    names = {name for name, _ in measured} if config.test else smallest({name for name, _ in learned}, config.holdout)
    if config.test:
        counts["also_held_out"] = sum(name in names for name, _ in learned)
    else:
        measured = [pair for pair in learned if pair[0] in names]
    learned = [pair for pair in learned if pair[0] not in names]
    counts |= {"too_long": encoder.too_long, "longest": encoder.limit or 0}
    if not learned or (config.test and not measured):
        kind = "task.test" if learned else "task.train"
        raise ValueError(
            f"{kind} gives no demonstration that can be used: {describe(counts)}. Raise task.max_tokens if the model "
            "has enough positions, or choose other data."
        )
    counts |= {"train": len(learned), "held_out": len(measured)}
    return SftData([encoded for _, encoded in learned], [encoded for _, encoded in measured], counts)


COUNTED = ("read", "duplicates", "without_prompt", "without_answer")


def describe(counts: dict[str, int]) -> str:
    """Say in words what happened to the rows."""
    left_out = {
        "duplicates": "duplicates",
        "without_prompt": "without a prompt",
        "without_answer": "without a response",
        "too_long": f"longer than {counts['longest']:,} tokens",
        "also_held_out": "also held out",
    }
    parts = [f"{counts[key]:,} {words}" for key, words in left_out.items() if counts.get(key)]
    used = f", {counts['train']:,} to learn from, {counts['held_out']:,} held out" if "train" in counts else ""
    return f"{counts['read']:,} rows read{used}" + (f"; left out: {', '.join(parts)}" if parts else "")


def question(demonstration: Demonstration) -> str:
    """The id of the question. Demonstrations of one prompt share it."""
    return demonstration.id.rpartition("-")[0]


class Encoder:
    """Turns demonstrations into tokens, and counts those that are too long."""

    def __init__(self, policy: Policy, max_tokens: int | None) -> None:
        self.policy = policy
        self.end_of_text, self.end_of_chat = end_of_response(policy, ""), end_of_response(policy, [])
        positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        self.limit = min((limit for limit in (max_tokens, positions) if limit is not None), default=None)
        self.too_long = 0

    def __call__(self, demonstration: Demonstration) -> Encoded | None:
        """Encode one demonstration; None if it is longer than the limit."""
        prompt = self.policy.encode(demonstration.prompt)
        if not prompt:
            raise ValueError(
                f"the prompt {demonstration.prompt!r} has no tokens, so nothing predicts the first token of its "
                "response. Put text around it with task.template, or remove it from the data."
            )
        response = list(self.policy.tokenizer.encode(demonstration.response, add_special_tokens=False))
        end = next((i + 1 for i, token in enumerate(response) if token in self.policy.stop_ids), None)
        if end is not None and not self.policy.decode(response[end:]).strip():
            response = response[:end]  # some data sets write the end token themselves, and a line break after it
        if not response or response[-1] not in self.policy.stop_ids:
            response.append(self.end_of_text if isinstance(demonstration.prompt, str) else self.end_of_chat)
        if self.limit is not None and len(prompt) + len(response) > self.limit:
            self.too_long += 1
            return None
        return Encoded(prompt, response)


def end_of_response(policy: Policy, prompt: str | list[Message]) -> int:
    """The token that ends a response to such a prompt: one that the sampler stops at; in a chat, the template's own."""
    tokenizer = policy.tokenizer
    end = end_of_turn(tokenizer) if policy.chat or not isinstance(prompt, str) else None
    if end is not None and end in policy.stop_ids:
        return end
    return int(tokenizer.eos_token_id) if tokenizer.eos_token_id is not None else min(policy.stop_ids)
