"""A job: what one kind of run does between its beginning and its end, as `life_cycle.py` drives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.learner import Learner, Learns
from bapo.models import Policy
from bapo.models.export import write_model
from bapo.train.build import make_policy
from bapo.train.log import Log
from bapo.train.team import Team
from bapo.train.together import gather_into, on_the_cpu

Summary = dict[str, Any]
When = Literal["before", "during", "after"]


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

    def watched(self, log: Log) -> None:  # noqa: B027 - most jobs have nothing to do
        """Called when there is somewhere to report to, before anything is done."""

    @abstractmethod
    def advance(self, log: Log) -> None:
        """Take one step and log it: when this returns, every line about what happened so far is in the logs."""

    @abstractmethod
    def measure(self, log: Log, when: When) -> None:
        """Measure how good the model is now and log it."""

    def put_off(self) -> Callable[[Log], None] | None:
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
    def summary(self, lines: list[dict[str, Any]]) -> Summary:
        """The results of the run, from the lines of metrics.jsonl."""

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

    def saved(self, checkpoint: Path) -> None:  # noqa: B027 - most jobs have nothing to do
        """Called when a checkpoint of the present state is complete."""

    def export(self, path: Path, card: str, team: Team) -> None:
        """Write the trained model so that transformers and vLLM can load it, and low-rank additions separately."""
        policy = self.policy
        if team.size > 1:  # the weights are in shards
            assert isinstance(self.learner, Learner)
            whole = make_policy(on_the_cpu(self.config)) if team.leads else None
            gather_into(None if whole is None else whole.model, self.learner)
            policy = whole or policy
        team.lead(lambda: write_model(policy, path, card, self.temperature, base=self.config.model.path))

    def close(self) -> None:  # noqa: B027 - most jobs have nothing to do
        """End what was started for the run. Called last, whatever happened."""
