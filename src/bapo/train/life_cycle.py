"""The life of a run, whatever it trains: start, resume, save, stop, summarise.

    measure, save; then step after step: log, measure now and then, save now and then; measure, summarise, export

What a step is, what is measured and what a checkpoint must keep besides the learner is the `Job`'s: reinforcement
learning (run.py) or supervised training (sft.py). A checkpoint is saved after every `checkpoint_every` steps, after the
last one, and when the run is asked to stop. `summary.json` is written last, so its presence means that the run is
complete.
"""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from bapo.config.errors import ConfigError, Interrupted
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.learner import Learner
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
    """Where a job writes what it did: the files of its run, and the screen."""

    run: RunDirectory
    view: View

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Lines of metrics.jsonl; every key must be declared."""
        for line in lines:
            check_declared(line)
        self.run.append("metrics.jsonl", *lines)


class Job(ABC):
    """What one kind of run does between its beginning and its end."""

    unit: ClassVar[str]
    """What is counted: "step" or "update"."""
    shows_samples: ClassVar[bool]
    """Whether there are responses to look at."""
    config: Config | SftConfig
    policy: Policy
    learner: Learner
    temperature: float = 1.0
    """At which the trained model is meant to be sampled."""

    @property
    @abstractmethod
    def done(self) -> int:
        """Steps completed."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Steps of the whole run."""

    @property
    @abstractmethod
    def measure_every(self) -> int:
        """Steps between measurements on the way; 0: none."""

    @abstractmethod
    def title(self) -> str:
        """What is trained, in a few words."""

    @abstractmethod
    def notes(self) -> list[str]:
        """What a person should know before it begins."""

    @abstractmethod
    def advance(self, log: Log) -> None:
        """One step, and its lines."""

    @abstractmethod
    def measure(self, log: Log, when: When) -> None:
        """How good the model is now, and its lines."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Plain JSON data: all that the next step depends on, besides the learner."""

    @abstractmethod
    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Go on from there; a CheckpointError if the data changed since the run in `path` began."""

    @abstractmethod
    def summary(self, lines: list[dict[str, Any]]) -> Summary:
        """What came out, from the lines of metrics.jsonl."""

    @abstractmethod
    def card(self, summary: Summary) -> str:
        """The README.md of the trained model."""

    @abstractmethod
    def show(self, summary: Summary, path: Path) -> None:
        """Print what training changed."""

    def files(self) -> dict[str, Any]:
        """JSON files of the run directory besides the usual ones."""
        return {}


def start(make: Callable[[Kind], Job], config: Kind, *, plain: bool | None) -> Summary:
    """Train from the beginning; returns the summary."""
    config = resolve(config)
    job = _made(make, config)
    run = RunDirectory.create(config)
    with run.held():
        for name, value in job.files().items():
            run.write(name, value)
        return _live(job, run, plain=plain)


def resume(make: Callable[[Kind], Job], schema: type[Kind], path: Path, *, plain: bool | None) -> Summary:
    """Continue a run from its newest checkpoint; a complete run only returns its summary."""
    run = RunDirectory(path)
    config = run.config(schema)
    if (finished := run.summary()) is not None:
        return finished
    with run.held():
        source = checkpoint.newest(run.path / "checkpoints")
        job = _made(make, resolve(config))
        state = checkpoint.load(source, job.learner)
        job.restore(state, run.path)
        run.cut(state["logs"])
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
                f"stopped after {job.unit} {job.done}, which is saved. Continue with: bapo resume {run.path}"
            )
        job.measure(log, "after")
        summary = _summarize(job, run)
        _export(job, run, job.card(summary))
    run.write("summary.json", summary)
    job.show(summary, run.path)
    print(f"run directory   {run.path}\ntrained model   {run.path / 'model'}")
    return summary


def _save(job: Job, run: RunDirectory) -> None:
    """Everything to continue from after this step, the logs flushed and as long as they are now."""
    run.flush()
    state = job.state() | {"logs": run.sizes()}
    checkpoint.save(run.path / "checkpoints", job.done, job.learner, state, keep=job.config.checkpoint_keep)


def _summarize(job: Job, run: RunDirectory) -> Summary:
    metrics, timing = (
        [json.loads(line) for line in (run.path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "timing.jsonl")
    )
    return job.summary(metrics) | {"training_seconds": sum(line["seconds"] for line in timing)}


def _export(job: Job, run: RunDirectory, card: str) -> None:
    """The trained model, loadable by transformers and vLLM; low-rank additions, if any, also by themselves."""
    save_policy(job.policy, run.path / "model", card=card, temperature=job.temperature)
    if job.policy.adapters is not None:
        save_additions(job.policy, run.path / "adapter", card=card, base=job.config.model.path)


@contextmanager
def _stop_on_signal(stopping: list[str]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the step finish and be saved; the second one ends at once.

    Measurements before and after training are not covered: they change nothing, so a signal ends them at once.
    """

    def ask(number: int, _frame: Any) -> None:
        if stopping:
            raise KeyboardInterrupt
        stopping.append(signal.Signals(number).name)
        print("\nstopping after this step; once more to stop at once", flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
