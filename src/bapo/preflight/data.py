"""The data of a run, read once: problems for `bapo train`, demonstrations for `bapo sft`.

Reading needs neither torch nor the model. What depends on the model (lengths in tokens) comes later, in `train`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bapo.config.sections import TaskConfig
from bapo.config.sft import SftTaskConfig
from bapo.tasks.data.problems import Demonstration, LoadReport, load_demonstrations, load_problems
from bapo.types import Problem


@dataclass(frozen=True)
class TaskData:
    """The problems of task.train and task.test, and what became of the rows."""

    train: list[Problem]
    test: list[Problem]
    notes: list[str] = field(default_factory=list)


Demonstrations = tuple[list[Demonstration], list[Demonstration], list[LoadReport]]
"""Those to learn from, those only to be measured on, and what became of the rows of each."""


def load_task(task: TaskConfig) -> TaskData:
    """Read the problems of a task that is made of data. One ValueError says what is wrong with either part."""
    options = {"prompt_column": task.prompt_column, "answer_column": task.answer_column, "template": task.template}
    loaded: dict[str, list[Problem]] = {}
    notes, wrong = [], []
    for name, sources in (("train", task.train), ("test", task.test)):
        try:
            loaded[name], report = load_problems(sources, **options)
            notes.append(f"task.{name}: {report}")
        except ValueError as error:
            wrong.append(f"task.{name}: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    return TaskData(loaded["train"], loaded["test"], notes)


def load_sft(task: SftTaskConfig) -> Demonstrations:
    """Read the demonstrations to learn from and those of task.test. One ValueError says what is wrong with both."""
    options: dict[str, Any] = task.model_dump(include={"prompt_column", "response_column", "template", "box_answers"})
    if not task.train:
        raise ValueError(
            'task.train is empty, so there is nothing to learn from. Set it, for example to ["gsm8k:train"] or to a '
            ".jsonl file whose rows have a prompt and a response."
        )
    lists: list[list[Demonstration]] = []
    reports, wrong = [], []
    for name, sources in (("train", task.train), ("test", task.test)):
        try:
            found, report = load_demonstrations(sources, **options) if sources else ([], None)
        except ValueError as error:
            wrong.append(f"task.{name}: {error}")
            continue
        lists.append(found)
        reports += [report] if report is not None else []
    if wrong:
        raise ValueError("\n".join(wrong))
    train, held_out = lists
    return train, held_out, reports
