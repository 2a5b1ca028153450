"""Everything about a run that can be wrong and can be known without torch, found in one go.

    place      the run directory can be made
    model      a local model is there, and has room for the responses
    parts      the optional packages that the configuration asks for are installed
    data       the rows can be read, and have a prompt and an answer
    reward     the verifier can be found, and gives a real row a score
    sizes      there are as many held-out problems as are asked for

Loading torch and a model takes minutes for large models, so mistakes that need neither are reported before, all of them
in one message. The data that was read for this is handed on, so that it is not read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from bapo.config.base import LogConfig, ModelConfig
from bapo.config.numerals import counted
from bapo.config.run import Config, TaskConfig
from bapo.config.sft import SftConfig, SftTaskConfig
from bapo.core.settings import OBJECTIVE_OPTIONS
from bapo.demo import model_path
from bapo.runs import files
from bapo.runs.write import why_not_out
from bapo.tasks.data.problems import (
    Demonstration,
    LoadReport,
    hold_out,
    load_demonstrations,
    load_problems,
    without_overlap,
)
from bapo.tasks.judge import JUDGE, Judge
from bapo.tasks.verify.functions import DOES_NOT_APPLY
from bapo.tasks.verify.scorers import MATH, Verifier, check_answers, open_function
from bapo.types import Problem

WRITTEN = ("{}", r"\boxed{{{}}}", "<answer>{}</answer>", "#### {}", "The answer is {}.")
"""Ways to write the reference answer as a response."""
PARTS = ("train", "test")


Item = TypeVar("Item", Problem, Demonstration)
Demonstrations = tuple[list[Demonstration], list[Demonstration], list[LoadReport]]
"""Those to learn from, those only to be measured on, and what became of the rows of each."""


@dataclass(frozen=True)
class TaskData:
    """The problems to train on and those that are held out, and what became of the rows."""

    train: list[Problem]
    test: list[Problem]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Examined:
    """What was found out about a run."""

    wrong: list[str]
    """Every mistake, in a line each."""
    data: TaskData | None = None
    """The problems, if the task is made of data and they could be read."""
    demonstrations: Demonstrations | None = None
    """The same, of supervised training."""


def examine(config: Config | SftConfig) -> Examined:
    """Look for everything that would stop a run of `bapo train` or `bapo sft`."""
    wrong = [] if (reason := why_not_out(config.out)) is None else [reason]
    wrong += _model(config.model, 0 if isinstance(config, SftConfig) else config.rollout.max_tokens)
    wrong += _trackers(config.log)
    if isinstance(config, SftConfig):
        try:
            return Examined(wrong, demonstrations=load_sft(config.task))
        except (ValueError, OSError) as error:
            return Examined([*wrong, *str(error).splitlines()])
    wrong += [*_packages(config), *wrong_options(config)]
    if config.task.name != "data" or config.task.plays:
        return Examined(wrong)  # an environment is made, and its data are read, with the other parts of the run
    data = None
    verifiers = {
        name: found
        for name in config.task.rewards
        if name not in (MATH, JUDGE) and (found := _opened(config.task, name))
    }
    if config.task.train and (config.task.test or config.task.holdout):
        try:
            whole_rows = any(found.takes_columns for found in verifiers.values() if not isinstance(found, str))
            data = load_task(config.task, whole_rows=whole_rows)
        except (ValueError, OSError) as error:
            wrong += str(error).splitlines()
    wrong += _reward(config.task, verifiers, data)
    if data is not None:
        wrong += _sizes(config, data)
    return Examined(wrong, data)


def load_task(task: TaskConfig, *, whole_rows: bool = False) -> TaskData:
    """Read the problems of a task that is made of data. One ValueError says what is wrong with either part.

    `whole_rows`: the verifier expects all columns.
    """
    options: dict[str, Any] = task.model_dump(include={"prompt_column", "answer_column", "template"})
    options["whole_rows"] = whole_rows
    (train, test), reports = _both_parts(
        task, lambda sources: load_problems(sources, **options) if sources else ([], None)
    )
    notes = [f"task.{name}: {report}" for name, report in zip(PARTS, reports, strict=True) if report is not None]
    if not task.test:
        train, test = hold_out(train, task.holdout)
        notes.append(f"task.holdout={task.holdout:g}: {counted(len(test), 'problem')} of task.train held out")
        if not test:
            raise ValueError(
                f"task.holdout={task.holdout:g} holds out nothing, because task.train has one problem. Give more "
                "problems, or set task.test instead."
            )
    return TaskData(train, test, notes)


def load_sft(task: SftTaskConfig) -> Demonstrations:
    """Read the demonstrations to learn from and those of task.test. One ValueError says what is wrong with both."""
    options: dict[str, Any] = task.model_dump(include={"prompt_column", "response_column", "template", "box_answers"})
    if not task.train:
        raise ValueError(
            'task.train is empty, so there is nothing to learn from. Set it, for example to ["gsm8k:train"] or to a '
            ".jsonl file whose rows have a prompt and a response."
        )
    parts, reports = _both_parts(task, lambda names: load_demonstrations(names, **options) if names else ([], None))
    return *parts, [report for report in reports if report is not None]


def _both_parts(
    task: TaskConfig | SftTaskConfig, load: Callable[[tuple[str, ...]], tuple[list[Item], LoadReport | None]]
) -> tuple[tuple[list[Item], list[Item]], list[LoadReport | None]]:
    """What is loaded of task.train and of task.test, and the reports."""
    loaded, wrong = [], list[str]()
    for name in PARTS:
        try:
            loaded.append(load(getattr(task, name)))
        except ValueError as error:
            wrong.append(f"task.{name}: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    (train, of_train), (test, of_test) = loaded
    return (train, test), [of_train, of_test]


def wrong_options(config: Config) -> Iterator[str]:
    """Options that the objective does not have."""
    name, options = config.objective.name, config.objective.options
    known = OBJECTIVE_OPTIONS.get(name, ())
    for option in sorted(options.keys() - set(known)) if name in OBJECTIVE_OPTIONS else ():
        yield (
            f"objective.options.{option} is not an option of {name!r}, which takes: {', '.join(known) or 'none'}. "
            "Remove it, or correct its name."
        )


def _model(model: ModelConfig, response: int) -> Iterator[str]:
    """What is wrong with a model on this machine. A name on the hub is left to the hub."""
    path = model_path() if model.path == "demo" else Path(model.path).expanduser()
    looks_local = model.path.startswith((".", "/", "~")) or model.path.count("/") > 1 or model.path.endswith(".gguf")
    if not path.exists():
        if looks_local:
            yield (
                f"model.path={model.path!r}: there is no such file or directory. Check the path; it is relative to "
                f"{Path.cwd()}. A name on the hub has the form owner/name."
            )
        return
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        yield (
            f"model.path={model.path!r} holds no config.json, so it is not the directory of a transformers model. Give "
            'such a directory, a GGUF file, a name on the hub, or "demo".'
        )
    yield from no_room(model, response)


def no_room(model: ModelConfig, response: int) -> Iterator[str]:
    """Says so if a response could fill the whole context. How long the prompts are is known only with a tokenizer."""
    path = model_path() if model.path == "demo" else Path(model.path).expanduser()
    positions = model_settings(path).get("max_position_embeddings")
    if isinstance(positions, int) and response >= positions:
        yield (
            f"rollout.max_tokens={response} leaves no room for a prompt: {model.path!r} has {positions} positions. Set "
            f"rollout.max_tokens to at most {positions} less the tokens of the longest prompt; once nothing else is "
            "wrong, `bapo train --dry-run` says how many that is."
        )


def model_settings(path: Path) -> dict[str, Any]:
    """The settings of a language model in a directory; none if they cannot be read."""
    if not (path / "config.json").is_file():
        return {}
    try:
        settings = files.object_in((path / "config.json").read_bytes())
        return dict(settings.get("text_config") or settings)
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _packages(config: Config) -> Iterator[str]:
    """Optional packages that are asked for and not installed."""
    wanted = [
        (config.model.lora.rank > 0, f"model.lora.rank={config.model.lora.rank}", "peft", "lora"),
        (config.model.path.endswith(".gguf"), f"model.path={config.model.path!r}", "gguf", "gguf"),
        (config.task.name == "gym", "task.name='gym'", "reasoning_gym", "math"),
        (config.cluster.on, f"cluster.rollouts={config.cluster.rollouts}", "ray", "ray"),
        (config.cluster.on and config.cluster.engine == "vllm", "cluster.engine='vllm'", "vllm", "vllm"),
    ]
    return (line for needed, *what in wanted if needed for line in _missing(*what))


def _trackers(log: LogConfig) -> Iterator[str]:
    """Trackers that are asked for and not installed, or asked for twice."""
    for name in sorted(set(log.to)):
        yield from _missing(f"log.to={name!r}", name, name)
        if log.to.count(name) > 1:
            yield f"log.to names {name!r} twice. Name it once."


def _missing(key: str, package: str, extra: str) -> Iterator[str]:
    if find_spec(package) is None:
        yield (
            f"{key} needs {package.replace('_', '-')}, which is not installed. Install it with: pip install "
            f"'bapo[{extra}]'"
        )


def _opened(task: TaskConfig, name: str) -> Verifier | str:
    """What scores responses with a function, or why it cannot."""
    limits: dict[str, Any] = {"seconds": task.reward_seconds, "memory_mb": task.reward_memory_mb}
    try:
        return open_function(name, **limits, workers=1, retries=task.reward_retries, isolated=task.reward_isolated)
    except ValueError as error:
        return str(error)


def _reward(task: TaskConfig, verifiers: Mapping[str, Verifier | str], data: TaskData | None) -> Iterator[str]:
    """What is wrong with the verifiers, which are tried on a real row where there is one."""
    if MATH in task.rewards:
        yield from _missing("task.reward='math'", "math_verify", "math")
        try:
            check_answers([] if data is None else [*data.train, *data.test], task.rewards)
        except ValueError as error:
            yield f"task.reward: {error}"
    if JUDGE in task.rewards:
        try:
            judge = make_judge(task)
        except ValueError as error:
            yield str(error)
        else:
            assert judge is not None
            judge.close()
    for name, verifier in verifiers.items():
        if isinstance(verifier, str):
            yield f"task.reward: {verifier}"
            continue
        problem, failures = data.train[0] if data else None, list[str]()
        if problem is not None and verifier.may_be_tried:
            for response in written_answers(problem):
                (score,) = verifier.scores([(problem, response)])
                if score.reward is not None or score.failure == DOES_NOT_APPLY:
                    break
                failures.append(score.failure)
            else:
                yield (
                    f"task.reward={name!r} fails on the first problem of task.train, even if the response is its "
                    f"reference answer {problem.answer!r}: {failures[0]}. Correct the function; it is called with "
                    f"{verifier.called_with}, as far as it names them."
                )
        verifier.close()


def make_judge(task: TaskConfig) -> Judge | None:
    """The judge that a task asks; None if it asks none. ValueError if its rubric or its key is missing."""
    if JUDGE not in task.rewards:
        return None
    asked = task.judge.model_dump() | {"rubric": task.judge.rubric_text}
    return Judge(**asked, concurrency=task.reward_workers or 32)


def written_answers(problem: Problem) -> list[str]:
    """The reference answer, written as responses usually write theirs."""
    first = problem.answer[0] if isinstance(problem.answer, list) and problem.answer else problem.answer
    return [way.format(first) for way in WRITTEN]


def _sizes(config: Config, data: TaskData) -> Iterator[str]:
    held_out, wanted = len(data.test), config.eval.problems
    if wanted is not None and wanted > held_out:
        yield (
            f"eval.problems={wanted}, but the task holds out only {counted(held_out, 'problem')}. Set "
            f"eval.problems <= {held_out}, or leave it out."
        )
    left, _ = without_overlap(data.train, data.test)
    if not left:
        yield ("task.train has no problem left: all of its problems are in task.test too. Give other data to train on.")
