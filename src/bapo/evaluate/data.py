"""The data sets of an evaluation: named lists of problems, and what scores them.

`countdown` is embedded and comes with its verifier. `bapo.tasks.data` reads everything else: benchmarks, files,
directories and hub data sets, each also as name=path.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bapo.config.numerals import counted
from bapo.evaluate.settings import Settings
from bapo.tasks.countdown import Countdown
from bapo.tasks.data.problems import load_problems
from bapo.tasks.data.sources import resolve
from bapo.tasks.task import Scorer
from bapo.tasks.verify.finding import find_function
from bapo.tasks.verify.scorers import MATH, open_scorer
from bapo.types import Problem

__all__ = ["DataSet", "load_data_sets", "scorer", "verifier_identity"]


@dataclass(frozen=True)
class DataSet:
    """Problems to evaluate on."""

    name: str
    problems: list[Problem]
    own_scorer: Scorer | None = None
    """The verifier that comes with the problems."""
    note: str = ""
    """What the user should know about its rows; usually empty."""


def load_data_sets(settings: Settings) -> list[DataSet]:
    """All data sets, in order. Their names must differ, because results are stored by name."""
    found = [_load(name, settings) for name in settings.data]
    names = [data.name for data in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"--data {','.join(settings.data)} has two data sets called {twice!r}. Give one of them another name: "
            "name=path."
        )
    if "overall" in names:
        raise ValueError(
            f"--data {','.join(settings.data)} has a data set called 'overall', but the results use that name for all "
            "data sets together. Give the data set another name: name=path."
        )
    return found


def _load(name: str, settings: Settings) -> DataSet:
    if name == "countdown":
        task = Countdown()
        problems = list(task.test)
        return DataSet(name, problems[: settings.problems], task.scores, note=_short(name, problems, settings))
    problems, report = load_problems(
        [name],
        prompt_column=settings.prompt_column,
        answer_column=settings.answer_column,
        template=settings.template,
    )
    label = resolve(name).label
    notes = [f"{label}: {report}" if report.read > report.kept else "", _short(label, problems, settings)]
    return DataSet(label, problems[: settings.problems], note="\n".join(filter(None, notes)))


def _short(label: str, problems: Sequence[Problem], settings: Settings) -> str:
    """A note about a data set that has fewer problems than were asked for."""
    if settings.problems is None or len(problems) >= settings.problems:
        return ""
    return f"{label}: has {counted(len(problems), 'problem')}, fewer than --problems {settings.problems}"


@contextmanager
def scorer(settings: Settings, *, opens_thinking: bool) -> Iterator[Scorer]:
    """The verifier of problems that have none of their own. Its processes end with the block.

    `opens_thinking`: whether a response begins in the middle of the model's thinking, see `bapo.tasks.verify.math`.
    """
    scores, close = open_scorer(
        settings.reward or MATH,
        opens_thinking=opens_thinking,
        seconds=settings.reward_seconds,
        memory_mb=settings.reward_memory_mb,
    )
    try:
        yield scores
    finally:
        close()


def verifier_identity(data_sets: Sequence[DataSet], settings: Settings) -> dict[str, str]:
    """What the rewards depend on besides the settings: the version of math-verify, or the file of a function."""
    if settings.reward is not None and settings.reward != MATH:
        file = inspect.getsourcefile(find_function(settings.reward))
        return {"reward_file": sha256(Path(file).read_bytes()).hexdigest()[:16]} if file else {}
    if settings.reward is None and all(data.own_scorer for data in data_sets):
        return {}
    try:
        return {"math_verify": version("math-verify"), "sympy": version("sympy")}
    except PackageNotFoundError:
        raise ValueError(
            "--reward math needs math-verify, which is not installed. Install it with `pip install 'bapo[math]'`, or "
            "give --reward module:function."
        ) from None
