"""The life of a run, whatever it trains: start, resume, save, stop, summarise.

    measure, save; then step after step: log, measure now and then, save now and then; measure, summarise, export

The `Job` decides what a step is, what is measured and what a checkpoint must keep besides the learner. It is either
reinforcement learning (run.py) or supervised training (sft.py). A checkpoint is saved after every `checkpoint_every`
steps, after the last step, and when the run is asked to stop. `summary.json` is written last, so its presence means
that the run is complete.
"""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from bapo.config.errors import ConfigError, Interrupted
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.learner import Learns
from bapo.models import Policy
from bapo.models.export import save_additions, save_policy
from bapo.runs.metrics import check_declared
from bapo.runs.write import RunDirectory
from bapo.screen.view import View, make_view
from bapo.train import checkpoint
from bapo.train.build import resolve

Kind = TypeVar("Kind", Config, SftConfig)
Summary = dict[str, Any]
When = Literal["before", "during", "after"]


@dataclass(frozen=True)
class Log:
    """Where a job reports what it did: the files of its run, and the screen."""

    run: RunDirectory
    view: View

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Append lines to metrics.jsonl. Every key must be declared."""
        for line in lines:
            check_declared(line)
        self.run.append("metrics.jsonl", *lines)


class Job(ABC):
    """What one kind of run does between its beginning and its end."""

    unit: ClassVar[str]
    """What the run counts: "step" or "update"."""
    shows_samples: ClassVar[bool]
    """Whether there are responses to look at."""
    config: Config | SftConfig
    policy: Policy
    learner: Learns
    temperature: float = 1.0
    """The temperature at which the trained model is meant to be sampled."""

    @property
    @abstractmethod
    def done(self) -> int:
        """How many steps are completed."""

    @property
    @abstractmethod
    def total(self) -> int:
        """How many steps the whole run has."""

    @property
    @abstractmethod
    def measure_every(self) -> int:
        """Steps between two measurements during training; 0 for none."""

    @abstractmethod
    def title(self) -> str:
        """A few words that say what is trained."""

    @abstractmethod
    def notes(self) -> list[str]:
        """What a person should know before training begins."""

    @abstractmethod
    def advance(self, log: Log) -> None:
        """Take one step and log it."""

    @abstractmethod
    def measure(self, log: Log, when: When) -> None:
        """Measure how good the model is now and log it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything besides the learner that the next step depends on, as plain JSON data."""

    @abstractmethod
    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Continue from this state. Raises CheckpointError if the data changed since the run in `path` began."""

    @abstractmethod
    def summary(self, lines: list[dict[str, Any]]) -> Summary:
        """The results of the run, from the lines of metrics.jsonl."""

    @abstractmethod
    def card(self, summary: Summary) -> str:
        """The README.md of the trained model."""

    @abstractmethod
    def show(self, summary: Summary, path: Path) -> None:
        """Print what training changed."""

    def files(self) -> dict[str, Any]:
        """More JSON files for the run directory, besides the usual ones."""
        return {}

    def saved(self, checkpoint: Path) -> None:  # noqa: B027 - most jobs have nothing to do
        """Called when a checkpoint of the present state is complete."""

    def resumed(self, path: Path) -> None:  # noqa: B027 - most jobs have nothing to do
        """Called when the run in `path` has been restored and its logs were cut back to the checkpoint."""

    def export(self, path: Path, card: str) -> None:
        """Write the trained model so that transformers and vLLM can load it, and low-rank additions separately."""
        save_policy(self.policy, path / "model", card=card, temperature=self.temperature)
        if self.policy.adapters is not None:
            save_additions(self.policy, path / "adapter", card=card, base=self.config.model.path)

    def close(self) -> None:  # noqa: B027 - most jobs have nothing to do
        """End what was started for the run. Called last, whatever happened."""


def start(make: Callable[[Kind], Job], config: Kind, *, plain: bool | None) -> Summary:
    """Train from the beginning. Returns the summary."""
    config = resolve(config)
    job = _made(make, config)
    with closing(job), (run := RunDirectory.create(config)).held():
        for name, value in job.files().items():
            run.write(name, value)
        return _live(job, run, plain=plain)


def resume(make: Callable[[Kind], Job], schema: type[Kind], path: Path, *, plain: bool | None) -> Summary:
    """Continue a run from its newest checkpoint. For a complete run, only return its summary."""
    run = RunDirectory(path)
    config = run.config(schema)
    if (finished := run.summary()) is not None:
        return finished
    with run.held():
        source = checkpoint.newest(run.path / "checkpoints")
        with closing(_made(make, resolve(config))) as job:
            state = checkpoint.load(source, job.learner)
            job.restore(state, run.path)
            run.cut(state["logs"])
            job.resumed(run.path)
            return _live(job, run, plain=plain)


def _made(make: Callable[[Kind], Job], config: Kind) -> Job:
    try:
        return make(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _live(job: Job, run: RunDirectory, *, plain: bool | None) -> Summary:
    title = f"{job.title()} · {job.config.model.path} · {run.path}"
    stopping: list[str] = []
    with make_view(job.total, title=title, plain=plain, samples=job.shows_samples) as view:
        log = Log(run, view)
        for note in job.notes():
            view.note(note)
        if job.done == 0:
            _save(job, run)
            job.measure(log, "before")
        else:
            view.note(f"resumed after {job.unit} {job.done}")
        with _stop_on_signal(stopping):
            while job.done < job.total and not stopping:
                job.advance(log)
                last = job.done == job.total
                if job.measure_every and job.done % job.measure_every == 0 and not last:
                    job.measure(log, "during")
                if job.done % job.config.checkpoint_every == 0 or last or stopping:
                    _save(job, run)
        if stopping:
            raise Interrupted(
                f"stopped after {job.unit} {job.done}, which was saved. Continue with: bapo resume {run.path}"
            )
        job.measure(log, "after")
        summary = _summarize(job, run)
        job.export(run.path, job.card(summary))
    run.write("summary.json", summary)
    job.show(summary, run.path)
    print(f"run directory   {run.path}\ntrained model   {run.path / 'model'}")
    return summary


def _save(job: Job, run: RunDirectory) -> None:
    """Save everything needed to continue after this step, including the present length of the flushed logs."""
    run.flush()
    state = job.state() | {"logs": run.sizes()}
    job.saved(checkpoint.save(run.path / "checkpoints", job.done, job.learner, state, keep=job.config.checkpoint_keep))


def _summarize(job: Job, run: RunDirectory) -> Summary:
    metrics, timing = (
        [json.loads(line) for line in (run.path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "timing.jsonl")
    )
    return job.summary(metrics) | {"training_seconds": sum(line["seconds"] for line in timing)}


@contextmanager
def _stop_on_signal(stopping: list[str]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the current step finish and saves it; the second one stops at once.

    Measurements before and after training are not covered: they change nothing, so a signal stops them at once.
    """

    def ask(number: int, _frame: Any) -> None:
        if stopping:
            raise KeyboardInterrupt
        stopping.append(signal.Signals(number).name)
        print("\nstopping after this step; press Ctrl-C again to stop at once", flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
