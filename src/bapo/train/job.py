"""A job: what one kind of run does between its beginning and its end, as `life_cycle.py` drives it; its log and steps.

An update may be skipped, for one of two reasons. Each skipped update gets a line of its own kind in metrics.jsonl.

    its numbers are not finite           the run stops after `learn.skip_limit` of them in a row: chances are that the
    (`learn/health.py`)                  policy has diverged, and no later update would be taken either
    sampler and learner have drifted     the run stops at once: every ratio is wrong, and nothing would mend it
    apart (`learn/health.py`)

The tokens of the last one are kept as `skipped/update-000012.safetensors`, a dump that `bapo diagnose` reads.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, cast

from bapo.buffer import BufferMetrics
from bapo.config.errors import DriftedApart
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.learner import Learner, Learns, Update
from bapo.models.export import write_model
from bapo.models.policy import Policy
from bapo.rollout.scheduler import SchedulerMetrics
from bapo.runs.metrics import check_declared
from bapo.runs.write import RunDirectory
from bapo.screen.view import View
from bapo.train.scoring import Failing, Scored, response_metrics
from bapo.train.torchrun import Team, gathered
from bapo.train.trackers import Trackers
from bapo.types import Group

Summary = dict[str, Any]
When = Literal["before", "during", "after"]


@dataclass(frozen=True)
class Log:
    """Where a job reports what it did: the files of its run, the screen, and the trackers that it was asked to tell."""

    run: RunDirectory
    view: View
    trackers: Trackers = field(default_factory=Trackers)

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Append lines to metrics.jsonl. Every key must be declared."""
        for line in lines:
            check_declared(line)
        self.run.append("metrics.jsonl", *lines)
        self.trackers.send(*lines)

    def timing(self, line: dict[str, Any]) -> None:
        """Append a line to timing.jsonl."""
        self.run.append("timing.jsonl", line)
        self.trackers.send({"kind": "timing"} | line)


@dataclass(frozen=True)
class HeldLog(Log):
    """Keeps the lines of metrics.jsonl until others, which belong before them, are written."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Keep these lines, to be written later."""
        self.lines.extend(lines)


class Job(ABC):
    """What one kind of run does between its beginning and its end."""

    unit: ClassVar[str]
    """What the run counts: "step" or "update"."""
    shows_samples: ClassVar[bool]
    """Whether there are responses to look at."""
    config: Config | SftConfig
    policy: Policy
    learner: Learns
    title: str
    """A few words that say what is trained."""
    total: int
    """How many steps the whole run has."""
    notes: list[str]
    """What a person should know before training begins."""
    unmeasured: bool = False
    """Whether a measurement is due after the last step: a stop has cut it short."""
    sampling: Mapping[str, Any] | None = None
    """How the trained model is meant to be sampled; None: at temperature 1."""

    @property
    @abstractmethod
    def done(self) -> int:
        """How many steps are completed."""

    def watched(self, log: Log) -> None:  # noqa: B027 - most jobs have nothing to do
        """Called when there is somewhere to report to, before anything is done."""

    @abstractmethod
    def advance(self, log: Log) -> None:
        """Take one step and log it: when this returns, every line about what happened so far is in the logs."""

    @abstractmethod
    def measure(self, log: Log, when: When) -> None:
        """Measure how good the model is now and log it."""

    def measure_later(self) -> Callable[[Log], None] | None:
        """Set aside what a measurement before training needs. Returns what measures it after the first step.

        None: there is nothing to gain, or it cannot be set aside, so measure before the first step.
        """
        return None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything besides the learner that the next step depends on, as plain JSON data.

        It only looks. If anything happened here, the logs of the checkpoint would not tell of it.
        """

    @abstractmethod
    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Continue from this state. Raises CheckpointError if the data changed since the run in `path` began, or if the
        state does not fit its logs. Nothing in `path` is changed before or by this."""

    @abstractmethod
    def summary(self, lines: list[dict[str, Any]], path: Path) -> Summary:
        """The results of the run in `path`, from the lines of its metrics.jsonl."""

    @abstractmethod
    def card(self, summary: Summary) -> str:
        """The README.md of the trained model."""

    @abstractmethod
    def show(self, summary: Summary, path: Path) -> None:
        """Print what training changed."""

    @abstractmethod
    def next_steps(self, path: Path) -> list[str]:
        """Commands that a person may want to give next."""

    def files(self) -> dict[str, Any]:
        """More JSON files for the run directory, besides the usual ones."""
        return {}

    def export(self, path: Path, card: str, team: Team) -> None:
        """Write the trained model so that transformers and vLLM can load it, and low-rank additions separately."""
        policy = self.policy
        if team.size > 1:  # the weights are in shards
            assert isinstance(self.learner, Learner)
            policy = gathered(self.learner, self.config, leads=team.leads) or policy
        team.lead(lambda: write_model(policy, path, card, self.sampling or {}, base=self.config.model.path))

    def close(self) -> None:  # noqa: B027 - most jobs have nothing to do
        """End what was started for the run. Called last, whatever happened."""


# Steps.


@dataclass
class RunState:
    """Where a run stands, beyond what its parts remember themselves."""

    step: int = 0  # completed steps
    groups: int = 0  # groups admitted so far; the next one's id
    owed: int = 0  # groups without a signal (filtered, dropped) that no later step has made up for yet
    taken: int = 0  # asynchronous: groups that have come back and were given to a rollout, with rewards or without
    skipped: int = 0  # updates skipped in a row, up to the last one
    failing: Failing = field(default_factory=Failing)  # groups in a row on which the verifier failed altogether
    drift: str = ""  # how far sampler and learner were apart when they were first found to be, in words
    windows: list[int] = field(default_factory=list)  # asynchronous: groups admitted up to each open window


@dataclass(frozen=True)
class StepRecord:
    """What happened in one step."""

    step: int
    rollout: dict[str, Any]
    updates: list[Update]
    samples: list[Group]
    scored: Scored
    timing: dict[str, float]


def recorded(
    step: int,
    groups: list[Group],
    scored: Scored,
    metrics: tuple[SchedulerMetrics, BufferMetrics, int],  # of sampling and of the buffer, and how many were admitted
    updates: list[Update],
    times: tuple[float, float, float],  # when the step began, its updates began and they ended
    dropped: Sequence[Group] = (),
) -> StepRecord:
    """What happened in a step, as it is logged."""
    began, rolled, ended = times
    sampled, buffer, admitted = metrics
    return StepRecord(
        step=step,
        rollout={
            **response_metrics(groups, len(scored.failures), scored.judged, dropped),
            **{f"rollout/{name}": value for name, value in asdict(sampled).items()},
            **{f"buffer/{name}": value for name, value in asdict(buffer).items()},
            "rollout/admitted": admitted,
        },
        updates=updates,
        samples=groups[:1],
        scored=scored,
        timing={
            "seconds": ended - began,
            "rollout_seconds": rolled - began,
            "learn_seconds": ended - rolled,
            "tokens_per_second": (sampled.sampled_tokens + sum(u.tokens for u in updates)) / (ended - began),
        },
    )


# Skipped updates.

WITHOUT_POLICY = ("logprobs", "entropy", "targets", "sequence_ids", "update")
"""What is known of tokens that no policy sampled."""


IN_A_ROW = "skipped/in_a_row"
"""The metric of a skipped update that counts those up to it."""


def count_skipped(update: Update, before: int) -> int:
    """How many updates were skipped in a row, up to this one, which its metrics say from now on."""
    if update.skipped is None:
        return 0
    update.metrics[IN_A_ROW] = before + 1
    return before + 1


def ends_run(update: Update, limit: int) -> bool:
    """Whether no update may follow this one, of which `limit` may be skipped in a row."""
    return update.skipped is not None and (update.skipped.drifted or cast(int, update.metrics[IN_A_ROW]) >= limit)


def skipped_line(update: Update, step: int) -> dict[str, Any]:
    """The line of metrics.jsonl for an update that was skipped."""
    assert update.skipped is not None
    line = {"kind": "skipped", "step": step, "version": update.version} | update.metrics
    return line | {"skipped/cause": update.skipped.cause}


def stop_after(run: RunDirectory, update: Update, *, lr: float, sampled: bool = True) -> NoReturn:
    """End the run, and keep the tokens of this skipped update. `sampled`: a policy did, so there is a clip to see."""
    assert update.skipped is not None
    name, tokens = f"skipped/update-{update.version:06d}.safetensors", update.skipped.tokens
    run.write_arrays(name, {key: tensor.numpy() for key, tensor in tokens.items() if sampled or key in WITHOUT_POLICY})
    look = f"look at it with `bapo diagnose {run.path / name}`" if sampled else f"see logprobs in {run.path / name}"
    if update.skipped.drifted:
        gap = cast(float, update.metrics["anchor_gap"])
        enough = math.ceil(20 * gap + 1) / 10  # this update would have passed, with some room
        raise DriftedApart(
            f"update {update.version} was not taken, because its ratios would mean nothing: {update.skipped.cause}\n"
            f"The batch is saved; {look}. The gap may be learn.anchor_limit at most. If you know why it is larger and "
            f"want to go on all the same: `bapo resume {run.path} --learn.anchor_limit {enough:g}`."
        )
    raise FloatingPointError(
        f"{update.metrics[IN_A_ROW]} updates in a row were skipped, up to update {update.version}: "
        f"{update.skipped.cause}. They changed no weight. The batch of the last one is saved; {look}. "
        f"Lower learn.lr (now {lr:g}), or check that the model in model.path is sound."
    )
